"""What one row of a benchmark is: a candidate at work on one size, and what was found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

YARDSTICK = "sdpa"


@dataclass(frozen=True)
class Run:
    """A candidate, what it computes, and the sizes [B, H, L, E], [B, H, S, E], [B, H, S, Ev] of its inputs."""

    candidate: str
    score: str
    B: int
    H: int
    L: int
    S: int
    E: int
    Ev: int
    dtype: str = "float32"
    causal: bool = False
    pass_: str = "forward"  # or "forward_backward", or "backward" alone
    threads: int = 2

    @property
    def yardstick(self) -> Run:
        """The SDPA that it is compared with: dot products of E = Ev features, everything else the same."""
        return dataclasses.replace(self, candidate=YARDSTICK, score="dot", E=self.Ev)

    @property
    def sizes(self) -> str:
        sizes = f"B={self.B} H={self.H} L={self.L}" + ("" if self.S == self.L else f" S={self.S}")
        return f"{sizes} E={self.E}" + ("" if self.Ev == self.E else f" Ev={self.Ev}")

    @property
    def setting(self) -> str:
        """All but candidate, score, E and threads, in words: what the runs of one round mostly share."""
        sizes = dataclasses.replace(self, E=self.Ev).sizes
        return f"{sizes}, {self.dtype}{', causal' if self.causal else ''}, {self.work}"

    @property
    def work(self) -> str:
        return self.pass_.replace("_", " + ")


@dataclass(frozen=True)
class Result:
    """What was found of a run. None: not measured, and ``note`` says why."""

    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repetitions: int = 0
    ratio_to_sdpa: float | None = None  # of the medians
    peak_mb: float | None = None  # beside the inputs
    parity_error: float | None = None  # against float64, relative to the largest entry
    other_load: float | None = None  # the share of the processors that other programs kept busy meanwhile
    note: str = ""


#: runs that are measured in turns, so that a disturbance of the machine meets them all
Round = tuple[Run, ...]


def with_yardsticks(runs: Round) -> Round:
    """The runs, each once, with the SDPA that every one is compared with in front."""
    return tuple(dict.fromkeys([*(run.yardstick for run in runs), *runs]))
