"""``coneheads info --self-test``: do the kernels for GPUs compute the right numbers on this one, and how fast are they?

The kernels are tested in Triton's interpreter, where nothing can be said about a real GPU: this is the command that
does. First parity: every score, dtype and feature on the device against the reference in float64 on the CPU, with the
rule of all backends: at most twice the error of plain PyTorch in the same dtype. Then times, beside PyTorch's own
attention on the same device.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coneheads.backends import triton
from coneheads.functional import attention
from coneheads.lab.progress import Progress
from coneheads.lab.speed import formulations
from coneheads.lab.speed.timing import summary
from coneheads.scores import BY_NAME, Score, resolve

DTYPES = ("float32", "float16", "bfloat16")
FEATURES = (
    *("plain", "causal", "boolean mask", "float mask", "grouped queries", "one key", "E = 3", "q = k"),
    "parameters as tensors",  # half precision has other kernels for cones whose parameters are numbers
)
PARTS = ("output", "query", "key", "value")
DRAWS = 8  # their median counts: one may meet a kink of a score, where a rounding decides about its slope
REPETITIONS = 20


@dataclass(frozen=True)
class Case:
    """One call that is compared."""

    score: str
    dtype: str
    feature: str
    length: int = 150
    size: int = 48

    def call(self, draw: int) -> Call:
        """Tensors on the CPU, in float64 but rounded to the dtype."""
        generator = torch.Generator().manual_seed(draw)
        size = 3 if self.feature == "E = 3" else self.size
        keys = 1 if self.feature == "one key" else self.length + 7
        kv_heads = 1 if self.feature == "grouped queries" else 2

        def normal(heads: int, rows: int, columns: int) -> Tensor:
            drawn = torch.randn(2, heads, rows, columns, generator=generator)
            return drawn.to(getattr(torch, self.dtype)).double()

        query, key, value = normal(2, self.length, size), normal(kv_heads, keys, size), normal(kv_heads, keys, 40)
        if self.feature == "q = k":
            query = key[:, :, : self.length].clone()
        mask = None
        if self.feature == "boolean mask":
            mask = torch.rand(2, 1, self.length, keys, generator=generator) > 0.3
        if self.feature == "float mask":
            mask = torch.randn(self.length, keys, generator=generator)
        gradient = normal(2, self.length, value.shape[-1])
        score = resolve(self.score)
        if self.feature == "parameters as tensors":
            score = score.for_size(size)
            score = score.with_parameters({name: torch.tensor(getattr(score, name)) for name in score.pair_fields})
        return Call(query, key, value, gradient, mask, self.feature == "causal", score)


class Call(NamedTuple):
    """What attention is given, and the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    mask: Tensor | None
    is_causal: bool
    score: Score

    def results(self, compute: Callable[[Call], Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
        """Output and gradients, computed in a dtype on a device, in float64 on the CPU."""
        leaves = [t.to(device, dtype).requires_grad_() for t in self[:3]]
        tensors = {name: t.to(device) for name, t in self.score.parameters().items() if isinstance(t, Tensor)}
        score = self.score.with_parameters(tensors)
        out = compute(self._replace(query=leaves[0], key=leaves[1], value=leaves[2], score=score))
        grads = torch.autograd.grad(out, leaves, self.gradient.to(device, dtype))
        return [t.detach().double().cpu() for t in (out, *grads)]

    def ours(self, backend: str) -> Tensor:
        mask = None if self.mask is None else self.mask.to(self.query.device)
        return attention(
            *self[:3], mask, is_causal=self.is_causal, score=self.score, enable_gqa=True, backend=backend
        )  # fmt: skip

    def plain(self) -> Tensor:
        """Dense attention by direct differences in the dtype of the inputs."""
        group = self.query.shape[1] // self.key.shape[1]
        key, value = self.key.repeat_interleave(group, 1), self.value.repeat_interleave(group, 1)
        mask = None if self.mask is None else self.mask.to(key.device)
        if self.is_causal:
            mask = torch.ones(self.query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        return formulations.direct(self.query, key, value, self.score, mask)


@dataclass(frozen=True)
class Verdict:
    """What was found of a case: the part that is worst beside what it may be, or why it could not run."""

    case: Case
    part: str = ""
    error: float = 0.0
    allowed: float = 0.0
    failure: str = ""

    @property
    def holds(self) -> bool:
        return not self.failure and self.error <= self.allowed  # NaN does not


def cases(length: int = 150) -> list[Case]:
    return [Case(score, dtype, what, length) for score in BY_NAME for dtype in DTYPES for what in FEATURES]


def verdicts(chosen: list[Case], device: str) -> Iterator[Verdict]:
    """Every case, compared on the device."""
    for case in chosen:
        try:
            yield _compare(case, device)
        except Exception as error:  # whatever a compiler or a driver may raise is the finding
            yield Verdict(case, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _compare(case: Case, device: str) -> Verdict:
    dtype = getattr(torch, case.dtype)
    # Plain PyTorch has no numbers for the limits of float16: those of bfloat16, and what it rounds less, stand in.
    usual_dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    finer = torch.finfo(dtype).eps / torch.finfo(usual_dtype).eps
    errors, usual = [], []
    for draw in range(DRAWS):
        call = case.call(draw)
        truth = call.results(lambda one: one.ours("reference"), torch.float64, "cpu")
        errors.append(_largest(call.results(lambda one: one.ours("triton"), dtype, device), truth))
        usual.append(_largest(call.results(Call.plain, usual_dtype, device), truth))
    parts = []
    for part, name in enumerate(PARTS):
        finite = [one[part] for one in usual if math.isfinite(one[part])]
        typical = statistics.median(finite) if finite else math.inf  # plain PyTorch overflows: ours must be finite
        allowed = 2 * finer * typical + torch.finfo(dtype).eps
        error = statistics.median(one[part] for one in errors)
        parts.append((name, error, allowed))
    if not all(math.isfinite(error) for one in errors for error in one):
        return Verdict(case, failure="a result is not finite")
    return Verdict(case, *max(parts, key=lambda part: part[1] / part[2]))


def _largest(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The largest errors, relative to the largest entries."""
    return [((g - t).abs().amax() / t.abs().amax().clamp_min(1e-6)).item() for g, t in zip(got, truth, strict=True)]


def parity_table(found: list[Verdict]) -> Table:
    """A line for each score and dtype: the feature that is worst."""
    table = Table("score", "dtype", "calls", "hold", "worst", "error", "allowed", title="parity with float64")
    for score in BY_NAME:
        for dtype in DTYPES:
            these = [one for one in found if (one.case.score, one.case.dtype) == (score, dtype)]
            if not these:
                continue
            worst = max(these, key=lambda one: math.inf if one.failure else one.error / one.allowed)
            holding = sum(one.holds for one in these)
            what = worst.failure or f"{worst.case.feature}, {worst.part}"
            numbers = ("", "") if worst.failure else (f"{worst.error:.1e}", f"{worst.allowed:.1e}")
            table.add_row(score, dtype, str(len(these)), str(holding), what, *numbers)
    return table


def times_table(device: str, backend: str = "triton", lengths: tuple[int, ...] = (1024, 4096)) -> Table:
    """Milliseconds on the device, beside PyTorch's attention with its own choice of kernel."""
    table = Table("dtype", "L", "score", "forward", "of SDPA", "forward + backward", "of SDPA")
    table.title = "time of B = 4, H = 8, E = Ev = 64"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for length in lengths:
            tensors = [torch.randn(4, 8, length, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
            base = _times(scaled_dot_product_attention, tensors)
            table.add_row(
                str(dtype).removeprefix("torch."), str(length), "SDPA", f"{base[0]:.3f}", "", f"{base[1]:.3f}", ""
            )
            for score in ("dot", "penumbral", "umbral"):
                own = _times(functools.partial(attention, score=score, backend=backend), tensors)
                cells = [f"{own[0]:.3f}", f"{own[0] / base[0]:.2f}", f"{own[1]:.3f}", f"{own[1] / base[1]:.2f}"]
                table.add_row("", "", score, *cells)
    return table


def _times(call: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[float, float]:
    """Medians of forward alone, and of forward and backward, by the clock of the device."""
    gradient = torch.randn_like(call(*tensors))

    def forward() -> object:
        with torch.no_grad():
            return call(*tensors)

    medians = []
    for work in (forward, lambda: torch.autograd.grad(call(*tensors), tensors, gradient)):
        for _ in range(3):  # compiles, and tries the declared blocks
            work()
        medians.append(summary([_seconds(work, tensors[0].device) for _ in range(REPETITIONS)]).median)
    return medians[0], medians[1]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def run(quiet: bool = False) -> int:
    """Prints what holds on this machine. 0 if everything does, 1 if something does not or there is nothing to test."""
    console = Console(highlight=False)
    interpreted = triton.interpreted()
    if not interpreted and not torch.cuda.is_available():
        console.print(
            "There is no GPU that torch sees: nothing was tested. `make test` tests the kernels for GPUs in Triton's "
            "interpreter and `make gpu-check` compiles them ahead of time; run this on a machine with a GPU.",
            soft_wrap=True,
        )
        return 1
    if reason := triton.unavailable():
        console.print(f"The kernels for GPUs cannot run here: {reason}.", soft_wrap=True)
        return 1
    device = "cpu" if interpreted else "cuda"
    name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name()
    chosen = cases(20 if interpreted else 150)
    found = []
    with Progress(quiet, len(chosen), f"parity on {name}", unit="calls") as progress:
        for verdict in verdicts(chosen, device):
            found.append(verdict)
            progress.advance()
    console.print(parity_table(found))
    wrong = [one for one in found if not one.holds]
    for one in wrong:
        text = one.failure or f"{one.part} is off by {one.error:.1e}, and {one.allowed:.1e} is allowed"
        console.print(f"does not hold: {one.case.score}, {one.case.dtype}, {one.case.feature}: {text}", soft_wrap=True)
    console.print(f"{len(found) - len(wrong)} of {len(found)} calls hold on {name}.")
    if interpreted:
        console.print("The interpreter is not timed.")
    elif not wrong:
        console.print(times_table(device))
    return 1 if wrong else 0
