"""`coneheads bench`: the gate before the clock, the rows, the record."""

import dataclasses

import pytest
import torch

from coneheads.lab import bench, cli, machine
from coneheads.lab.commands import BenchConfig
from coneheads.lab.config import WrongUse
from coneheads.lab.speed import candidates, parity, results
from coneheads.lab.speed.runs import Result, Run
from tests.cases import BACKEND_NAMES
from tests.lab.programs import TINY

PROMISED_COLUMNS = {
    "candidate", "score", "B", "H", "L", "S", "E", "Ev", "dtype", "causal", "pass", "median_ms", "p20_ms", "p80_ms",
    "repetitions", "ratio_to_sdpa", "peak_mb", "parity_error", "other_load", "note", "date", "commit", "coneheads",
    "torch", "python", "cpu", "level", "cores", "threads",
}  # fmt: skip


def config(**changes):
    small = {"lengths": (16,), "heads": 1, "size": 8, "value_size": 8, "seconds": 0.0, "threads": 1, "memory": False}
    return BenchConfig(**{**small, **changes})


@pytest.fixture(scope="module")
def small_bench(tmp_path_factory):
    """A whole bench of two scores, and where its results are."""
    folder = tmp_path_factory.mktemp("results")
    names = ("authors", "plain", "flex", "chunked")
    code = bench.run(
        config(
            lengths=(16, 32), scores=("penumbral", "laplacian"), size=4, candidates=names, compiled_lengths=(999,),
            memory=True, out=str(folder), name="small",
        )
    )  # fmt: skip
    assert code == 0
    return folder, results.read(folder / "small.csv")


def test_every_candidate_score_length_and_pass_has_a_row(small_bench):
    _, rows = small_bench
    found = {(row.run.candidate, row.run.score, row.run.L, row.run.pass_) for row in rows}
    assert len(found) == len(rows)
    for length in (16, 32):
        for pass_ in ("forward", "forward_backward"):
            assert ("sdpa", "dot", length, pass_) in found
            for name in ("authors", "plain", "chunked"):
                for score in ("penumbral", "laplacian"):
                    assert (name, score, length, pass_) in found


def test_ratios_are_those_of_medians_to_sdpa_with_E_of_the_values(small_bench):
    _, rows = small_bench
    medians = {row.run: row.result.median_ms for row in rows}
    for row in rows:
        if row.result.median_ms is not None:
            assert row.run.yardstick.E == row.run.yardstick.Ev == 8
            expected = row.result.median_ms / medians[row.run.yardstick]
            assert row.result.ratio_to_sdpa == pytest.approx(expected, rel=1e-3)
            assert row.result.p20_ms <= row.result.median_ms <= row.result.p80_ms
            assert row.result.repetitions >= 3
            assert row.result.parity_error < parity.LOOSE["float32"]


def test_what_cannot_run_has_a_row_that_says_why(small_bench):
    _, rows = small_bench
    for row in rows:
        if (row.run.candidate, row.run.score) == ("authors", "laplacian"):
            assert row.result == Result(note="authors knows no laplacian")
        else:
            assert row.result.note == ""


@pytest.mark.skipif(not bench.memory.supported(), reason="Linux alone")
def test_peak_memory_is_measured(small_bench):
    _, rows = small_bench
    assert all(row.result.peak_mb >= 0 for row in rows if row.result.median_ms is not None)


def test_the_record_has_the_promised_columns_and_neither_host_nor_path(small_bench):
    folder, rows = small_bench
    text = (folder / "small.csv").read_text()
    assert set(text.splitlines()[0].split(",")) == PROMISED_COLUMNS
    assert str(folder) not in text
    assert "/" not in text.replace("n/a", "")
    assert rows[0].machine == dataclasses.replace(machine.this_machine(), date=rows[0].machine.date)


def test_the_config_beside_the_record_repeats_the_run(small_bench):
    folder, _ = small_bench
    again = cli.parse("bench", ["--config", str(folder / "small.yaml")])
    assert again.lengths == (16, 32)
    assert again.name == "small"
    assert again.candidates == ("authors", "plain", "flex", "chunked")


def test_several_lengths_are_drawn(small_bench):
    folder, _ = small_bench
    assert (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def test_threads_are_put_back(small_bench):
    before = torch.get_num_threads()
    bench.run(config(candidates=("sdpa",), threads=before + 1, out=str(small_bench[0]), name="threads"))
    assert torch.get_num_threads() == before


def wrong_values(query, key, value, score, is_causal):
    return candidates.OTHERS[0].attention(query, key, value, score, is_causal) + 1e-3


class WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def wrong_gradients(query, key, value, score, is_causal):
    return candidates.OTHERS[0].attention(WrongGradient.apply(query), key, value, score, is_causal)


def nothing(query, key, value, score, is_causal):
    return (query + key + value) * torch.nan


@pytest.mark.parametrize(
    ("planted", "part"),
    [(wrong_values, "output"), (wrong_gradients, "gradient of query"), (nothing, "output")],
)
def test_a_wrong_candidate_fails_the_gate_and_nothing_is_timed(planted, part, monkeypatch, tmp_path, capsys):
    known = candidates.candidates()
    planted = dataclasses.replace(known["sdpa"], name="planted", attention=planted, exact=True)
    monkeypatch.setattr(bench, "chosen", lambda names: {"sdpa": known["sdpa"], "planted": planted})
    monkeypatch.setattr(bench.timing, "interleaved", lambda *_, **__: pytest.fail("something was timed"))
    assert cli.main([*TINY, "--scores", "dot", "--no_memory", "--out", str(tmp_path)]) == 1
    complaint = capsys.readouterr().err
    assert "parity failed, nothing was timed: planted, dot" in complaint
    assert f"the {part} is off by" in complaint
    assert not list(tmp_path.iterdir())


def test_a_loose_candidate_is_caught_above_its_bound():
    loose = dataclasses.replace(candidates.candidates()["plain"], attention=wrong_values)
    run = Run("plain", "dot", 1, 2, 8, 8, 4, 4)
    assert parity.largest_error(loose, run) < parity.LOOSE["float32"]
    worse = dataclasses.replace(loose, attention=lambda *call: wrong_values(*call) + 0.1)
    with pytest.raises(parity.Wrong, match="off by"):
        parity.largest_error(worse, run)


@pytest.mark.parametrize("name", ["sdpa", *BACKEND_NAMES])
@pytest.mark.parametrize(("causal", "dtype"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
def test_the_gate_passes_what_is_right(name, causal, dtype):
    score = "dot" if name == "sdpa" else "umbral"
    for sizes in ((1, 1, 1, 1, 4, 4), (2, 3, 40, 40, 8, 8)):
        run = Run(name, score, *sizes, dtype=dtype, causal=causal, pass_="forward_backward", threads=1)
        assert parity.largest_error(candidates.candidates()[name], run) < 0.1


def test_a_backend_that_cannot_serve_says_so_and_one_that_breaks_fails():
    def refuse(*_):
        raise ValueError("backend='chunked' cannot serve this call")

    def break_down(*_):
        raise RuntimeError("broken")

    run = Run("chunked", "dot", 1, 1, 8, 8, 4, 4)
    chunked = candidates.candidates()["chunked"]
    assert "cannot serve" in parity.largest_error(dataclasses.replace(chunked, attention=refuse), run)
    with pytest.raises(parity.Failed, match="broken"):
        parity.largest_error(dataclasses.replace(chunked, attention=break_down), run)


def test_dense_candidates_stay_below_half_of_the_memory(monkeypatch):
    run = Run("authors", "penumbral", 1, 1, 16384, 16384, 64, 64)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 24 * 2**30)
    assert "more than half of the memory" in candidates.candidates()["authors"].why_not(run)
    assert candidates.candidates()["chunked"].why_not(run) == ""


def test_results_go_where_they_are_told_or_beside_the_published_ones(monkeypatch, tmp_path):
    assert bench.results_folder(config(out="there")).as_posix() == "there"
    monkeypatch.chdir(tmp_path)
    assert bench.results_folder(config()).as_posix() == "outputs"
    monkeypatch.chdir(machine.PACKAGE.parent.parent)
    assert bench.results_folder(config()).as_posix() == "benchmarks/results"


def test_an_unknown_candidate_is_wrong_use():
    with pytest.raises(WrongUse, match="did you mean 'compiled'"):
        candidates.chosen(("compild",))
