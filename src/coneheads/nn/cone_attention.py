"""The operator as a module: attention with a score whose parameters may be learned, one positive number a head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from coneheads import _checks
from coneheads.backends import reference
from coneheads.functional import attention, attention_scores, attention_weights
from coneheads.nn.start import starting_score, temperature_field
from coneheads.scores import BY_NAME, Score, resolve

#: what torch.jit.script of any layer with cone attention says
NO_SCRIPT = "cone attention cannot become TorchScript, which knows no choice of a backend; use torch.compile or export"


class ConeAttention(nn.Module):
    """``attention`` with its score: what every layer of this package, and every converted one, calls as ``self.cone``.

    A learned number p is stored as log p, so that it is positive by construction and a step changes it by a share. If
    nothing is learned the module has no entry in the state dict.

    Args:
        score: a name, for a score that starts as ``coneheads.nn.start`` says, or a score object, which stays as it is.
        heads: the number of query heads.
        size: the features E of a head of queries and keys.
        learn_gamma: learn the temperature (gamma, beta, or the scale of the dot product).
        learn_radius: learn light_height, radius or light_radius; an error for a score that has none.

    Example:
        >>> cone = ConeAttention("penumbral", heads=4, size=16, learn_gamma=True)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> cone(q, k, v)[0].shape, list(cone.state_dict())
        (torch.Size([2, 4, 10, 16]), ['log_gamma'])
    """

    def __init__(
        self,
        score: Score | str,
        heads: int,
        size: int,
        *,
        learn_gamma: bool = False,
        learn_radius: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.flag("learn_gamma", learn_gamma)
        _checks.flag("learn_radius", learn_radius)
        base = starting_score(score, size).for_size(size)
        self.heads, self.size = heads, size
        self.temperature, self.shape = temperature_field(base), shape_field(base)
        # gamma of the dot product counts in its usual scale
        self.unit = size**-0.5 if self.temperature == "scale" else 1.0
        if learn_radius and self.shape is None:
            raise ValueError(f"learn_radius=True: score {type(base).name!r} has no radius and no light to learn")
        place = {"device": device, "dtype": dtype}
        self.log_gamma = _logarithm(base, self.temperature, heads, self.unit, **place) if learn_gamma else None
        self.log_radius = _logarithm(base, self.shape, heads, **place) if learn_radius and self.shape else None
        learned = {self.temperature} if learn_gamma else set()
        learned |= {self.shape} if learn_radius and self.shape else set()
        for name, value in base.parameters().items():
            if isinstance(value, Tensor) and name not in learned:
                raise TypeError(
                    f"score.{name} must be a number in a module, which cannot move or save a tensor inside a score; "
                    f"got {_checks.describe(value)}. learn_gamma=True and learn_radius=True make one a head, from there"
                )
        # A tensor is only where learning starts; the score itself is kept with numbers, which can be copied and saved.
        starts = {name: value for name, value in base.parameters().items() if isinstance(value, Tensor)}
        self.base = base.with_parameters({name: value.mean().item() for name, value in starts.items()})

    def score(self, scaling: float | None = None) -> Score:
        """The score as it is now; learned fields are tensors [H].

        ``scaling`` is what models for the dot product call by this name. Their default is 1 / sqrt(E), and the
        temperature counts relative to it: it is multiplied by ``scaling * sqrt(E)``.
        """
        fields: dict[str, Any] = {}
        if self.log_gamma is not None:
            fields[self.temperature] = self.log_gamma.exp() * self.unit
        if self.log_radius is not None and self.shape is not None:
            fields[self.shape] = self.log_radius.exp()
        if scaling is not None and abs((factor := scaling * math.sqrt(self.size)) - 1) > 1e-6:
            fields[self.temperature] = fields.get(self.temperature, getattr(self.base, self.temperature)) * factor
        return self.base.with_parameters(fields) if fields else self.base

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        enable_gqa: bool = False,
        scaling: float | None = None,
        softcap: float | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[..., H, L, E], [..., H, S, E], [..., H, S, Ev] -> [..., H, L, Ev], and the weights [..., H, L, S] if needed.

        The first six arguments and enable_gqa are those of ``attention``, scaling that of ``score``. ``softcap`` bounds
        the scores s before the mask, ``softcap * tanh(s / softcap)``. The weights are those after dropout, as in
        ``nn.MultiheadAttention``. Both need memory for all pairs.
        """
        score = self.score(scaling)
        if not need_weights and softcap is None:
            plain = attention(query, key, value, attn_mask, dropout_p, is_causal, score=score, enable_gqa=enable_gqa)
            return plain, None
        if softcap is None:
            weights = attention_weights(query, key, attn_mask, is_causal, score=score, enable_gqa=enable_gqa)
        else:
            scores = attention_scores(query, key, score=score, enable_gqa=enable_gqa)
            scores = softcap * torch.tanh(scores / softcap)
            weights, _ = reference.softmax(reference.masked(scores, attn_mask, is_causal))
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        # A key that no query may attend to has no influence, even if its value holds NaN.
        unseen = (weights == 0).all(-2)  # [..., H, S]
        weights = dropout(weights, dropout_p) if dropout_p else weights
        return weights.to(value.dtype) @ value.masked_fill(unseen[..., None], 0), weights if need_weights else None

    def config(self) -> dict[str, Any]:
        """All that ``from_config`` needs, ready for JSON; learned numbers are in the state dict."""
        if BY_NAME.get(self.base.name) is not type(self.base):
            raise ValueError(
                f"score {type(self.base).__name__} is not one of coneheads' own and has no name to save it by"
            )
        fields = {field.name: getattr(self.base, field.name) for field in dataclasses.fields(self.base)}
        learn = {"learn_gamma": self.log_gamma is not None, "learn_radius": self.log_radius is not None}
        return {"score": self.base.name, **fields, **learn}

    @classmethod
    def from_config(cls, config: dict[str, Any], heads: int, size: int) -> ConeAttention:
        """The module that ``config`` described, for heads of this number and size."""
        fields = {name: value for name, value in config.items() if name not in ("score", "learn_gamma", "learn_radius")}
        score = resolve(config["score"]).with_parameters(fields)
        return cls(score, heads, size, learn_gamma=config["learn_gamma"], learn_radius=config["learn_radius"])

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(NO_SCRIPT)

    def extra_repr(self) -> str:
        learned = [name for name in ("gamma", "radius") if getattr(self, f"log_{name}") is not None]
        return f"{self.base}, heads={self.heads}, size={self.size}" + (
            f", learned: {', '.join(learned)}" if learned else ""
        )


def shape_field(score: Score) -> str | None:
    """The field that shapes the cones: ``light_height``, ``radius`` or ``light_radius``; None if there is none.

    >>> shape_field(resolve("penumbral")), shape_field(resolve("dot"))
    ('light_height', None)
    """
    fields = type(score).__dataclass_fields__
    return next((name for name in ("light_height", "radius", "light_radius") if name in fields), None)


def _logarithm(
    score: Score, field: str, heads: int, unit: float = 1.0, *, device: Any = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter [H] with the logarithm of the field in this unit; the field is a positive number or a tensor."""
    value = torch.as_tensor(getattr(score, field), dtype=torch.float64, device="cpu").detach()
    if value.numel() not in (1, heads):
        raise ValueError(
            f"score.{field} must be a number or have a value for each of {heads} heads; got {_checks.describe(value)}"
        )
    if not bool((value > 0).all()):
        raise ValueError(f"score.{field} must be positive to be learned; got {value.tolist()}")
    logarithm = (value / unit).log().reshape(-1).expand(heads)
    device = torch.get_default_device() if device is None else device  # which may be meta
    return nn.Parameter(logarithm.to(device=device, dtype=dtype or torch.get_default_dtype(), copy=True))
