"""The command line: help without torch, wrong use with a guess, config files, exit codes, Ctrl-C."""

import csv
import dataclasses
import importlib
import signal
import subprocess
import sys
import time

import pytest

from coneheads.lab import cli
from coneheads.lab.commands import BenchConfig
from coneheads.lab.config import SCORES
from coneheads.scores import BY_NAME
from tests.lab.programs import TINY, command, coneheads


def run(capsys, *arguments):
    """Exit code, what was printed and what was complained about."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as ended:  # jsonargparse ends the program after --help and --print_config
        code = ended.code
    return code, *capsys.readouterr()


def test_without_a_command_every_command_is_listed(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        for name, command_ in cli.COMMANDS.items():
            assert f"  {name} " in out
            assert command_.config.__doc__.splitlines()[0] in out


def test_help_of_every_command_lists_its_flags(capsys):
    for name, command_ in cli.COMMANDS.items():
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        for field in dataclasses.fields(command_.config):
            assert f"--{field.name}" in out
            assert field.metadata["help"].split()[0] in out


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["info", "--help"], ["--version"]])
def test_help_answers_in_less_than_a_second(arguments):
    start = time.perf_counter()
    assert coneheads(*arguments).returncode == 0
    assert time.perf_counter() - start < 1


def test_reading_flags_imports_no_torch():
    code = "from coneheads.lab import cli; cli.parse('bench', []); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("coneheads 0.")


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["bnech"], "bench"),
        (["bench", "--preste", "targets"], "--preset"),
        (["bench", "--preset", "tragets"], "targets"),
        (["bench", "--scores", "umbrel"], "umbral"),
        (["bench", "--passes", "foward"], "forward"),
        (["bench", "--candidates", "chunkd"], "chunked"),
        (["bench", "--dtype=float23"], "float32"),
        (["info", "--jsn"], "--json"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_guess(capsys, arguments, guess):
    code, out, complaint = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert f"did you mean '{guess}'?" in complaint
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["bench", "--seconds", "soon"], "--seconds: expected float | null; got 'soon'"),
        (["bench", "--lengths", "16,x"], "--lengths: expected tuple[int, ...]; got 'x'"),
        (["bench", "--heads", "2.5"], "--heads: expected int; got '2.5'"),
        (["bench", "--lengths"], "--lengths: expected at least one value"),
        (["bench", "--lengths", "0"], "--lengths: must be at least 1"),
        (["bench", "--size", "1"], "--size: must be at least 2"),
        (["bench", "extra"], "unrecognized arguments: extra"),
        (["bench", "--config", "nowhere.yaml"], "--config: file does not exist"),
        (["bench", "--preset", "targets", "--heads", "3"], "--heads: the preset 'targets' measures fixed rows"),
    ],
)
def test_wrong_use_is_told_in_one_sentence_and_exits_with_2(capsys, arguments, part):
    code, _, complaint = run(capsys, *arguments)
    assert code == 2
    assert part in complaint
    assert complaint.splitlines()[-1] == "See coneheads bench --help"


def test_flags_config_files_and_overrides_make_one_config(tmp_path):
    file = tmp_path / "bench.yaml"
    file.write_text("lengths: [8, 16]\nseconds: 0.5\ncausal: true\nscores: [umbral]\n")
    config = cli.parse("bench", ["--config", str(file), "--seconds", "3", "--no-causal", "--passes=forward"])
    expected = BenchConfig(lengths=(8, 16), scores=("umbral",), seconds=3.0, causal=False, passes=("forward",))
    assert config == expected
    for written in (["--lengths", "8", "16"], ["--lengths", "8,16"], ["--lengths=[8, 16]"], ["--lengths=8", "16"]):
        assert cli.parse("bench", written) == BenchConfig(lengths=(8, 16))
    assert cli.parse("bench", ["--value-size", "3"]).value_size == 3


def test_a_mistyped_key_of_a_config_file_gets_the_nearest_guess(capsys, tmp_path):
    file = tmp_path / "bench.yaml"
    file.write_text("secnds: 1\n")
    code, _, complaint = run(capsys, "bench", "--config", str(file))
    assert code == 2
    assert "'secnds', which is no flag; did you mean 'seconds'?" in complaint


def test_printed_config_is_a_config_file(capsys, tmp_path):
    _, out, _ = run(capsys, "bench", "--lengths", "8,16", "--no_memory", "--print_config")
    file = tmp_path / "bench.yaml"
    file.write_text(out)
    assert cli.parse("bench", ["--config", str(file)]) == BenchConfig(lengths=(8, 16), memory=False)


def test_configs_know_the_scores_that_there_are():
    assert set(SCORES) == set(BY_NAME)


@pytest.mark.parametrize(
    ("package", "users"),
    [
        ("jsonargparse", []),
        ("rich", ["coneheads.lab.speed.screen", "coneheads.lab.bench"]),
        ("matplotlib", ["coneheads.lab.speed.plot"]),
    ],
)
def test_a_missing_extra_is_told_in_one_sentence_before_anything_is_measured(
    capsys, monkeypatch, tmp_path, package, users
):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for user in users:
        monkeypatch.delitem(sys.modules, user, raising=False)
        parent, _, name = user.rpartition(".")
        monkeypatch.delattr(importlib.import_module(parent), name, raising=False)
    code, _, complaint = run(capsys, *TINY, "--lengths", "8,16", "--candidates", "sdpa", "--out", str(tmp_path))
    assert code == 1
    assert complaint == f"coneheads: this needs {package}, which is not installed: pip install 'coneheads[lab]'\n"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_with_130_without_a_traceback_and_keeps_the_rows(tmp_path):
    lengths = ",".join(str(length) for length in range(16, 60))  # longer than anyone waits
    arguments = [*TINY, "--lengths", lengths, "--seconds=0.5", "--candidates", "reference", "--no-memory"]
    process = subprocess.Popen(
        command(*arguments, "--out", str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    file = tmp_path / "lengths.csv"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().count("\n") > 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in complaint
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert len(rows) >= 3
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert f"interrupted: {len(rows)} rows are in {file}" in out


def test_python_m_coneheads_is_the_command_and_passes_exit_codes_on():
    done = coneheads("nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("coneheads: there is no command 'nothing'")
