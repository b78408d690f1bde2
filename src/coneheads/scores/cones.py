"""The scores that the paper proposes: how high is the lowest common ancestor, in the order of shadow cones.

One law serves every cone. With D the distance of two positions and the levels of the points,

    level(lca) = max( level_q, level_k, (level_q + level_k + D) / 2 )

and a score reads that level. The cones differ in how a level is made (``points``, once per token) and read (``pair``,
once per pair). Here are the cones whose light is at infinity; those with a light at the origin are in finite_cones.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coneheads import _checks
from coneheads.geometry import lifts, shadow_cones
from coneheads.geometry.primitives import safe_sqrt
from coneheads.scores.base import TINY, Names, PairGradient, Parameter, Score, per_token

READOUTS = ("height", "height_sq", "distance")

# `distance` reads heights below e^-40 as e^-40, so that its logarithm stays finite (a depth of 40 below O).
HEIGHT_SQ_FLOOR = math.exp(-80)


def square(parameter: Parameter) -> Parameter:
    """``parameter^2`` of a number or a tensor."""
    return parameter * parameter


def tanh(parameter: Parameter) -> Parameter:
    """``tanh(parameter)`` of a number or a tensor."""
    return parameter.tanh() if isinstance(parameter, Tensor) else math.tanh(parameter)


def lca_level_backward(
    grad: Tensor, distance: Tensor, q_level: Tensor, k_level: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``lca_level`` for distance and both levels.

    If neither point is an ancestor of the other, D counts 1/2 and each level 1/2. Otherwise the ancestor's level
    counts 1 and the rest 0; two equal points share it. Written with signs, since a branch per pair is far slower.
    """
    apart = (distance - (q_level - k_level).abs()).clamp_min(0).sign()  # 1: neither is an ancestor
    ancestor = (q_level - k_level).sign() * (1 - apart)  # +1: q is, -1: k is
    half = grad / 2
    return half * apart, half * (1 + ancestor), half * (1 - ancestor)


@dataclass(frozen=True)
class Penumbral(Score):
    """Penumbral cones, light from a horosphere at height h: ``score = -gamma * height(lca)``.

    With the levels ``h - sqrt(h^2 - y^2)`` and the lca's level L, ``height = sqrt(L (2h - L))`` while L <= h. Beyond,
    the pair has no common ancestor, and the height is that of the lowest light under which it would have one:
    ``height^2 = D^2/4 + (y_q^2 + y_k^2)/2 + (y_q^2 - y_k^2)^2 / (4 D^2)``.

    light_height: h > 0. gamma: inverse temperature. lift: "xi" (heights stay below h), "psi" or "exp" (heights above h
    are projected to h). readout: "height", "height_sq" (its square, as in the authors' code) or "distance" (score
    ``gamma * log(h / height)``; heights below e^-40 count as e^-40). height_scale multiplies the last feature.
    Numbers, or tensors that broadcast per head.

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[0.0, -9.0]]])   # k lies straight below q: the lca is q
    >>> round(coneheads.attention_scores(q, k, score=Penumbral()).item(), 5)  # whose height is sigmoid(0)
    -0.5
    """

    light_height: Parameter = 1.0
    gamma: Parameter = 1.0
    lift: str = "xi"
    readout: str = "height"
    height_scale: Parameter = 1.0

    name: ClassVar[str] = "penumbral"
    point_fields: ClassVar = ("light_height", "height_scale")
    pair_fields: ClassVar = ("light_height", "gamma")

    def __post_init__(self) -> None:
        _checks.number("light_height", self.light_height, least=0, above=True)
        _checks.number("gamma", self.gamma, least=0)
        _checks.number("height_scale", self.height_scale)
        _checks.one_of("lift", self.lift, ("xi", "psi", "exp"))
        _checks.one_of("readout", self.readout, READOUTS)

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        h, scale = per_token(self.light_height), per_token(self.height_scale)
        if self.lift == "xi":
            position, _ = lifts.xi(features, h, scale)
            return position, shadow_cones.penumbral_level_xi(features[..., -1] * scale, h)
        position, height = (lifts.psi if self.lift == "psi" else lifts.exp)(features, scale)
        return position, shadow_cones.penumbral_level(height, h)

    def _height_sq(self, d_sq: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        """The squared height of the lca, both branches at once.

        With the depths below the light ``t = h - level`` and so ``y^2 = h^2 - t^2``, the second branch becomes
        ``h^2 + (D^2 - (t_q + t_k)^2) (1 - (t_q - t_k)^2 / D^2) / 4``. Its first factor is positive just where the pair
        has no common ancestor: so the height is a sum of two clamped terms, with neither a branch nor a cancellation.
        """
        h = self.light_height
        distance = safe_sqrt(d_sq)
        level = shadow_cones.lca_level(q_level, k_level, distance).clamp_max(h)
        beyond = (d_sq - (2 * h - (q_level + k_level)).square()).clamp_min(0)
        slant = (q_level - k_level) / distance.clamp_min(1e-7 * h)
        return shadow_cones.penumbral_height_sq(level, h) + beyond * (1 - slant.square()) / 4

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        height_sq = self._height_sq(measure, q_level, k_level)
        if self.readout == "height_sq":
            return -self.gamma * height_sq
        if self.readout == "height":
            return -self.gamma * safe_sqrt(height_sq)
        return -self.gamma / 2 * (height_sq.clamp_min(HEIGHT_SQ_FLOOR) / square(self.light_height)).log()

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """Through ``height_sq``, the sum of the two terms of ``_height_sq``."""
        h, gamma = self.light_height, self.gamma
        distance, difference = measure.sqrt(), q_level - k_level
        level = shadow_cones.lca_level(q_level, k_level, distance).clamp_max(h)
        depths = 2 * h - (q_level + k_level)
        beyond = (measure - depths.square()).clamp_min(0)
        divisor = distance.clamp_min(1e-7 * h)
        slant = difference / divisor
        narrowing = (1 - slant.square()) / 4
        height_sq = shadow_cones.penumbral_height_sq(level, h) + beyond * narrowing

        parameters = {}
        if self.readout == "height_sq":
            grad_height_sq = -gamma * grad
            d_gamma = height_sq
        elif self.readout == "height":
            height = height_sq.sqrt()
            grad_height_sq = grad * height.sign() / height.clamp_min(TINY) * (-gamma / 2)
            d_gamma = height
        else:
            floored = height_sq.clamp_min(HEIGHT_SQ_FLOOR)
            grad_height_sq = grad * (height_sq - HEIGHT_SQ_FLOOR).clamp_min(0).sign() / floored * (-gamma / 2)
            d_gamma = (floored / square(h)).log() / 2

        grad_distance, grad_q, grad_k = lca_level_backward(
            grad_height_sq * (2 * (h - level)), distance, q_level, k_level
        )
        grad_beyond = grad_height_sq * narrowing * beyond.sign()
        grad_slant = grad_height_sq * beyond * slant / (2 * divisor)
        grad_d_sq = grad_distance / (2 * distance.clamp_min(TINY)) + grad_beyond + grad_slant * slant / (2 * divisor)
        grad_depths = 2 * depths * grad_beyond
        if "gamma" in wanted:
            parameters["gamma"] = -grad * d_gamma
        if "light_height" in wanted:
            parameters["light_height"] = 2 * (grad_height_sq * level - grad_depths)
            if self.readout == "distance":
                parameters["light_height"] = parameters["light_height"] + grad * gamma / h
        return PairGradient(grad_d_sq, grad_q + grad_depths - grad_slant, grad_k + grad_depths + grad_slant, parameters)


@dataclass(frozen=True)
class Umbral(Score):
    """Umbral cones, each point a ball of hyperbolic radius r under light from above: ``score = -gamma * height(lca)``.

    With the levels ``y sinh r`` and the lca's level L, ``height = L / sinh r``. Every pair has a common ancestor.

    radius: r > 0. gamma: inverse temperature. lift: "psi" or "exp". readout: "height", "height_sq" (its square) or
    "distance" (the score is ``-gamma * log(height)``). height_scale multiplies the last feature (the authors' code uses
    1/E). Numbers, or tensors that broadcast per head.

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[0.0, -1.0]]])   # k lies straight below q: the lca is q
    >>> round(coneheads.attention_scores(q, k, score=Umbral()).item(), 5)     # whose height is exp(0)
    -1.0
    """

    radius: Parameter = 0.1
    gamma: Parameter = 1.0
    lift: str = "psi"
    readout: str = "height"
    height_scale: Parameter = 1.0

    name: ClassVar[str] = "umbral"
    point_fields: ClassVar = ("radius", "height_scale")
    pair_fields: ClassVar = ("radius", "gamma")

    def __post_init__(self) -> None:
        _checks.number("radius", self.radius, least=0, above=True)
        _checks.number("gamma", self.gamma, least=0)
        _checks.number("height_scale", self.height_scale)
        _checks.one_of("lift", self.lift, ("psi", "exp"))
        _checks.one_of("readout", self.readout, READOUTS)

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        lift = lifts.psi if self.lift == "psi" else lifts.exp
        position, height = lift(features, per_token(self.height_scale))
        return position, shadow_cones.umbral_level(height, per_token(self.radius))

    def shares_large_part(self) -> bool:
        """Heights are exponentials of features. Under a high query ``2 L = level_q + level_k + D``, and D is |x_q|."""
        return self.readout == "height"

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        level = shadow_cones.lca_level(q_level, k_level, safe_sqrt(measure))
        height = shadow_cones.umbral_height(level, self.radius)
        if self.readout == "height":
            return -self.gamma * height
        return -self.gamma * (height.square() if self.readout == "height_sq" else height.log())

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """``d height/dL = 1/sinh r`` and ``d height/dr = -height / tanh r``, at fixed levels."""
        distance = measure.sqrt()
        level = shadow_cones.lca_level(q_level, k_level, distance)
        height = shadow_cones.umbral_height(level, self.radius)
        if self.readout == "height":
            grad_height, d_gamma = -self.gamma * grad, height
        elif self.readout == "height_sq":
            grad_height, d_gamma = -2 * self.gamma * grad * height, height.square()
        else:
            grad_height, d_gamma = -self.gamma * grad / height, height.log()
        grad_distance, grad_q, grad_k = lca_level_backward(
            shadow_cones.umbral_height(grad_height, self.radius), distance, q_level, k_level
        )
        parameters = {}
        if "gamma" in wanted:
            parameters["gamma"] = -grad * d_gamma
        if "radius" in wanted:
            parameters["radius"] = -grad_height * height / tanh(self.radius)
        return PairGradient(grad_distance / (2 * distance.clamp_min(TINY)), grad_q, grad_k, parameters)


SCORES = (Penumbral, Umbral)
