"""The score of graph attention networks: on edges only, and not a function of a distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import leaky_relu

from coneheads import _checks
from coneheads.scores.base import Parameter, Score


@dataclass(frozen=True)
class Concatenation(Score):
    """``score = LeakyReLU(q + k)`` of queries and keys of one feature each: GAT's ``a_dst.W h_i`` and ``a_src.W h_j``.

    The attention vector of GAT acts on the concatenation of two nodes, so its product is a sum of one number a node;
    make these numbers first, and give them as query and key of size E = 1.

    >>> import torch, coneheads
    >>> x, a_dst, a_src = torch.randn(4, 2, 8), torch.randn(2, 8), torch.randn(2, 8)
    >>> query, key = (x * a_dst).sum(-1, keepdim=True), (x * a_src).sum(-1, keepdim=True)
    >>> edges = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 0]])
    >>> coneheads.edge_attention(query, key, x, edges, score="concatenation").shape
    torch.Size([4, 2, 8])
    """

    negative_slope: Parameter = 0.2

    name: ClassVar[str] = "concatenation"
    measures: ClassVar = "distance_sq"
    pair_fields: ClassVar = ("negative_slope",)

    def __post_init__(self) -> None:
        _checks.number("negative_slope", self.negative_slope)

    def for_size(self, size: int) -> Concatenation:
        if size != 1:
            raise ValueError(
                f"score 'concatenation' takes queries and keys of one feature (E = 1), the products of a node with the "
                f"two halves of GAT's attention vector, in edge_attention; got E = {size}"
            )
        return self

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """No position; the feature itself is the level."""
        return features[..., :-1], features[..., -1]

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        total = q_level + k_level
        if isinstance(self.negative_slope, Tensor):
            return total.clamp_min(0) + self.negative_slope * total.clamp_max(0)
        return leaky_relu(total, self.negative_slope)
