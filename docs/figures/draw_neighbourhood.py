"""Draws cora_neighbourhood.png for docs/experiments.md: how much a paper of Cora attends to those that it is linked to.

Two networks that docs/studies.py trained, alike but for the score, look at the same node: the weights of its incoming
edges in the last layer, whose values are the logits. `python docs/figures/draw_neighbourhood.py [--runs DIR]`
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import elu

from coneheads import SortedEdges, edge_attention
from coneheads.lab.checkpoint import load_run

ROOT = Path(__file__).resolve().parent.parent.parent
SCORES = ("dot", "penumbral")
# Some neighbours are enough to see, and few enough to be told apart.
NEIGHBOURS = 14
SUBJECTS = ListedColormap(["#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#76b7b2"])


class Neighbourhood(NamedTuple):
    """The nodes around one, which comes first, the links among them, and their subjects."""

    nodes: list[int]
    links: list[tuple[int, int]]
    subjects: list[int]


def neighbourhood_of(edges: SortedEdges, labels: Tensor) -> Neighbourhood:
    """Of the node with NEIGHBOURS neighbours that are the most divided: about half have its subject."""
    source, target = edges.edge_index
    others = source != target
    degrees = torch.bincount(target[others], minlength=edges.targets)
    alike = torch.bincount(target[others & (labels[source] == labels[target])], minlength=edges.targets)
    divided = (alike - NEIGHBOURS / 2).abs().masked_fill(degrees != NEIGHBOURS, torch.inf)
    centre = int(divided.argmin())
    around = source[others & (target == centre)].tolist()
    nodes = [centre, *sorted(around, key=lambda node: (int(labels[node]) != int(labels[centre]), int(labels[node])))]
    chosen = set(nodes)
    links = [(a, b) for a, b in edges.edge_index.T.tolist() if a < b and a in chosen and b in chosen]
    return Neighbourhood(nodes, links, labels[nodes].tolist())


class Look(NamedTuple):
    """What a network looks at: the weight of every edge in its last layer, and how it does."""

    weights: Tensor
    accuracy: float

    @staticmethod
    def of(run: Path) -> "Look":
        _, task, model = load_run(run)
        graph, (first, layer) = model.graph, model.net.layers
        with torch.no_grad():
            x = (elu(first(graph.x, graph.edges)) @ layer.weight).view(-1, layer.heads, layer.size)
            _, weights = edge_attention(x, x, x, graph.edges, score=layer.cone.score(), return_weights=True)
            batch = next(iter(task.batches("test", 1)))
            accuracy = (model(**batch.inputs).argmax(-1) == batch.targets).double().mean().item()
        return Look(weights.mean(1), accuracy)

    def into(self, node: int, edges: SortedEdges) -> dict[int, float]:
        """The weights of the edges into a node, by source."""
        source, target = edges.edge_index
        return dict(zip(source[target == node].tolist(), self.weights[target == node].tolist(), strict=True))

    def on_the_same_subject(self, edges: SortedEdges, labels: Tensor) -> float:
        """The share of all weight that is on a node of the same subject."""
        source, target = edges.edge_index
        return (self.weights[labels[source] == labels[target]].sum() / self.weights.sum()).item()


def draw(axes: Axes, around: Neighbourhood, weights: dict[int, float], title: str) -> None:
    """The node in the middle, its neighbours in a circle, those of one subject side by side."""
    centre, *others = around.nodes
    places = {centre: (0.0, 0.0)}
    for i, node in enumerate(others):
        angle = 2 * math.pi * i / len(others)
        places[node] = (math.cos(angle), math.sin(angle))
    for a, b in around.links:
        if centre not in (a, b):
            axes.plot(*zip(places[a], places[b], strict=True), color="#cccccc", linewidth=1, zorder=1)
    for node in others:
        x, y = places[node]
        axes.plot([0, x], [0, y], color="#333333", linewidth=60 * weights[node], zorder=2, solid_capstyle="butt")
        axes.annotate(f"{weights[node]:.3f}", (1.24 * x, 1.16 * y), ha="center", va="center", fontsize=8)
    for (node, (x, y)), subject in zip(places.items(), around.subjects, strict=True):
        size = 620 if node == centre else 260
        axes.scatter(x, y, s=size, color=SUBJECTS(subject), edgecolor="black" if node == centre else "white", zorder=3)
    axes.annotate(f"{weights[centre]:.3f}", (0, 0), ha="center", va="center", fontsize=8, color="white", zorder=4)
    axes.set_title(title, fontsize=10)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs/studies/runs", help="the runs of the study cora")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/cora_neighbourhood.png")
    arguments = parser.parse_args()
    found = {score: sorted(arguments.runs.glob(f"{score}-8-seed0-*")) for score in SCORES}
    runs = {score: next((run for run in folders if "cora" in (run / "config.yaml").read_text()), None)
            for score, folders in found.items()}  # fmt: skip
    for score, run in runs.items():
        if run is None:
            parser.error(f"--runs: {arguments.runs} has no run of {score} on Cora; docs/studies.py cora makes it")
    _, task, model = load_run(runs[SCORES[0]])
    edges, labels = model.graph.edges, task.labels
    around = neighbourhood_of(edges, labels)
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    for axes, score in zip(figure.subplots(1, len(SCORES)), SCORES, strict=True):
        look = Look.of(runs[score])
        weights = look.into(around.nodes[0], edges)
        draw(axes, around, weights, f"{score}: weights from {min(weights.values()):.3f} to {max(weights.values()):.3f}")
        share = look.on_the_same_subject(edges, labels)
        print(f"{score}: accuracy {look.accuracy:.3f}; {share:.3f} of all weight is on papers of the same subject")
    figure.savefig(arguments.out, dpi=150)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
