"""Attention with a score that can be chosen: learned parameters of the score, projections, heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from coneheads.functional import attention
from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.start import Start, resolve
from coneheads.scores import BY_NAME, Score


class LearnedScore(nn.Module):
    """A score whose temperature, and light or radius, may be learned: one positive number a head.

    A learned number p is stored as log p, so that it is positive by construction and a step changes it by a share.
    """

    def __init__(self, name: str, heads: int, size: int, start: Start) -> None:
        super().__init__()
        self.cls, self.start, self.size = BY_NAME[name], start, size
        self.log_gamma = _logarithm(start.gamma, heads) if start.learn_gamma else None
        self.log_radius = None
        if start.learn_radius and (shape := self._shape_field()):
            self.log_radius = _logarithm(getattr(start, shape), heads)

    def _shape_field(self) -> str | None:
        """The field that shapes the cones, by its name in Start."""
        fields = self.cls.__dataclass_fields__
        return next((name for name in ("light_height", "radius") if name in fields), None)

    def score(self) -> Score:
        """The score as it is now; learned fields are tensors [H]."""
        gamma: Any = self.start.gamma if self.log_gamma is None else self.log_gamma.exp()
        names = self.cls.__dataclass_fields__
        fields: dict[str, Any] = {"gamma": gamma, "beta": gamma, "scale": gamma * self.size**-0.5}
        for name in ("light_height", "radius", "height_scale", "readout"):
            fields[name] = getattr(self.start, name)
        if self.log_radius is not None and (shape := self._shape_field()):
            fields[shape] = self.log_radius.exp()
        return self.cls(**{name: value for name, value in fields.items() if name in names})

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[B, H, L, E], [B, H, S, E], [B, H, S, Ev] -> [B, H, L, Ev]."""
        return attention(query, key, value, attn_mask, score=self.score())


class QueryKey(nn.Module):
    """The projections to queries and keys, initialised as a start says: the height apart from the position.

    If the inputs have variance 1, the features have standard deviation ``qk_scale`` at the start; the last one, which
    makes the height, ``qk_scale * height_spread`` round the mean ``height_start``. Scores without a height have no
    special feature, and the last one starts like the others.
    """

    def __init__(self, options: ModelOptions, width: int) -> None:
        super().__init__()
        start = resolve(options)
        self.heads, self.size = options.heads, options.qk_dim
        self.query = nn.Linear(width, self.heads * self.size)
        self.key = nn.Linear(width, self.heads * self.size)
        self.query_norm = nn.RMSNorm(self.size) if start.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.size) if start.qk_norm else nn.Identity()
        has_height = "height_scale" in BY_NAME[options.score].__dataclass_fields__
        for layer in (self.query, self.key):
            nn.init.normal_(layer.weight, std=start.qk_scale / math.sqrt(width))
            nn.init.zeros_(layer.bias)
            if has_height:
                with torch.no_grad():
                    layer.weight.view(self.heads, self.size, width)[:, -1] *= start.height_spread
                    layer.bias.view(self.heads, self.size)[:, -1] = start.height_start

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, W], [B, S, W] -> [B, H, L, E], [B, H, S, E]."""
        return self.query_norm(self._heads(self.query(query))), self.key_norm(self._heads(self.key(key)))

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.heads, self.size)).transpose(-2, -3)


class Attention(nn.Module):
    """Self-attention of an encoder. Values have width / heads features a head, whatever the size of query and key."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.query_key = QueryKey(options, options.width)
        self.value = nn.Linear(options.width, options.width)
        self.score = LearnedScore(options.score, options.heads, options.qk_dim, resolve(options))
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[B, L, W] -> [B, L, W]; attn_mask broadcasts to [B, H, L, L], True where a query attends."""
        query, key = self.query_key(x, x)
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        mixed = self.score(query, key, value, attn_mask)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def _logarithm(value: float, heads: int) -> nn.Parameter:
    return nn.Parameter(torch.full((heads,), math.log(value)))
