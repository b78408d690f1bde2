"""The task ``ppi``: which of 121 functions does a protein have, given those that it interacts with?

Twenty graphs to train on, two to choose the model, two to test it, none of which a model has seen a part of before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.gat import GAT, ManyGraphs
from coneheads.lab.tasks import graph_files
from coneheads.lab.tasks.base import TRAINING, Batch, Task, generator, in_parts
from coneheads.lab.tasks.options import PPIOptions
from coneheads.lab.tasks.planetoid import _only_gat, with_self_loops

LAST_HEADS = 6
COUNTS = ("true_positive", "false_positive", "false_negative")


class PPI(Task):
    """See the top of this file."""

    options: PPIOptions
    headline = "micro_f1"

    def __init__(self, options: PPIOptions, seed: int) -> None:
        super().__init__(options, seed)
        data = graph_files.ppi(options.root)
        graphs = [graph for split in data.values() for graph in split]
        self.graphs = [(graph.x, with_self_loops(graph.edge_index, len(graph.x))) for graph in graphs]
        counts = [len(split) for split in data.values()]
        numbers = torch.arange(len(graphs)).split(counts)
        self.numbers = dict(zip(data, numbers, strict=True))
        largest = max(len(graph.x) for graph in graphs)
        self.labels = torch.stack([_padded(graph.y, largest) for graph in graphs])  # [graphs, nodes, 121]
        self.weights = torch.stack([_padded(torch.ones(len(graph.x)), largest) for graph in graphs])  # [graphs, nodes]

    def model(self, options: ModelOptions) -> nn.Module:
        _only_gat(options)
        features, classes = self.graphs[0][0].shape[1], self.labels.shape[-1]
        return ManyGraphs(GAT(options, features, classes, last_heads=LAST_HEADS, skip=True), self.graphs)

    def train_batch(self, step: int, size: int) -> Batch:
        """Graphs without repetition until all were seen, then in another order."""
        numbers = self.numbers["train"]
        places = torch.arange(step * size, (step + 1) * size)
        rounds = [
            torch.randperm(len(numbers), generator=generator(self.seed, TRAINING, int(i)))
            for i in (places // len(numbers)).unique()
        ]
        order = torch.cat(rounds)[places - int(places[0]) // len(numbers) * len(numbers)]
        return self._batch(numbers[order])

    def batches(self, split: str, size: int) -> Iterator[Batch]:
        return in_parts(self._batch(self.numbers[split]), 2)

    def _batch(self, numbers: Tensor) -> Batch:
        return Batch({"graphs": numbers}, self.labels[numbers], self.weights[numbers])

    def example(self) -> None:
        return None

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean over the functions, for each protein."""
        return nn.functional.binary_cross_entropy_with_logits(outputs, batch.targets, reduction="none").mean(-1)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        said, true = outputs > 0, batch.targets > 0.5
        counts = (said & true, said & ~true, ~said & true)
        return {name: count.sum(-1).to(batch.weights) for name, count in zip(COUNTS, counts, strict=True)}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """``micro_f1 = 2 tp / (2 tp + fp + fn)`` over all proteins and functions."""
        true, false, missed = (metrics.pop(name) for name in COUNTS)
        return metrics | {"micro_f1": 2 * true / max(2 * true + false + missed, 1e-12)}


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
