"""A probabilistic tree grammar: a full tree of symbols, drawn from the root down, and what its leaves tell of the rest.

The root's symbol is uniform. The symbol of a child is drawn given that of its parent, with a table of its own for every
level and every place among the siblings. So siblings differ from one another, as the children of a rule of a grammar
do, and a level differs from the next: nothing that is learned of one can be reused for another without being learned.

What the leaves tell is computed by belief propagation, which is exact on a tree: messages go up from the leaves, and
for the leaves themselves down again. It costs O(leaves * symbols^2) a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Divides the logits at noise 0: all but the largest get a probability of exactly 0.
LEAST_NOISE = 1e-9


@dataclass(frozen=True)
class Grammar:
    """tables [depth, branching, q, q], float64: of the child's symbol (last) given its parent's, from the root down."""

    tables: Tensor

    @classmethod
    def random(cls, depth: int, branching: int, symbols: int, noise: float, source: torch.Generator) -> Grammar:
        """The rows of the tables are softmax(z / noise) with z standard normal.

        noise 0: a child is a function of its parent, though not one that can be inverted, since two parents may have
        the same child. As noise grows a child depends less and less on its parent.
        """
        logits = torch.randn(depth, branching, symbols, symbols, generator=source, dtype=torch.float64)
        return cls((logits / max(noise, LEAST_NOISE)).softmax(-1))

    @property
    def depth(self) -> int:
        return self.tables.shape[0]

    @property
    def branching(self) -> int:
        return self.tables.shape[1]

    @property
    def symbols(self) -> int:
        return self.tables.shape[2]

    def sample(self, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Roots [N] and leaves [N, branching ** depth], of N trees."""
        roots = torch.randint(self.symbols, (count,), generator=source)
        nodes = roots.unsqueeze(1)
        slots = torch.arange(self.branching)
        for table in self.tables:
            # Without the last sum, which is 1 up to rounding, no number can fall beyond the last symbol.
            sums = table.cumsum(-1)[..., :-1]  # [branching, q, q - 1]
            drawn = torch.rand(count, nodes.shape[1], self.branching, 1, generator=source, dtype=torch.float64)
            nodes = (drawn >= sums[slots, nodes.unsqueeze(-1)]).sum(-1).flatten(1)
        return roots, nodes

    def marginals(self) -> Tensor:
        """[leaves, q]: the distribution of every leaf if nothing is known."""
        nodes = torch.full((1, self.symbols), 1 / self.symbols, dtype=torch.float64)
        for table in self.tables:
            nodes = torch.einsum("ux,sxy->usy", nodes, table).flatten(0, 1)
        return nodes

    def root_posterior(self, leaves: Tensor, hidden: Tensor | None = None) -> Tensor:
        """[N, q]: the distribution of the root given leaves [N, leaves], without those that are hidden (True)."""
        return _normalised(self._upward(self._evidence(leaves, hidden))[0].prod(2)).squeeze(1)

    def leaf_posterior(self, leaves: Tensor, hidden: Tensor) -> Tensor:
        """[N, leaves, q]: the distribution of every leaf given all leaves that are not hidden (True)."""
        evidence = self._evidence(leaves, hidden)
        outside = torch.full((len(leaves), 1, self.symbols), 1 / self.symbols, dtype=torch.float64)  # of the root
        for table, messages in zip(self.tables, self._upward(evidence), strict=True):
            parents = outside.unsqueeze(2) * _product_of_others(messages)  # [N, nodes, branching, q]
            outside = _normalised(torch.einsum("nusx,sxy->nusy", parents, table).flatten(1, 2))
        return _normalised(outside * evidence)

    def _evidence(self, leaves: Tensor, hidden: Tensor | None) -> Tensor:
        """[N, leaves, q]: 1 for every symbol that a leaf may have."""
        evidence = torch.nn.functional.one_hot(leaves, self.symbols).double()
        return evidence if hidden is None else evidence.masked_fill(hidden.unsqueeze(-1), 1.0)

    def _upward(self, evidence: Tensor) -> list[Tensor]:
        """Per level what every child tells its parent: the likelihood of the leaves below it, up to a factor.

        Level by level from the root, each [N, nodes of the level, branching, q].
        """
        found = []
        for table in self.tables.flip(0):
            children = evidence.unflatten(1, (-1, self.branching))
            messages = torch.einsum("nusy,sxy->nusx", children, table)
            # The largest becomes 1, so that a product over a large tree does not underflow.
            messages = messages / messages.amax(-1, keepdim=True)
            found.append(messages)
            evidence = messages.prod(2)
        return found[::-1]


def _product_of_others(messages: Tensor) -> Tensor:
    """For every child the product of its siblings' messages [N, nodes, branching, q]; no division, as some are 0."""
    ones = torch.ones_like(messages[:, :, :1])
    before = torch.cat([ones, messages[:, :, :-1]], 2).cumprod(2)
    after = torch.cat([messages[:, :, 1:], ones], 2).flip(2).cumprod(2).flip(2)
    return before * after


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
