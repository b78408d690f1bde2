"""What ``convert`` and the file of each library say to one another: the layers found, and what they are to become."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from coneheads.nn import ConeAttention
from coneheads.scores import Score

#: the name under which a converted layer holds its ``ConeAttention``
CONE = "cone"
Inputs = dict[str, Any]  # keyword arguments of a model's forward; positional ones under ""


@dataclass(frozen=True)
class Layer:
    """One attention layer that was found in a model."""

    name: str
    module: nn.Module
    #: heads of queries, and features of a head of queries and keys
    heads: int = 0
    size: int = 0
    #: why it cannot be converted; empty if it can
    why_not: str = ""
    #: the class before the conversion, as one would import it: ``timm.layers.attention.Attention``
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", f"{type(self.module).__module__}.{type(self.module).__qualname__}")


def already(cone: ConeAttention) -> str:
    """Why a layer that ``convert`` has changed before is left as it is."""
    return f"it has the score {cone.base.name!r} already: call revert first to give it another"


@dataclass(frozen=True)
class Settings:
    """What layers are to become: the arguments of ``ConeAttention``."""

    score: Score | str
    learn_gamma: bool = False
    learn_radius: bool = False

    def attention(self, layer: Layer) -> ConeAttention:
        """The attention of one layer, on its device and in its dtype."""
        like = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
        return ConeAttention(
            self.score,
            layer.heads,
            layer.size,
            learn_gamma=self.learn_gamma,
            learn_radius=self.learn_radius,
            device=None if like is None else like.device,
            dtype=None if like is None else like.dtype,
        ).train(layer.module.training)


class Library(Protocol):
    """What the file of a library offers. All names of layers are those in ``model.named_modules()``."""

    def find(self, model: nn.Module, run: Callable[[], Any] | None) -> Sequence[Layer]:
        """The attention layers of this library in the model, those that cannot be converted with the reason.

        ``run`` does a forward of the whole model, where the user has given an input.
        """

    def swap(self, model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
        """Converts these layers in place, weights kept. Returns what each of them calls from now on, by name.

        Also called without layers, after those of other libraries: what saves a model has to know of theirs too.
        """

    def restore(self, model: nn.Module, names: Collection[str] | None = None) -> list[str]:
        """Undoes ``swap`` in the layers of these names, or wherever it finds its traces. Returns the names."""

    def inputs_for(self, model: nn.Module) -> Inputs | None:
        """A small input that runs all attention layers of this model; None if it is not a model of this library."""
