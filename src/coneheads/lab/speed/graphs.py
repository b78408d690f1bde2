"""What ``coneheads bench --graph`` measures: layers on graphs, ours and those of torch_geometric, and what is promised.

A run is a layer at work on one graph, or an epoch of a network of two. torch_geometric runs in several ways: with the
edges as they are ("pyg"), with its ``EdgeIndex``, sorted and with its caches filled ("pyg_sorted"), and in an epoch
with sparse features too, as the lab's network has them ("pyg_sparse"). Ours is compared with the fastest of them, and
in memory with the leanest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from coneheads.lab.machine import Machine
from coneheads.lab.speed.targets import BOTH, THREADS, Target

EPOCH = "epoch"
OURS, OURS_DENSE = "coneheads", "coneheads_dense"
PYG_LAYER_WAYS = ("pyg", "pyg_sorted")
PYG = (*PYG_LAYER_WAYS, "pyg_sparse")
# What each layer of ours is compared with: the one of torch_geometric that has the same projections.
COUNTERPARTS = {
    "penumbral": "TransformerConv",
    "umbral": "TransformerConv",
    "dot": "TransformerConv",
    "concatenation": "GATConv",
}
PYG_LAYERS = ("TransformerConv", "GATConv", "GATv2Conv")
EPOCH_LAYERS = ("concatenation", "penumbral")
# Numbers for each edge and feature of a head that torch_geometric has in memory at its peak, as measured.
PYG_COPIES = 7


class Graph(NamedTuple):
    """Edges include the self-loops, features are those of a node before the layer."""

    name: str
    nodes: int
    edges: int
    features: int
    heads: int
    size: int


CORA_NODES = 2708
CORA = Graph("cora", CORA_NODES, 10556 + CORA_NODES, 1433, 8, 8)
LARGE = Graph("random", 200_000, 3_000_000, 128, 8, 16)


@dataclass(frozen=True)
class GraphRun:
    """A layer [nodes, features] -> [nodes, heads * size] on a graph, its pass, or an epoch of a network of two."""

    candidate: str
    layer: str  # one of ours, named by its score, or one of torch_geometric's
    graph: str
    nodes: int
    edges: int
    features: int
    heads: int
    size: int
    pass_: str = "forward"  # or "forward_backward", or "epoch"
    threads: int = THREADS

    @property
    def yardstick(self) -> GraphRun:
        """The run of torch_geometric that it is compared with, with the edges as they are."""
        layer = "GATConv" if self.pass_ == EPOCH else COUNTERPARTS.get(self.layer, self.layer)
        return dataclasses.replace(self, candidate=PYG[0], layer=layer)

    @property
    def sizes(self) -> str:
        return f"{self.graph}, {self.nodes} nodes, {self.edges} edges, {self.features} -> {self.heads} x {self.size}"

    @property
    def work(self) -> str:
        return self.pass_.replace("_", " + ")


@dataclass(frozen=True)
class GraphResult:
    """What was found of a run. None: not measured, and ``note`` says why."""

    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repetitions: int = 0
    ratio_to_pyg: float | None = None  # of the medians, to the fastest way of torch_geometric
    peak_mb: float | None = None  # beside the inputs
    parity_error: float | None = None  # against float64, relative to the largest entry
    other_load: float | None = None  # the share of the processors that other programs kept busy meanwhile
    note: str = ""


@dataclass(frozen=True)
class GraphRow:
    run: GraphRun
    result: GraphResult
    machine: Machine


GraphRound = tuple[GraphRun, ...]


def layer_rounds(graph: Graph, threads: int) -> list[GraphRound]:
    """All layers on a graph: one round for each pass."""
    layers = [*((OURS, name) for name in COUNTERPARTS), *((how, name) for name in PYG_LAYERS for how in PYG_LAYER_WAYS)]
    return [tuple(GraphRun(how, name, *graph, pass_, threads) for how, name in layers) for pass_ in BOTH]


def epoch_round(graph: Graph, threads: int) -> GraphRound:
    """The network of the paper: the lab's, the same on dense features, and torch_geometric's."""
    layers = [(how, name) for name in EPOCH_LAYERS for how in (OURS, OURS_DENSE)]
    layers += [(how, "GATConv") for how in PYG]
    return tuple(GraphRun(how, name, *graph, EPOCH, threads) for how, name in layers)


def rounds() -> list[GraphRound]:
    """What the promises need, and the other layers beside it."""
    return [*layer_rounds(CORA, THREADS), epoch_round(CORA, THREADS), *layer_rounds(LARGE, THREADS)]


def targets() -> list[Target[GraphRun]]:
    """All promises about graphs."""

    def promise(run: GraphRun, limit: float, memory: bool = False) -> Target[GraphRun]:
        what = f"{run.layer}, {run.work}, {run.sizes}: {'peak memory of' if memory else 'of'} {run.yardstick.layer}'s"
        what += "" if memory else " epoch" if run.pass_ == EPOCH else " time"
        return Target(what, run, run.yardstick, limit, quantity="memory" if memory else "time")

    large = {name: GraphRun(OURS, name, *LARGE, "forward_backward", THREADS) for name in COUNTERPARTS}
    promised = [promise(large[name], 0.5) for name in ("penumbral", "umbral")]
    promised += [promise(large[name], 0.35, memory=True) for name in ("penumbral", "umbral")]
    promised.append(promise(large["concatenation"], 0.5))
    promised += [promise(GraphRun(OURS, name, *CORA, EPOCH, THREADS), 0.7) for name in EPOCH_LAYERS]
    return promised


def best_of_pyg(results: dict[GraphRun, GraphResult]) -> dict[GraphRun, GraphResult]:
    """The results, those of "pyg" with the least time and the least memory of all its ways."""

    def least(values: Iterable[float | None]) -> float | None:
        return min((value for value in values if value is not None), default=None)

    best = dict(results)
    for run in results:
        if run.candidate in PYG:
            ways = [results.get(dataclasses.replace(run, candidate=how), GraphResult()) for how in PYG]
            median, peak = least(one.median_ms for one in ways), least(one.peak_mb for one in ways)
            best[run.yardstick] = dataclasses.replace(ways[0], median_ms=median, peak_mb=peak)
    return best


def verdicts(rows: list[GraphRow]) -> list[tuple[Target[GraphRun], float | None]]:
    """Every promise with what the rows say about it."""
    results = best_of_pyg({row.run: row.result for row in rows})
    return [(target, target.value(results)) for target in targets()]


def with_ratios(results: dict[GraphRun, GraphResult]) -> dict[GraphRun, GraphResult]:
    """The results of a round with ``ratio_to_pyg``."""
    best = best_of_pyg(results)
    found = {}
    for run, result in results.items():
        base = best.get(run.yardstick, GraphResult()).median_ms
        ratio = result.median_ms / base if result.median_ms is not None and base else None
        found[run] = dataclasses.replace(result, ratio_to_pyg=ratio)
    return found


def why_not(run: GraphRun, memory_bytes: int | None) -> str:
    """Why a run is left out; empty if it is not."""
    needed = PYG_COPIES * run.edges * run.heads * run.size * 4
    if run.candidate in PYG and memory_bytes and needed > 0.8 * memory_bytes:
        return f"it would need about {needed / 2**30:.0f} GB, more than 80 % of the memory"
    return ""
