"""The tasks ``cora``, ``citeseer`` and ``pubmed``: what is a paper about, given its words and what it cites?

One graph; a few nodes of each class have a label, 500 others choose the model, 1000 others are the test. A batch is the
whole training set, as in the paper's recipe.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coneheads.backends.sorted_edges import SortedEdges
from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.models.gat import GAT, Graph, OneGraph, SparseFeatures
from coneheads.lab.tasks import graph_files
from coneheads.lab.tasks.base import Batch, Task
from coneheads.lab.tasks.options import CoraOptions


class Planetoid(Task):
    """See the top of this file."""

    options: CoraOptions

    def __init__(self, options: CoraOptions, seed: int) -> None:
        super().__init__(options, seed)
        data = graph_files.planetoid(options.root, options.files)
        self.labels, self.classes = data.y, int(data.y.max()) + 1
        self.nodes = {
            split: mask.nonzero().squeeze(1)
            for split, mask in (("train", data.train_mask), ("valid", data.val_mask), ("test", data.test_mask))
        }
        x = data.x / data.x.sum(1, keepdim=True).clamp_min(1)  # the share of a word among those of a paper
        edges = SortedEdges.of(with_self_loops(data.edge_index, len(x)), len(x))
        self.graph = Graph(SparseFeatures.of(x), edges, x.shape[1])

    def model(self, options: ModelOptions) -> nn.Module:
        _only_gat(options)
        return OneGraph(GAT(options, self.graph.features, self.classes), self.graph)

    def train_batch(self, step: int, size: int) -> Batch:
        if size != len(self.nodes["train"]):
            raise WrongUse(
                f"--train.batch: a batch is the whole training set, {len(self.nodes['train'])} nodes; got {size}"
            )
        return self._batch("train")

    def batches(self, split: str, size: int) -> Iterator[Batch]:
        # One forward computes all nodes, so all of a split are asked for at once.
        yield self._batch(split)

    def _batch(self, split: str) -> Batch:
        nodes = self.nodes[split]
        return Batch({"nodes": nodes}, self.labels[nodes], torch.ones(len(nodes)))

    def example(self) -> None:
        return None

    def chance(self) -> float:
        """Of the class that occurs most often in the test set."""
        return float(torch.bincount(self.labels[self.nodes["test"]]).max()) / len(self.nodes["test"])


def with_self_loops(edge_index: Tensor, nodes: int) -> Tensor:
    """The edges without self-loops, then one at each node."""
    others = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([others, torch.arange(nodes).expand(2, nodes)], 1)


def _only_gat(options: ModelOptions) -> None:
    for name in ("feedforward", "embedding_scale", "width", "qk_norm", "qk_scale", "height_spread", "height_start"):
        if getattr(options, name) != getattr(ModelOptions(), name):
            raise WrongUse(f"--model.{name}: a graph attention network has none; leave it out")
