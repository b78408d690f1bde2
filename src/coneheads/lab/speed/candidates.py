"""What is timed: SDPA, other ways to write attention, and our backends; and what each cannot do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coneheads.backends import BACKENDS, Backend
from coneheads.functional import attention
from coneheads.lab import machine
from coneheads.lab.config import check_choice
from coneheads.lab.speed import formulations
from coneheads.lab.speed.runs import YARDSTICK, Run
from coneheads.scores import Score, resolve


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention."""

    name: str
    attention: Callable[..., Tensor]  # query, key, value, score, is_causal
    exact: bool  # whether it has to be as good as contract 1 asks; others have the looser bound of parity.py
    compiles: bool = False
    backward: bool = True
    scores: tuple[str, ...] = ()  # empty: all
    dtypes: tuple[str, ...] = ("float32", "float64")
    matrices: int = 0  # how many [B, H, L, S] are alive at once in forward + backward, about: 0 if none is

    def why_not(self, run: Run) -> str:
        """Why it cannot do a run; empty if it can."""
        if self.scores and run.score not in self.scores:
            return f"{self.name} knows no {run.score}"
        if not self.backward and run.pass_ != "forward":
            return f"{self.name} has no backward on a CPU"
        if run.dtype not in self.dtypes:
            return f"{self.name} is not written for {run.dtype}"
        needed, present = self.matrices * run.B * run.H * run.L * run.S * 4, machine.memory_bytes()
        if present and needed > present / 2:
            return f"it would need about {needed / 2**30:.0f} GB, more than half of the memory"
        return ""


OTHERS = (
    Candidate(
        YARDSTICK,
        formulations.dot_product,
        exact=False,
        scores=("dot",),
        dtypes=("float32", "float64", "bfloat16", "float16"),
    ),
    Candidate("authors", formulations.authors, exact=False, scores=("penumbral", "umbral"), matrices=20),
    Candidate("plain", formulations.plain, exact=False, matrices=20),
    Candidate("compiled", lambda *call: formulations.compiled_plain()(*call), exact=False, compiles=True, matrices=8),
    Candidate(
        "flex",
        formulations.flex,
        exact=False,
        compiles=True,
        backward=False,
        dtypes=("float32",),
    ),
)
OTHER_NAMES = tuple(candidate.name for candidate in OTHERS)


def candidates() -> dict[str, Candidate]:
    """All by name: the others, then the backends that can run here."""
    return {candidate.name: candidate for candidate in (*OTHERS, *map(_of_backend, _backends()))}


def _backends() -> list[Backend]:
    """Those of this machine's CPU, on which everything is timed."""
    return [
        backend for backend in BACKENDS if backend.available() and (not backend.devices or "cpu" in backend.devices)
    ]


def _of_backend(backend: Backend) -> Candidate:
    def call(query: Tensor, key: Tensor, value: Tensor, score: str, is_causal: bool) -> Tensor:
        return attention(query, key, value, is_causal=is_causal, score=score, backend=backend.name)

    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in backend.dtypes)
    linear = backend.memory.startswith("linear")
    return Candidate(backend.name, call, exact=True, dtypes=dtypes, matrices=0 if linear else 200)


def chosen(names: tuple[str, ...]) -> dict[str, Candidate]:
    """The candidates of these names, and SDPA; without any, all but the reference, which is made to be right."""
    known = candidates()
    for name in names:
        check_choice("candidates", name, known)
    names = (YARDSTICK, *names) if names else tuple(name for name in known if name != "reference")
    return {name: known[name] for name in known if name in names}


def fastest_backend() -> str:
    """The backend that ``backend="auto"`` takes for an ordinary call on a CPU."""
    return _backends()[0].name


def inputs(run: Run, draw: int = 0) -> list[Tensor]:
    """Query, key and value [B, H, L|S, E|Ev], normal, the same for every candidate of these sizes."""
    generator = torch.Generator().manual_seed(2 * draw)
    shapes = ((run.B, run.H, run.L, run.E), (run.B, run.H, run.S, run.E), (run.B, run.H, run.S, run.Ev))
    tensors = [torch.randn(shape, generator=generator).to(getattr(torch, run.dtype)) for shape in shapes]
    return [tensor.requires_grad_(run.pass_ != "forward") for tensor in tensors]


def upstream_gradient(run: Run, draw: int = 0) -> Tensor:
    """The fixed gradient [B, H, L, Ev] that a backward pass starts from."""
    generator = torch.Generator().manual_seed(2 * draw + 1)
    return torch.randn(run.B, run.H, run.L, run.Ev, generator=generator).to(getattr(torch, run.dtype))


def score_for(candidate: Candidate, run: Run) -> Score | str:
    """A backend gets the name of the score, as users give it; the others take the object."""
    return resolve(run.score) if candidate.name in OTHER_NAMES else run.score


def call_of(candidate: Candidate, run: Run) -> Callable[[], object]:
    """What is timed: a function of no arguments that does the run once, its inputs made beforehand."""
    tensors = inputs(run)
    compute = functools.partial(candidate.attention, *tensors, score_for(candidate, run), run.causal)

    def forward() -> object:
        with torch.no_grad():
            return compute()

    if run.pass_ == "forward":
        return forward
    gradient = upstream_gradient(run)
    if run.pass_ == "backward":
        out = compute()
        return lambda: torch.autograd.grad(out, tensors, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(compute(), tensors, gradient)
