"""What a score is: a point for every token, and a function of every pair.

A backend knows nothing about a particular score. It calls ``points`` once per token, measures every pair of positions
(their squared distance, or their product), and calls ``pair`` on tiles of those measures. So a new score is one
subclass with these two methods. ``pair_backward`` has a default that differentiates ``pair``; a score overrides it
only to be faster.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

Parameter = float | Tensor
Names = tuple[str, ...]
#: stands for the levels of a score whose points have none
NO_LEVEL = torch.empty(0)
# Divisors are kept above this in derivatives. It is far below every distance of float32 and only ever meets a factor 0.
TINY = 1e-30
ScoreT = TypeVar("ScoreT", bound="Score")


@dataclasses.dataclass(frozen=True)
class PairGradient:
    """The gradient of a tile of scores, every entry of the tile's shape (or broadcasting to it)."""

    measure: Tensor
    q_level: Tensor | None = None
    k_level: Tensor | None = None
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Score:
    """Base of all scores. Its numeric fields may be floats or tensors that broadcast per head; all have defaults."""

    name: ClassVar[str] = ""
    #: what a backend measures for every pair of positions: their squared distance or their inner product
    measures: ClassVar[Literal["distance_sq", "product"]] = "distance_sq"
    #: the numeric fields that ``points`` reads, and those that ``pair`` reads
    point_fields: ClassVar[tuple[str, ...]] = ()
    pair_fields: ClassVar[tuple[str, ...]] = ()

    def for_size(self, size: int) -> Score:
        """The score for features of this size E: the place for a default that depends on it."""
        return self

    def points(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """features [..., H, L, E] -> position [..., H, L, P] and level [..., H, L] (None if the score has none).

        A field that is a tensor has shape [..., H, 1, 1] here; ``per_token`` makes it fit [..., H, L].
        """
        raise NotImplementedError

    def pair(self, measure: Tensor, q_level: Tensor, k_level: Tensor) -> Tensor:
        """The score of pairs, elementwise and differentiable, before mask and softmax.

        measure [..., H, L, S] is what ``measures`` says; q_level [..., H, L, 1] and k_level [..., H, 1, S] come from
        ``points``, or are ``NO_LEVEL``. A field that is a tensor has shape [..., H, 1, 1]. It must not write into its
        arguments.
        """
        raise NotImplementedError

    def pair_backward(
        self, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
    ) -> PairGradient:
        """The derivative of ``pair`` times ``grad``, with respect to measure, levels and the ``wanted`` pair fields."""
        return differentiate_pair(self, grad, measure, q_level, k_level, wanted)

    def shares_large_part(self) -> bool:
        """Whether the scores of a query may share a part so large that what they differ by would lose its digits.

        Backends leave it out, or compute the scores in a higher precision: softmax does not see it.
        """
        return False

    def lifts_per_head(self) -> bool:
        """Whether a field that ``points`` reads, as a tensor [..., H, 1, 1], has a value for each of several heads."""
        fields = (getattr(self, name) for name in self.point_fields)
        return any(isinstance(value, Tensor) and value.shape[-3] > 1 for value in fields)

    def parameters(self) -> dict[str, Parameter]:
        """The numeric fields by name."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: value for name in fields if not isinstance(value := getattr(self, name), str)}

    def with_parameters(self: ScoreT, parameters: dict[str, Any]) -> ScoreT:
        """The same score with some fields replaced."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{**fields, **parameters})

    def spec(self) -> str:
        """The class and its textual fields, as a string that ``from_spec`` reads: operators take no Python objects."""
        cls = type(self)
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        texts = "&".join(f"{name}={value}" for name, value in fields if isinstance(value, str))
        return f"{cls.__module__}:{cls.__qualname__}?{texts}"


def differentiate_pair(
    score: Score, grad: Tensor, measure: Tensor, q_level: Tensor, k_level: Tensor, wanted: Names
) -> PairGradient:
    """``pair_backward`` of any score, by reverse-mode differentiation of its ``pair``."""
    inputs = {"measure": measure}
    if q_level is not NO_LEVEL:
        inputs |= {"q_level": q_level, "k_level": k_level}
    inputs |= {name: torch.as_tensor(getattr(score, name)).to(measure) for name in wanted}
    # Expanded to the tile, so that the gradients come back unreduced: the caller knows what to sum.
    inputs = {name: value.expand(measure.shape) for name, value in inputs.items()}

    def pair_of(inputs: dict[str, Tensor]) -> Tensor:
        changed = score.with_parameters({name: inputs[name] for name in wanted})
        return changed.pair(inputs["measure"], inputs.get("q_level", NO_LEVEL), inputs.get("k_level", NO_LEVEL))

    pull_back = torch.func.vjp(pair_of, inputs)[1]
    (grads,) = pull_back(grad)
    parameters = {name: grads[name] for name in wanted}
    return PairGradient(grads["measure"], grads.get("q_level"), grads.get("k_level"), parameters)


@functools.lru_cache(maxsize=256)
def from_spec(spec: str) -> Score:
    """The score that ``Score.spec`` described, with its numeric fields at their defaults."""
    path, _, texts = spec.partition("?")
    module, _, qualname = path.partition(":")
    if "<locals>" in qualname:
        raise ValueError(
            f"score {qualname!r} is defined inside a function, where the fused operators cannot find it again; "
            f"define the class at the top level of a module, or use backend='reference'"
        )
    found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    fields = dict(text.split("=", 1) for text in texts.split("&") if text)
    score = found(**fields)  # type: ignore[operator]
    assert isinstance(score, Score)
    return score


def per_token(parameter: Parameter) -> Parameter:
    """A field as ``points`` needs it: a tensor [..., H, 1, 1] becomes [..., H, 1], to broadcast with [..., H, L]."""
    return parameter.squeeze(-1) if isinstance(parameter, Tensor) else parameter
