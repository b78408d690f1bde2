"""``python -m coneheads.lab.gpu_check``: what the Triton kernels need of a GPU, found by compiling them without one.

Every kernel is compiled for every score, dtype, size and architecture, from the arguments that a call would pass to it
and with the blocks it uses by default. The tables show registers, spills and shared memory beside the same kernel for
dot product, and how many instructions the loop over tiles has for each pair of a query and a key.

The gate fails (exit code 1) if a kernel spills, needs more shared or tensor memory than the architecture has,
multiplies float32 on tensor cores, or does not compile. It covers plain calls: no mask (but for the kernel that
differentiates one), no causality, no dropout, no gradients of parameters. At E=64 a call with all of these is compiled
too: its rows say "full", and are shown but not in the gate.

It also fails if a cone takes more instructions a pair, as multiples of those of dot product, than promised: each kernel
as it is by default, or both with the blocks that dot product has by default, so that nothing differs but the score. The
last table has these ratios, and the harshest of comparisons beside, to dot product with the best of the blocks that are
tried for it on a GPU. What is compiled for them has rows that say "tried".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from coneheads.backends.triton import unavailable
from coneheads.lab import machine
from coneheads.lab.gpu_compile import (
    DTYPES,
    KERNELS,
    SCORES,
    SHARED,
    TENSOR_COLUMNS,
    Case,
    Found,
    blocks_of,
    compile_all,
)
from coneheads.lab.progress import Progress
from coneheads.lab.speed.screen import Screen

ONLY_SINGLE = "rows"  # a kernel that float32 alone needs
STEP = KERNELS[:4]  # what a training step runs
SIZES = (16, 64, 128)
FULL_SIZE = 64  # of the calls that have everything, and of the promised ratios
OPTIONAL = 100  # not every toolchain has it
PROMISED = {"umbral": 1.35, "penumbral": 1.6}  # instructions a pair, as a multiple of those of dot product


def cases_of(options: argparse.Namespace) -> list[Case]:
    """All that was asked for, in the order of the tables."""
    plain = [
        Case(kernel, score, dtype, size, arch)
        for arch in options.arch
        for dtype in options.dtypes
        for size in options.sizes
        for kernel in options.kernels
        if kernel != ONLY_SINGLE or dtype == "float32"
        for score in options.scores
    ]
    full = [case._replace(full=True) for case in plain if case.size == FULL_SIZE]
    compared = [case for case in plain if case.size == FULL_SIZE and case.kernel in STEP]
    tried = [case._replace(blocks=blocks) for case in compared if case.score == "dot" for blocks in blocks_of(case)[1:]]
    alike = [
        case._replace(blocks=blocks)
        for case in compared
        if case.score in PROMISED and (blocks := blocks_of(case._replace(score="dot"))[0]) != blocks_of(case)[0]
    ]
    return [*plain, *full, *tried, *alike]


def ratio_to_dot(found: Found, results: dict[Case, Found]) -> float | None:
    """Instructions a pair, of those of the same kernel for dot product."""
    dot = results.get(found.case._replace(score="dot", blocks=None))
    if dot is None or not dot.per_pair or found.per_pair is None:
        return None
    return found.per_pair / dot.per_pair


def show(screen: Screen, results: dict[Case, Found]) -> None:
    """A table for each architecture, dtype and size."""
    header = ["kernel", "score", "", "blocks", "registers", "spills", "shared KB", "tensor", "loop", "a pair", "of dot"]
    groups = list(dict.fromkeys((case.arch, case.dtype, case.size) for case in results))
    for arch, dtype, size in groups:
        rows = [found for case, found in results.items() if (case.arch, case.dtype, case.size) == (arch, dtype, size)]
        title = f"sm_{arch}, {dtype}, E={size}: {SHARED[arch] // 1024} KB of shared memory at most"
        if arch == OPTIONAL:
            title += f", and {TENSOR_COLUMNS} columns of tensor memory"
        screen.table(title, [*header, "mark"], [cells(found, ratio_to_dot(found, results)) for found in rows])


def cells(found: Found, ratio: float | None) -> list[str]:
    case = found.case
    start = [case.kernel, case.score, "full" if case.full else "tried" if case.blocks else ""]
    mark = "; ".join(found.reasons())
    if found.error:
        return [*start, *[""] * 8, mark]
    return [
        *start,
        "x".join(map(str, found.blocks[:2])) + f" {found.blocks[2]} warps {found.blocks[3]} stages",
        str(found.registers),
        str(found.spills),
        f"{found.shared / 1024:.1f}",
        str(found.columns) if found.columns else "",
        "" if found.instructions is None else str(found.instructions),
        "" if found.per_pair is None else f"{found.per_pair:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        mark,
    ]


class Promise(NamedTuple):
    """Instructions a pair that a cone takes, as multiples of those of dot product: in each kernel, and "together".

    by_default: each as it is by default. alike: both with the blocks that dot product has by default. to_best: of the
    cone by default, to dot product with those of its blocks that take the fewest. Without "together" if a kernel of a
    training step is missing.
    """

    arch: int
    dtype: str
    score: str
    at_most: float
    by_default: dict[str, float]
    alike: dict[str, float]
    to_best: dict[str, float]

    @property
    def holds(self) -> bool:
        """Not if one of the comparisons could not be made, either."""
        judged = [*self.by_default.values(), *self.alike.values()]
        return self.by_default.keys() == self.alike.keys() and max(judged) <= self.at_most

    def shown(self, kernel: str) -> str:
        """By default / alike (to the best)."""
        if kernel not in self.by_default:
            return ""
        alike = f"{self.alike[kernel]:.2f}" if kernel in self.alike else "-"
        return f"{self.by_default[kernel]:.2f} / {alike} ({self.to_best[kernel]:.2f})"


def promises(results: dict[Case, Found]) -> list[Promise]:
    """What was promised of the cones, and what was found."""
    found = []
    for arch, dtype in dict.fromkeys((case.arch, case.dtype) for case in results):
        step = [kernel for kernel in STEP if kernel != ONLY_SINGLE or dtype == "float32"]
        for score, at_most in PROMISED.items():
            cones = {kernel: Case(kernel, score, dtype, FULL_SIZE, arch) for kernel in step}
            dots = {kernel: case._replace(score="dot") for kernel, case in cones.items()}
            default = {kernel: per_pair(results, case) for kernel, case in cones.items()}
            default_dot = {kernel: per_pair(results, case) for kernel, case in dots.items()}
            alike = {kernel: per_pair(results, alike_of(results, case)) for kernel, case in cones.items()}
            best = {kernel: fewest(results, case) for kernel, case in dots.items()}
            ratios = [ratios_of(*both) for both in ((default, default_dot), (alike, default_dot), (default, best))]
            if ratios[0]:
                found.append(Promise(arch, dtype, score, at_most, *ratios))
    return found


def per_pair(results: dict[Case, Found], case: Case | None) -> float | None:
    found = results.get(case) if case else None
    return found.per_pair if found else None


def alike_of(results: dict[Case, Found], case: Case) -> Case | None:
    """A cone's case with the blocks that dot product has by default."""
    dot = results.get(case._replace(score="dot"))
    if dot is None:
        return None
    default = results.get(case)
    return case if default and default.blocks == dot.blocks else case._replace(blocks=dot.blocks)


def fewest(results: dict[Case, Found], case: Case) -> float | None:
    """Instructions a pair by default or, if they are fewer and do not spill, with blocks that are tried beside."""
    others = [found for other, found in results.items() if other.blocks and other._replace(blocks=None) == case]
    counts = [per_pair(results, case), *(found.per_pair for found in others if not found.reasons())]
    return min((count for count in counts if count), default=None)


def ratios_of(cones: dict[str, float | None], dots: dict[str, float | None]) -> dict[str, float]:
    """For each kernel that both have and, if that is each, for all of them together."""
    both = {kernel: (cone, dot) for kernel, cone in cones.items() if cone and (dot := dots[kernel])}
    if len(both) == len(cones):
        both["together"] = (sum(cone for cone, _ in both.values()), sum(dot for _, dot in both.values()))
    return {kernel: cone / dot for kernel, (cone, dot) in both.items()}


def show_promises(screen: Screen, found: list[Promise]) -> None:
    """Whether cones take as few instructions a pair as promised, in each kernel and in all of a training step."""
    kernels = (*STEP, "together")
    rows = [
        [
            f"sm_{promise.arch}",
            promise.dtype,
            promise.score,
            f"{promise.at_most} at most",
            "holds" if promise.holds else "does not hold",
            *(promise.shown(kernel) for kernel in kernels),
        ]
        for promise in found
    ]
    if rows:
        title = (
            f"instructions a pair, of those of dot product, E={FULL_SIZE}: each by default / both with the blocks of"
            " dot product (each by default, but dot product with the best of its blocks: not promised)"
        )
        screen.table(title, ["", "dtype", "score", "promised", "", *kernels], rows)


def record(results: dict[Case, Found]) -> dict[str, Any]:
    """What docs/backends.md quotes."""
    import triton

    gate = []
    for arch, full in dict.fromkeys((case.arch, case.full) for case in results):
        those = [found for case, found in results.items() if (case.arch, case.full) == (arch, full) and not case.blocks]
        gate.append(
            {
                "arch": arch,
                "full": full,
                "kernels": len(those),
                "failed": sum(bool(found.reasons()) for found in those),
                "registers": max(found.registers for found in those),
                "shared": max(found.shared for found in those),
            }
        )
    here = machine.this_machine()
    return {
        "machine": {
            "date": here.date,
            "commit": here.commit,
            "coneheads": here.coneheads,
            "triton": triton.__version__,
        },
        "gate": gate,
        "promises": [promise._asdict() for promise in promises(results)],
    }


def conclude(screen: Screen, results: dict[Case, Found]) -> int:
    """Names every kernel that fails and every promise that does not hold, and gives the exit code."""
    failed = {case: "; ".join(reasons) for case, found in results.items() if (reasons := found.reasons())}
    for case, reason in failed.items():
        screen.say(f"{'fails' if case.gated else 'not in the gate'}: {case}: {reason}")
    broken = [promise for promise in promises(results) if not promise.holds]
    for promise in broken:
        cone = f"{promise.score}, {promise.dtype}, E={FULL_SIZE}, sm_{promise.arch}"
        screen.say(f"fails: {cone}: more than {promise.at_most} times the instructions of dot product")
    offenders = sum(case.gated for case in failed)
    gated = sum(case.gated for case in results)
    screen.say(f"{gated - offenders} of {gated} kernels in the gate compile, do not spill and fit in memory")
    return 1 if offenders or broken else 0


def check(cases: Sequence[Case], jobs: int = 1, save: Path | None = None) -> int:
    """Compiles the cases, shows what was found, and gives the exit code. save: the file that ``record`` goes to."""
    screen = Screen(0)
    probes = [Case("forward", "dot", "float16", 16, OPTIONAL)] if any(case.arch == OPTIONAL for case in cases) else []
    with Progress(False, len(cases) + len(probes), "compiling", "kernels") as progress:
        missing = [probe for probe in compile_all(probes, 1, progress) if probe.error] if probes else []
        if missing:
            progress.skip(sum(case.arch == OPTIONAL for case in cases))
            cases = [case for case in cases if case.arch != OPTIONAL]
        results = {found.case: found for found in compile_all(cases, jobs, progress)}
    show(screen, results)
    show_promises(screen, promises(results))
    if save:
        save.write_text(json.dumps(record(results), indent=1) + "\n")
    for probe in missing:
        screen.say(f"sm_{OPTIONAL} was not checked: this triton cannot compile for it: {probe.error}")
    return conclude(screen, results)


def _list_of(known: Sequence[Any]) -> Any:
    """The type of a flag that takes some of the known values, with commas between."""

    def parse(text: str) -> list[Any]:
        values = {str(value): value for value in known}
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in values]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; choose from {', '.join(values)}")
        return [values[name] for name in dict.fromkeys(chosen)]

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coneheads.lab.gpu_check", description=(__doc__ or "").split("\n")[0]
    )
    for flag, known in {
        "arch": tuple(SHARED),
        "scores": tuple(SCORES),
        "dtypes": tuple(DTYPES),
        "sizes": SIZES,
        "kernels": KERNELS,
    }.items():
        shown = ",".join(map(str, known))
        parser.add_argument(f"--{flag}", type=_list_of(known), default=list(known), metavar=shown, help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one for each core")
    parser.add_argument("--save", type=Path, metavar="FILE", help="a JSON file for what docs/backends.md quotes")
    options = parser.parse_args(arguments)
    if options.save and not options.save.absolute().parent.is_dir():
        parser.error(f"--save: there is no folder {options.save.absolute().parent}")
    if reason := unavailable():
        print(f"gpu_check cannot compile the kernels: {reason}", file=sys.stderr)
        return 1
    try:
        return check(cases_of(options), max(1, options.jobs), options.save)
    except BrokenProcessPool:
        print("gpu_check: a process that compiled was killed (out of memory?); try fewer --jobs", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
