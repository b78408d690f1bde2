"""The command line: help without torch, wrong use with a guess, config files, exit codes, Ctrl-C."""

import csv
import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coneheads.lab import cli, info
from coneheads.lab.config import SCORES, choices, flags
from coneheads.scores import BY_NAME
from tests.lab.programs import TINY, command, coneheads

# the commands, and those that have a task once with each
CALLS = [
    [name, *choice]
    for name, command_ in cli.COMMANDS.items()
    for choice in ([["--task", task] for task in choices(command_.config).get("task", ())] or [[]])
]
# these files read flags and do nothing with them
READERS = ("test_flags.py", "test_config.py")


def run(capsys, *arguments):
    """Exit code, what was printed and what was complained about."""
    return cli.main(list(arguments)), *capsys.readouterr()


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
        for flag in flags(command_.config).values():
            assert f"--{flag.spelled}" in out
            assert flag.help.split()[0] in out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([*call, "--help"] for call in CALLS)])
def test_help_answers_in_less_than_a_second(arguments):
    for _ in range(5):  # other tests run at the same time: the quickest of a few counts
        start = time.perf_counter()
        assert coneheads(*arguments).returncode == 0
        seconds = time.perf_counter() - start
        if seconds < 1:
            break
    assert seconds < 1


def test_reading_flags_imports_no_torch():
    reading = "".join(f"assert cli.parse({name!r}, {rest!r})\n" for name, *rest in CALLS)
    code = f"from coneheads.lab import cli\n{reading}import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_flag_is_used_by_a_test_that_runs_its_command():
    tests = Path(__file__).parents[1]
    text = "".join(file.read_text() for file in tests.rglob("*.py") if file.name not in READERS)
    used = {word.replace("-", "_").removeprefix("no_") for word in re.findall(r"--([\w-]+(?:\.[\w-]+)?)", text)}
    used |= {f"-{letter}" for letter in re.findall(r"[\"' ]-(\w)[\"' ]", text)}
    known = {
        flag
        for name, *choice in CALLS
        for flag in flags(cli.COMMANDS[name].config, {"task": choice[1]} if choice else {}).values()
    }
    unused = sorted({flag.spelled for flag in known if not {flag.spelled, f"-{flag.short}"} & used})
    assert not unused, f"no test uses {', '.join(f'--{flag}' for flag in unused)}"


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
        (["lst"], "list"),
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


def test_configs_know_the_scores_that_there_are():
    assert set(SCORES) == set(BY_NAME)


@pytest.mark.parametrize(
    ("package", "users"),
    [
        ("jsonargparse", ["coneheads.lab.flags"]),
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


def test_flags_of_bench_decide_what_is_measured(capsys, tmp_path):
    words = "--batch 2 --causal --dtype float64 --passes forward --candidates chunked --compiled_lengths 8 --no_plot"
    code, _, _ = run(capsys, *TINY, *words.split(), "--no_memory", "--name", "small", "--out", str(tmp_path))
    assert code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.csv", "small.yaml"]
    rows = list(csv.DictReader((tmp_path / "small.csv").read_text().splitlines()))
    assert {row["candidate"] for row in rows} == {"sdpa", "chunked"}
    assert {(row["B"], row["causal"], row["dtype"], row["pass"]) for row in rows} == {
        ("2", "True", "float64", "forward")
    }


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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_the_command_quietly(unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        command("train", "--print_config"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def failing(monkeypatch, error):
    """Makes `coneheads info` end with the error."""

    def fail(_):
        raise error

    monkeypatch.setattr(info, "run", fail)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "no space", "a/b"), "the disk is full: a/b"),
        (OSError(errno.ENOSPC, "no space"), "the disk is full"),
        (PermissionError(errno.EACCES, "denied", "a/b"), "permission denied: a/b"),
        (OSError(errno.EROFS, "read-only", "a/b"), "the disk can only be read: a/b"),
    ],
)
def test_a_disk_that_refuses_is_told_in_one_sentence(capsys, monkeypatch, error, sentence):
    failing(monkeypatch, error)
    assert run(capsys, "info") == (1, "", f"coneheads: {sentence}\n")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("a bug"), BrokenPipeError("not stdout's")])
def test_any_other_error_keeps_its_traceback(monkeypatch, error):
    failing(monkeypatch, error)
    with pytest.raises(type(error)):
        cli.main(["info"])


def test_python_m_coneheads_is_the_command_and_passes_exit_codes_on():
    done = coneheads("nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("coneheads: there is no command 'nothing'")
