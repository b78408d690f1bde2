"""No speed without being right: every candidate is compared with float64 before anything is timed.

Compared is what will be timed, at its own size: some rows of the first and of the last head, and the gradients of those
rows. Errors are relative to the largest entry of the truth. SDPA and the backends obey contract 1: at most twice the
error of the same formula by direct differences in the same dtype. The others cancel where points are near, and may be
off by LOOSE.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from coneheads.functional import attention
from coneheads.lab.config import Failed
from coneheads.lab.speed import formulations
from coneheads.lab.speed.candidates import OTHER_NAMES, Candidate, inputs, score_for, upstream_gradient
from coneheads.lab.speed.runs import Run
from coneheads.scores import Score, resolve

LOOSE = 1e-2
# Whatever computes it, a result is rounded to its dtype; luck with one draw is allowed for as well.
ROUNDINGS = 4
ROWS = 32
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
        got = _of_candidate(candidate, run)
    except Exception as error:  # whatever a compiler may raise
        if candidate.name not in OTHER_NAMES and not isinstance(error, ValueError):  # which says what it cannot serve
            raise Failed(f"{candidate.name} fails on {run.score}, {run.setting}: {error}") from error
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    dtype = getattr(torch, run.dtype)
    problem = dataclasses.replace(run, candidate="")
    truth = _of_slice(_reference, problem, torch.float64)
    errors = _relative(got, truth)
    limits = [LOOSE] * len(errors)
    if candidate.exact:
        usual = _relative(_of_slice(formulations.direct, problem, dtype), truth)
        limits = [2 * each + ROUNDINGS * torch.finfo(dtype).eps for each in usual]
    for part, found, limit in zip(PARTS, errors, limits, strict=False):
        if not found <= limit:  # NaN is wrong too
            raise Wrong(
                f"parity failed, nothing was timed: {candidate.name}, {run.score}, {run.setting}: the {part} is off by "
                f"{found:.1e} of its largest entry; {limit:.1e} is allowed"
            )
    return max(errors)


def _of_candidate(candidate: Candidate, run: Run) -> list[Tensor]:
    """Output rows and gradients of the slice, from the full call. Only the slice has an upstream gradient."""
    tensors = inputs(run)
    score = score_for(candidate, run)
    if run.pass_ == "forward":
        with torch.no_grad():
            return [_rows(candidate.attention(*tensors, score, run.causal), run)]
    gradient = torch.zeros_like(upstream_gradient(run))
    rows = _row_numbers(run)
    for b, h in ((0, 0), (-1, -1)):
        gradient[b, h, rows] = upstream_gradient(run)[b, h, rows]
    out = candidate.attention(*tensors, score, run.causal)
    query, key, value = torch.autograd.grad(out, tensors, gradient)
    return [_rows(out.detach(), run), _rows(query, run), _heads(key), _heads(value)]


@functools.lru_cache(maxsize=4)  # several candidates in a row have the same truth
def _of_slice(compute: Callable[..., Tensor], run: Run, dtype: torch.dtype) -> list[Tensor]:
    """The same from a call on the slice alone: rows of two heads against all their keys."""
    query, key, value = inputs(run)
    tensors = [t.detach().to(dtype).requires_grad_() for t in (_rows(query, run), _heads(key), _heads(value))]
    rows = _row_numbers(run)
    mask = torch.arange(run.S) <= rows[:, None] if run.causal else None
    out = compute(*tensors, resolve(run.score), mask)
    if run.pass_ == "forward":
        return [out.detach()]
    gradient = _rows(upstream_gradient(run), run).to(dtype)
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
