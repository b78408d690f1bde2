"""A small pre-norm Transformer encoder over tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.models.attention import Attention

EMBEDDING_SCALE = 0.5**0.5  # the sum of a token and its position has variance 1


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.width)
        self.attention = Attention(options)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(options.width),
            nn.Linear(options.width, options.feedforward),
            nn.GELU(),
            nn.Linear(options.feedforward, options.width),
        )
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), attn_mask))
        return x + self.dropout(self.feedforward(x))


class Encoder(nn.Module):
    """Tokens [B, L] -> logits: of the whole sequence [B, classes] if ``pooled``, else of every token [B, L, classes].

    length: the longest sequence it can read, the number of its learned positions.
    """

    def __init__(self, options: ModelOptions, vocabulary: int, classes: int, length: int, pooled: bool) -> None:
        super().__init__()
        if options.width % options.heads:
            raise WrongUse(f"--model.width: must be a multiple of --model.heads ({options.heads}); got {options.width}")
        self.pooled = pooled
        self.tokens = nn.Embedding(vocabulary, options.width)
        self.positions = nn.Parameter(torch.empty(length, options.width))
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, classes)
        scale = EMBEDDING_SCALE if options.embedding_scale is None else options.embedding_scale
        nn.init.normal_(self.tokens.weight, std=scale)
        nn.init.normal_(self.positions, std=scale)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """tokens [B, L]; padding [B, L], True where there is no token."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        attn_mask = None if padding is None else ~padding[:, None, None, :]
        for layer in self.layers:
            x = layer(x, attn_mask)
        x = self.norm(x)
        if self.pooled:
            x = x.mean(1) if padding is None else _mean_of_tokens(x, padding)
        return cast(Tensor, self.head(x))


def _mean_of_tokens(x: Tensor, padding: Tensor) -> Tensor:
    counts = (~padding).to(x).unsqueeze(-1)
    return (x * counts).sum(1) / counts.sum(1).clamp_min(1)
