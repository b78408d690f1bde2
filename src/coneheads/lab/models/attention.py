"""Attention with a score that can be chosen: how its parameters and its projections start."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.start import Start, resolve
from coneheads.nn.cone_attention import ConeAttention, shape_field
from coneheads.scores import BY_NAME


def scored(name: str, heads: int, size: int, start: Start) -> ConeAttention:
    """Attention with the score of this name, its numbers and what it learns of them as a start says."""
    fields = {"gamma": start.gamma, "beta": start.gamma, "scale": start.gamma * size**-0.5}
    fields |= {field: getattr(start, field) for field in ("light_height", "radius", "height_scale", "readout")}
    own = {field.name for field in dataclasses.fields(BY_NAME[name])}
    score = BY_NAME[name](**{field: value for field, value in fields.items() if field in own})
    learn_radius = start.learn_radius and shape_field(score) is not None
    return ConeAttention(score, heads, size, learn_gamma=start.learn_gamma, learn_radius=learn_radius)


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
        self.score = scored(options.score, options.heads, options.qk_dim, resolve(options))
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[B, L, W] -> [B, L, W]; attn_mask broadcasts to [B, H, L, L], True where a query attends."""
        query, key = self.query_key(x, x)
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        mixed, _ = self.score(query, key, value, attn_mask)
        return self.out(mixed.transpose(-2, -3).flatten(-2))
