"""Shadow cones whose light stands at the origin of the ball: positions are directions, distances are angles.

The law is that of cones.py, ``level(lca) = max( level_q, level_k, (level_q + level_k + angle) / 2 )``, and the score is
``-gamma`` times that level itself. The penumbral ones are Ganea's entailment cones with ``K = sinh(R)/2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coneheads import _checks
from coneheads.geometry import lifts, shadow_cones
from coneheads.geometry.primitives import angle_from_chord_sq, softplus, unit
from coneheads.scores.base import TINY, Names, PairGradient, Parameter, Score, per_token
from coneheads.scores.cones import lca_level_backward


def direction_and_excess(features: Tensor) -> tuple[Tensor, Tensor]:
    """The unit direction of the first E-1 features, and ``softplus(f_d) >= 0``: how far outside the inner radius."""
    position = features[..., :-1].clamp(-lifts.POSITION_LIMIT, lifts.POSITION_LIMIT)
    return unit(position), softplus(features[..., -1])


class _FiniteCone(Score):
    """What both share: ``score = -gamma * level(lca)``, with the squared chord of the directions as the measure."""

    gamma: Parameter  # a field of each subclass, after its radius
    pair_fields: ClassVar = ("gamma",)

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        return -self.gamma * shadow_cones.lca_level(q_level, k_level, angle_from_chord_sq(measure))

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """``d angle / d chord^2 = 1 / sqrt(chord^2 (4 - chord^2))``, taken as 0 at both ends."""
        angle = angle_from_chord_sq(measure)
        grad_angle, grad_q, grad_k = lca_level_backward(-self.gamma * grad, angle, q_level, k_level)
        rest = (4 - measure).clamp_min(0)
        grad_measure = grad_angle * rest.sign() / (measure.clamp_min(TINY).sqrt() * rest.clamp_min(TINY).sqrt())
        parameters = {}
        if "gamma" in wanted:
            parameters["gamma"] = -grad * shadow_cones.lca_level(q_level, k_level, angle)
        return PairGradient(grad_measure, grad_q, grad_k, parameters)


@dataclass(frozen=True)
class FinitePenumbral(_FiniteCone):
    """Penumbral cones round a ball of light of radius R at the origin: ``score = -gamma * level(lca)``.

    Points at distance ``rho = R + softplus(f_d)`` have the level ``-arccos(tanh R / tanh rho)``, 0 at the light. These
    are Ganea's entailment cones with ``K = sinh(R)/2``; the default R is about their usual K = 0.1.

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[1.0, 0.0, -1.0]]]), torch.tensor([[[2.0, 0.0, 3.0]]])   # q is nearer to the light
    >>> scores = [coneheads.attention_scores(q, other, score=FinitePenumbral()).item() for other in (q, k)]
    >>> scores[0] == scores[1]                                                         # and an ancestor of k
    True
    """

    light_radius: Parameter = 0.2
    gamma: Parameter = 1.0

    name: ClassVar[str] = "penumbral_finite"
    point_fields: ClassVar = ("light_radius",)

    def __post_init__(self) -> None:
        _checks.number("light_radius", self.light_radius, least=0, above=True)
        _checks.number("gamma", self.gamma, least=0)

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        direction, excess = direction_and_excess(features)
        return direction, shadow_cones.finite_penumbral_level(excess, per_token(self.light_radius))


@dataclass(frozen=True)
class FiniteUmbral(_FiniteCone):
    """Umbral cones of balls of radius r under a point of light at the origin: ``score = -gamma * level(lca)``.

    Points at distance ``rho = r + softplus(f_d)`` have the level ``arcsin(sinh r / sinh rho)``.

    >>> import torch, coneheads
    >>> q = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> same, apart = coneheads.attention_scores(q, q, score=FiniteUmbral())[0, 0].tolist()
    >>> same > apart
    True
    """

    radius: Parameter = 0.1
    gamma: Parameter = 1.0

    name: ClassVar[str] = "umbral_finite"
    point_fields: ClassVar = ("radius",)

    def __post_init__(self) -> None:
        _checks.number("radius", self.radius, least=0, above=True)
        _checks.number("gamma", self.gamma, least=0)

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        direction, excess = direction_and_excess(features)
        return direction, shadow_cones.finite_umbral_level(excess, per_token(self.radius))


SCORES = (FinitePenumbral, FiniteUmbral)
