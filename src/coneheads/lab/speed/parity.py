"""No speed without being right: every candidate is compared with float64 before anything is timed.

Compared is what will be timed, at its own size: some rows of the first and of the last head, and the gradients of those
rows. Errors are relative to the largest entry of the truth. The backends obey contract 1: at most twice the error of
the same formula by direct differences in the same dtype. A single draw of inputs may exceed that by luck, up to 8 times
as measured; then the means over DRAWS decide, as contract 1 has it. The others are not ours, and most of them cancel
where points are near: they may be off by LOOSE.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from coneheads.functional import attention
from coneheads.lab.config import Failed
from coneheads.lab.speed import formulations
from coneheads.lab.speed.candidates import OTHER_NAMES, Candidate, inputs, score_for, upstream_gradient
from coneheads.lab.speed.runs import Run
from coneheads.scores import Score, resolve

LOOSE = {"float64": 1e-2, "float32": 1e-2, "bfloat16": 5e-2, "float16": 5e-2}
ROWS = 32
DRAWS = 8
PARTS = ("output", "gradient of query", "gradient of key", "gradient of value")


class Wrong(Failed):
    """A candidate computes something else."""


def check(
    runs: Iterable[Run], candidates: dict[str, Candidate], report: Callable[[Run], None] = lambda run: None
) -> tuple[dict[Run, float], dict[Run, str]]:
    """The largest error of every run, and for those that cannot run the reason. ``Wrong`` if an error is too large."""
    errors: dict[Run, float] = {}
    reasons: dict[Run, str] = {}
    checked: dict[Run, float | str] = {}
    runs = list(runs)
    for run in runs:
        report(run)
        kind = _kind(run, runs, candidates[run.candidate])
        if kind not in checked:
            checked[kind] = largest_error(candidates[run.candidate], kind)
        found = checked[kind]
        if isinstance(found, str):
            reasons[run] = found
        else:
            errors[run] = found
    return errors, reasons


def _kind(run: Run, runs: list[Run], candidate: Candidate) -> Run:
    """What is checked for a run. Forward and backward are checked at once, unless they are two compiled programs."""
    whole = dataclasses.replace(run, pass_="forward_backward")
    if run.pass_ == "forward" and (candidate.compiles or whole not in runs):
        return run
    return whole


def largest_error(candidate: Candidate, run: Run) -> float | str:
    """Raises ``Wrong`` if it is too large. Text: the candidate cannot do this run. A backend that cannot has failed."""
    torch.set_num_threads(run.threads)
    try:
        errors, limits = _errors_and_limits(candidate, run, draws=1)
    except Exception as error:  # whatever a compiler may raise
        if candidate.name not in OTHER_NAMES and not isinstance(error, ValueError):  # which says what it cannot serve
            raise Failed(f"{candidate.name} fails on {run.score}, {run.setting}: {error}") from error
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if candidate.exact and _too_large(errors, limits):
        errors, limits = _errors_and_limits(candidate, run, DRAWS)
    for part in _too_large(errors, limits)[:1]:
        raise Wrong(
            f"parity failed, nothing was timed: {candidate.name}, {run.score}, {run.setting}: the {PARTS[part]} is off "
            f"by {errors[part]:.1e} of its largest entry; {limits[part]:.1e} is allowed"
        )
    return max(errors)


def _too_large(errors: list[float], limits: list[float]) -> list[int]:
    """The numbers of the parts that are wrong; NaN is."""
    return [part for part, (error, limit) in enumerate(zip(errors, limits, strict=True)) if not error <= limit]


def _errors_and_limits(candidate: Candidate, run: Run, draws: int) -> tuple[list[float], list[float]]:
    """The error of each part and what is allowed, in their means over draws."""
    problem, dtype = dataclasses.replace(run, candidate=""), getattr(torch, run.dtype)
    found, usual = [], []
    for draw in range(draws):
        got = _of_candidate(candidate, run, draw)
        truth = _of_slice(_reference, problem, torch.float64, draw)
        found.append(_relative(got, truth))
        if candidate.exact:
            usual.append(_relative(_of_slice(formulations.direct, problem, dtype, draw), truth))
    errors = _means(found)
    if not candidate.exact:
        return errors, [LOOSE[run.dtype]] * len(errors)
    # Whatever computes it, a result is rounded to its dtype.
    return errors, [2 * error + torch.finfo(dtype).eps for error in _means(usual)]


def _means(draws: list[list[float]]) -> list[float]:
    return [statistics.fmean(part) for part in zip(*draws, strict=True)]


def _of_candidate(candidate: Candidate, run: Run, draw: int) -> list[Tensor]:
    """Output rows and gradients of the slice, from the full call. Only the slice has an upstream gradient."""
    tensors = inputs(run, draw)
    score = score_for(candidate, run)
    if run.pass_ == "forward":
        with torch.no_grad():
            return [_rows(candidate.attention(*tensors, score, run.causal), run)]
    whole = upstream_gradient(run, draw)
    gradient = torch.zeros_like(whole)
    rows = _row_numbers(run)
    for b, h in ((0, 0), (-1, -1)):
        gradient[b, h, rows] = whole[b, h, rows]
    out = candidate.attention(*tensors, score, run.causal)
    query, key, value = torch.autograd.grad(out, tensors, gradient)
    return [_rows(out.detach(), run), _rows(query, run), _heads(key), _heads(value)]


@functools.lru_cache(maxsize=4)  # several candidates in a row have the same truth
def _of_slice(compute: Callable[..., Tensor], run: Run, dtype: torch.dtype, draw: int) -> list[Tensor]:
    """The same from a call on the slice alone: rows of two heads against all their keys."""
    query, key, value = inputs(run, draw)
    tensors = [t.detach().to(dtype).requires_grad_() for t in (_rows(query, run), _heads(key), _heads(value))]
    mask = torch.arange(run.S) <= _row_numbers(run)[:, None] if run.causal else None
    out = compute(*tensors, resolve(run.score), mask)
    if run.pass_ == "forward":
        return [out.detach()]
    gradient = _rows(upstream_gradient(run, draw), run).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


def _reference(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Tensor | None) -> Tensor:
    return attention(query, key, value, mask, score=score, backend="reference")


def _row_numbers(run: Run) -> Tensor:
    return torch.linspace(0, run.L - 1, ROWS).long().unique()


def _heads(tensor: Tensor) -> Tensor:
    """[B, H, L, E] -> [2, 1, L, E]: the first head of the first batch and the last head of the last."""
    return torch.stack([tensor[0, :1], tensor[-1, -1:]])


def _rows(tensor: Tensor, run: Run) -> Tensor:
    return _heads(tensor)[..., _row_numbers(run), :]


def _relative(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [
        ((g.double() - t.double()).abs().amax() / t.double().abs().amax().clamp_min(1e-6)).item()
        for g, t in zip(got, truth, strict=True)
    ]
