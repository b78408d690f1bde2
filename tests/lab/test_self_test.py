"""`coneheads info --self-test`: without a GPU it says so; its comparison finds what is right and what is wrong."""

import pytest
import torch

from coneheads.backends import triton
from coneheads.lab import cli, self_test
from coneheads.lab.self_test import Case, Verdict


@pytest.mark.skipif(torch.cuda.is_available() or triton.interpreted(), reason="there is something to test")
@pytest.mark.parametrize("flag", ["--self-test", "--self_test"])
def test_without_a_gpu_it_says_that_there_is_none(flag, capsys):
    assert cli.main(["info", flag]) == 1
    assert capsys.readouterr().out.startswith("There is no GPU that torch sees: nothing was tested.")


def test_it_has_no_json(capsys):
    assert cli.main(["info", "--self-test", "--json"]) == 2
    assert "--json" in capsys.readouterr().err


def test_every_score_dtype_and_feature_is_a_case():
    assert len(self_test.cases()) == len(set(self_test.cases())) == 8 * 3 * len(self_test.FEATURES)


@pytest.mark.parametrize("feature", self_test.FEATURES)
@pytest.mark.parametrize("dtype", self_test.DTYPES)
def test_another_backend_in_its_place_holds(feature, dtype, monkeypatch):
    """The comparison itself, where the kernels cannot run: chunked obeys the same rule."""
    ours = self_test.Call.ours
    monkeypatch.setattr(
        self_test.Call, "ours", lambda call, backend: ours(call, {"triton": "chunked"}.get(backend, backend))
    )
    (found,) = self_test.verdicts([Case("penumbral", dtype, feature, length=20, size=12)], "cpu")
    assert not found.failure
    assert found.holds
    assert found.error < 0.05
    # Where q = k, plain PyTorch in half precision has a point above its equal, by a rounding, and so other slopes.
    assert 0 < found.allowed < (2 if feature == "q = k" else 0.1)


def test_a_wrong_result_does_not_hold(monkeypatch):
    ours = self_test.Call.ours
    wrong = {"triton": lambda call: 1.001 * ours(call, "chunked")}
    monkeypatch.setattr(
        self_test.Call, "ours", lambda call, backend: wrong.get(backend, lambda c: ours(c, backend))(call)
    )
    (found,) = self_test.verdicts([Case("umbral", "float32", "plain", length=20, size=12)], "cpu")
    assert not found.holds
    assert found.error > 5e-4


def test_what_cannot_run_is_a_finding_and_nan_does_not_hold():
    (found,) = self_test.verdicts([Case("dot", "float32", "plain", length=4)], "cpu")
    if not triton.interpreted():
        assert found.failure.startswith("ValueError: backend='triton' cannot serve this call")
        assert not found.holds
    assert not Verdict(found.case, "output", float("nan"), 1.0).holds
    table = self_test.parity_table([found])
    assert table.row_count == 1


def test_times_stand_beside_those_of_sdpa(monkeypatch):
    """On the CPU and with another backend: all but the clock of a GPU."""
    monkeypatch.setattr(self_test, "REPETITIONS", 2)
    table = self_test.times_table("cpu", "chunked", (16,))
    columns = [list(column.cells) for column in table.columns]
    assert columns[2] == ["SDPA", "dot", "penumbral", "umbral"] * 3
    forward, ratio = columns[3], columns[4]
    assert ratio[0] == ""
    assert float(ratio[1]) == pytest.approx(float(forward[1]) / float(forward[0]), rel=0.1)
    assert all(float(both) > 0 for both in columns[5])
