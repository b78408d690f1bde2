"""Measures the errors, memory and time that docs/numerics.md reports, and writes its tables. Takes some minutes.

Errors are those of output and gradients against float64, over several random draws. Plain PyTorch is tests/plain.py:
the formulas in a few lines, computed in the dtype of the inputs. Run it from anywhere: python docs/measure_errors.py
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generate import with_table
from tables import ROOT, markdown_table

import coneheads
from coneheads.scores import BY_NAME, Score, resolve
from tests import plain

PAGE = ROOT / "docs/numerics.md"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = 5
# A gradient below this has vanished: errors are not taken relative to anything smaller.
VANISHING = 1e-6
# [batch, heads, length, size] of the error measurements
SHAPE = (2, 4, 128, 32)
# the memory table, one head; the reference is not run beyond the limit, where it would take gigabytes
MEMORY_LENGTHS = (512, 1024, 2048, 4096)
MEMORY_SIZE, MEMORY_REFERENCE_LIMIT = 16, 2048
# the time table, batch 1; it is measured only while other work takes less than this share of the processors
QUIET = 0.15
TIME_LENGTH, TIME_SIZE, TIME_HEADS, REPEATS = 1024, 32, 2, 5


def ordinary(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value."""
    return tuple(torch.randn(SHAPE, generator=generator) for _ in range(3))  # type: ignore[return-value]


def shared_offset(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """All queries and keys moved by 1000 in every feature but the last, the height."""
    query, key, value = ordinary(generator)
    query[..., :-1] += 1000
    key[..., :-1] += 1000
    return query, key, value


def same(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries equal to keys: every distance on the diagonal is 0."""
    query, _, value = ordinary(generator)
    return query, query.clone(), value


INPUTS = {"normal": ordinary, "offset of 1000": shared_offset, "q == k": same}


def outcome(run: Callable[..., Tensor], tensors: tuple[Tensor, ...], weight: Tensor) -> list[Tensor]:
    """Output and gradients of (output * weight).sum(), in float64."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = run(*leaves)
    return [t.detach().double() for t in (out, *torch.autograd.grad(out, leaves, weight.to(out.dtype)))]


def error(got: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error over output and gradients, relative to the largest entry of its truth; NaN counts as inf."""
    scales = [max(t.abs().amax().item(), VANISHING) for t in truth]
    errors = [(g - t).abs().amax().item() / scale for g, t, scale in zip(got, truth, scales, strict=True)]
    return max(value if math.isfinite(value) else math.inf for value in errors)


def ways(score: Score) -> dict[str, Callable[..., Tensor]]:
    """The computations that are compared."""
    return {
        "plain": lambda q, k, v: plain.attention(q, k, v, score=score),
        "reference": lambda q, k, v: coneheads.attention(q, k, v, score=score, backend="reference"),
        "chunked": lambda q, k, v: coneheads.attention(q, k, v, score=score, backend="chunked"),
    }


def errors_table() -> str:
    header = ["score", "inputs", *(f"{way} {short(dtype)}" for dtype in DTYPES for way in ways(resolve("dot")))]
    rows = []
    for name in BY_NAME:
        score = resolve(name)
        for label, make in INPUTS.items():
            worst: dict[tuple[torch.dtype, str], float] = {}
            for dtype in DTYPES:
                for draw in range(DRAWS):
                    generator = torch.Generator().manual_seed(draw)
                    tensors = tuple(tensor.to(dtype) for tensor in make(generator))
                    weight = torch.randn(SHAPE, generator=generator)
                    exact = tuple(tensor.double() for tensor in tensors)
                    truth = outcome(ways(score)["reference"], exact, weight)
                    for way, run in ways(score).items():
                        found = error(outcome(run, tensors, weight), truth)
                        worst[dtype, way] = max(found, worst.get((dtype, way), 0.0))
            rows.append(
                [
                    f"`{name}`",
                    label,
                    *(f"{value:.1e}" if math.isfinite(value) else "not finite" for value in worst.values()),
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    return markdown_table(header, rows)


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]


def forward_and_backward(backend: str, length: int, size: int, heads: int, score: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, length, size, generator=generator).requires_grad_() for _ in range(3)]

    def run() -> None:
        coneheads.attention(*tensors, score=score, backend=backend).sum().backward()

    return run


def peak_megabytes(run: Callable[[], None]) -> float:
    """The largest sum of tensors alive at once during a run, beside what was alive before: from torch's profiler."""
    run()  # gradients are allocated once and stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate(change for _, change in changes)) / 2**20


def memory_table() -> str:
    rows = []
    for length in MEMORY_LENGTHS:
        cells = [
            peak_megabytes(forward_and_backward(backend, length, MEMORY_SIZE, 1, "penumbral"))
            if backend == "chunked" or length <= MEMORY_REFERENCE_LIMIT
            else None
            for backend in ("reference", "chunked")
        ]
        rows.append([str(length), *("not run" if cell is None else f"{cell:.1f} MB" for cell in cells)])
        print("  ".join(rows[-1]), flush=True)
    return markdown_table(["L = S", "`reference`", "`chunked`"], rows)


def others_load() -> float:
    """The share of the processors that is busy while this script waits for a second."""

    def ticks() -> tuple[int, int]:
        user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return idle + waiting, user + nice + system + idle + waiting + sum(rest[:3])

    idle, total = ticks()
    time.sleep(1)
    idle_after, total_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def time_table() -> str:
    """Medians of interleaved runs, so that a disturbance of the machine meets both; refused on a busy machine."""
    rows = []
    for name in BY_NAME:
        runs = {
            backend: forward_and_backward(backend, TIME_LENGTH, TIME_SIZE, TIME_HEADS, name)
            for backend in ("reference", "chunked")
        }
        seconds: dict[str, list[float]] = {backend: [] for backend in runs}
        if (load := others_load()) > QUIET:
            sys.exit(
                f"other work keeps {load:.0%} of the processors busy: measure the time table later, with --only time"
            )
        for repeat in range(REPEATS + 1):
            for backend, run in runs.items():
                start = time.perf_counter()
                run()
                if repeat:  # the first is a warm-up
                    seconds[backend].append(time.perf_counter() - start)
        reference, chunked = (statistics.median(seconds[backend]) for backend in runs)
        rows.append(
            [f"`{name}`", f"{reference * 1e3:.0f} ms", f"{chunked * 1e3:.0f} ms", f"{reference / chunked:.1f}x"]
        )
        print("  ".join(rows[-1]), flush=True)
    return markdown_table(["score", "`reference`", "`chunked`", "faster by"], rows)


def main() -> None:
    tables = {"errors": errors_table, "memory": memory_table, "time": time_table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tables, help="measure one table")
    only = parser.parse_args().only
    setting = f"torch {torch.__version__}, {torch.get_num_threads()} threads of {platform.machine()}, on CPU."
    PAGE.write_text(with_table(PAGE.read_text(), "setting", setting))
    for name, measure in tables.items():
        if only in (None, name):
            print(f"measuring {name}")
            table = measure()
            PAGE.write_text(with_table(PAGE.read_text(), name, table))


if __name__ == "__main__":
    main()
