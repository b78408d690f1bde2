"""Numbers of a score that the Triton kernels read once a head, and what they leave out of scores. See scores.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coneheads.scores import (
    FinitePenumbral,
    FiniteUmbral,
    HalfSpaceDistance,
    HyperboloidDistance,
    Penumbral,
    Score,
    Umbral,
)

LOG2_E = math.log2(math.e)


def fields(score: Score) -> list[Tensor]:
    """The numbers that pairs depend on, float64 [B|1, H|1, 1]."""
    return [torch.as_tensor(getattr(score, name)).double()[..., 0] for name in score.pair_fields]


def factor(score: Score) -> Tensor:
    """That of scores.py, of lengths as they came."""
    a, *others = fields(score)
    if isinstance(score, Penumbral):
        return others[0] * {"height": LOG2_E / 2, "height_sq": LOG2_E / 4, "distance": 0.5}[score.readout]
    if isinstance(score, Umbral):
        a, gamma = 1 / a.sinh(), others[0]
        ratios = {"height": a * LOG2_E / 2, "height_sq": a.square() * LOG2_E / 4, "distance": torch.ones_like(a)}
        return gamma * ratios[score.readout]
    if isinstance(score, FinitePenumbral | FiniteUmbral):
        return a * LOG2_E / 2
    if isinstance(score, HalfSpaceDistance | HyperboloidDistance):
        return a * LOG2_E * 2
    return a * LOG2_E


def light_height(score: Penumbral, scaled: bool) -> Tensor:
    """In the units of the lengths: see SCALED in scores.py."""
    height = fields(score)[0]
    return height * factor(score) if scaled else height


def of_heads(score: Score, scaled: bool, batch: int, heads: int) -> Tensor:
    """float32 [B, H, 4]: a, b, c and factor of scores.py."""
    a, *others = fields(score)
    one = torch.ones_like(a)
    b, c = others[0] if others else one, one
    if isinstance(score, Penumbral):
        a, c = light_height(score, scaled), 1 / a.square()
    elif isinstance(score, Umbral):
        a, c = 1 / a.sinh(), 1 / a.tanh()
    shape = (batch, heads, 1)
    return torch.cat([part.expand(shape) for part in (a, b, c, factor(score))], -1).float().contiguous()


def shares_levels(score: Score) -> bool:
    """Whether the kernels leave out of the scores of a query what its level adds to all of them."""
    return isinstance(score, Umbral) and score.readout == "height"


def shared_slope(score: Score) -> Tensor:
    """Of what is left out, by the level of the query."""
    radius, gamma = fields(score)
    return -gamma / (2 * radius.sinh())


def shared_score(score: Score, level: Tensor | None) -> Tensor | float:
    """What is left out of the scores of a query, in which only umbral cones read `level`: float64 [B|1, H|1, L|1]."""
    if shares_levels(score):
        assert level is not None
        return shared_slope(score) * level
    if isinstance(score, HalfSpaceDistance | HyperboloidDistance):
        return -fields(score)[1]
    return 0.0
