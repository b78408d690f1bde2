"""The dot product: the score of ordinary attention, here as a baseline on the same kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coneheads import _checks
from coneheads.geometry.lifts import POSITION_LIMIT
from coneheads.scores.base import Names, PairGradient, Parameter, Score


@dataclass(frozen=True)
class DotProduct(Score):
    """``score = scale * q.k``; ``scale`` is ``1/sqrt(E)`` unless given.

    >>> import torch, coneheads
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    >>> ours = coneheads.attention(q, k, v, score="dot")
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """

    scale: Parameter | None = None

    name: ClassVar[str] = "dot"
    measures: ClassVar = "product"
    pair_fields: ClassVar = ("scale",)

    def __post_init__(self) -> None:
        if self.scale is not None:
            _checks.number("scale", self.scale)

    def for_size(self, size: int) -> DotProduct:
        return self if self.scale is not None else DotProduct(scale=size**-0.5)

    def points(self, features: Tensor) -> tuple[Tensor, None]:
        """The features themselves; beyond 1e15 they saturate, so that finite inputs give finite scores."""
        return features.clamp(-POSITION_LIMIT, POSITION_LIMIT), None

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        # Queries could carry the scale, which is cheaper; but to round them costs accuracy where features are large.
        assert self.scale is not None
        return measure * self.scale

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        assert self.scale is not None
        parameters = {"scale": grad * measure} if "scale" in wanted else {}
        return PairGradient(grad * self.scale, parameters=parameters)


SCORES = (DotProduct,)
