"""Scores by distance alone, without a hierarchy: Euclidean, half-space, hyperboloid. The paper's baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coneheads import _checks
from coneheads.geometry import lifts
from coneheads.geometry.primitives import positive_asinh, safe_sqrt
from coneheads.scores.base import TINY, Names, PairGradient, Parameter, Score


@dataclass(frozen=True)
class Laplacian(Score):
    """``score = -gamma * |q - k|`` over all E features: the Laplacian kernel.

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 0.0]]])
    >>> coneheads.attention_scores(q, k, score=Laplacian(gamma=2.0)).item()
    -10.0
    """

    gamma: Parameter = 1.0

    name: ClassVar[str] = "laplacian"
    pair_fields: ClassVar = ("gamma",)

    def __post_init__(self) -> None:
        _checks.number("gamma", self.gamma, least=0)

    def points(self, features: Tensor) -> tuple[Tensor, None]:
        """The features themselves; beyond 1e15 they saturate, so that finite inputs give finite scores."""
        return features.clamp(-lifts.POSITION_LIMIT, lifts.POSITION_LIMIT), None

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        return -self.gamma * safe_sqrt(measure)

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        distance = measure.sqrt()
        # sign() makes the derivative 0 at distance 0, where the direction is undefined.
        grad_measure = grad * distance.sign() / (2 * distance.clamp_min(TINY)) * -self.gamma
        parameters = {"gamma": -grad * distance} if "gamma" in wanted else {}
        return PairGradient(grad_measure, parameters=parameters)


@dataclass(frozen=True)
class HalfSpaceDistance(Score):
    """``score = -beta * d(q, k) - offset``, d the hyperbolic distance of the points lifted to the half-space.

    ``d = 2 asinh( sqrt(D^2 + (y_q - y_k)^2) / (2 sqrt(y_q y_k)) )``, D the distance of the horizontal positions.
    ``lift`` is "psi" or "exp".

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])   # heights 1 and e
    >>> round(coneheads.attention_scores(q, k, score=HalfSpaceDistance(beta=2.0)).item(), 5)
    -2.0
    """

    beta: Parameter = 1.0
    offset: Parameter = 0.0
    lift: str = "psi"

    name: ClassVar[str] = "half_space"
    pair_fields: ClassVar = ("beta", "offset")

    def __post_init__(self) -> None:
        _checks.number("beta", self.beta, least=0)
        _checks.number("offset", self.offset)
        _checks.one_of("lift", self.lift, ("psi", "exp"))

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Horizontal position, and the height in the place of the level."""
        return lifts.psi(features) if self.lift == "psi" else lifts.exp(features)

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        chord = safe_sqrt(measure + (q_level - k_level).square())
        half = chord / (2 * (q_level.sqrt() * k_level.sqrt()))
        return -2 * self.beta * positive_asinh(half) - self.offset

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """With ``z = D^2 + (y_q - y_k)^2``: ``ds/dz = -beta / sqrt(z (z + 4 y_q y_k))``, taken as 0 at z = 0."""
        rise = q_level - k_level
        chord_sq = measure + rise.square()
        chord, outer = chord_sq.sqrt(), (chord_sq + 4 * (q_level * k_level)).rsqrt()
        grad_beta = grad * self.beta
        grad_chord_sq = -grad_beta * chord.sign() / chord.clamp_min(TINY) * outer
        stretch = grad_beta * chord * outer
        slope = 2 * rise * grad_chord_sq
        parameters = {}
        if "beta" in wanted:
            parameters["beta"] = -2 * grad * positive_asinh(chord / (2 * (q_level.sqrt() * k_level.sqrt())))
        if "offset" in wanted:
            parameters["offset"] = -grad
        return PairGradient(grad_chord_sq, slope + stretch / q_level, stretch / k_level - slope, parameters)


@dataclass(frozen=True)
class HyperboloidDistance(Score):
    """``score = -beta * d(q, k) - offset``, d the distance of the points that ``pseudopolar`` lifts to the hyperboloid.

    With radii a, b and the chord c of the unit directions, ``d = 2 asinh sqrt(sinh^2((a-b)/2) + sinh a sinh b c^2/4)``:
    this is ``cosh d = cosh(a-b) + sinh a sinh b (1 - cos angle)`` without its cancellation.

    >>> import torch, coneheads
    >>> q, k = torch.tensor([[[1.0, 0.0, 2.0]]]), torch.tensor([[[5.0, 0.0, 3.0]]])   # one direction, radii 2 and 3
    >>> round(coneheads.attention_scores(q, k, score=HyperboloidDistance()).item(), 5)
    -1.0
    """

    beta: Parameter = 1.0
    offset: Parameter = 0.0

    name: ClassVar[str] = "hyperboloid"
    pair_fields: ClassVar = ("beta", "offset")

    def __post_init__(self) -> None:
        _checks.number("beta", self.beta, least=0)
        _checks.number("offset", self.offset)

    def points(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Unit direction, and the radius in the place of the level."""
        return lifts.polar(features)

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        half_sq = ((q_level - k_level) / 2).sinh().square() + q_level.sinh() * k_level.sinh() * (measure / 4)
        return -2 * self.beta * positive_asinh(safe_sqrt(half_sq)) - self.offset

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """With ``u = sinh^2(d/2)``: ``ds/du = -beta / sqrt(u (1 + u))``, taken as 0 at u = 0."""
        difference, chord_sq = q_level - k_level, measure / 4
        q_sinh, k_sinh = q_level.sinh(), k_level.sinh()
        half_sq = (difference / 2).sinh().square() + q_sinh * k_sinh * chord_sq
        half = half_sq.sqrt()
        grad_half_sq = grad * -self.beta * half.sign() / half.clamp_min(TINY) * (1 + half_sq).rsqrt()
        slope = difference.sinh() / 2
        grad_q = grad_half_sq * (slope + q_level.cosh() * k_sinh * chord_sq)
        grad_k = grad_half_sq * (k_level.cosh() * q_sinh * chord_sq - slope)
        parameters = {}
        if "beta" in wanted:
            parameters["beta"] = -2 * grad * positive_asinh(half)
        if "offset" in wanted:
            parameters["offset"] = -grad
        return PairGradient(grad_half_sq * (q_sinh * k_sinh / 4), grad_q, grad_k, parameters)


SCORES = (Laplacian, HalfSpaceDistance, HyperboloidDistance)
