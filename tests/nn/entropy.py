"""How widely a query spreads its weights in a layer that has just been built; docs/generate.py makes a table of it."""

from typing import NamedTuple

import torch

from coneheads.nn import ConeMultiheadAttention
from coneheads.scores import BY_NAME, Score, resolve

SIZES = (16, 64, 128)
KEYS = 128


class Row(NamedTuple):
    """Shares of the keys for one score, at the start that a name gives and at the temperature 1 of its class."""

    score: str
    started: dict[int, float]
    plain: dict[int, float]


def share_of_keys(score: Score | str, size: int, heads: int = 4, qk_dim: int | None = None) -> float:
    """``exp(entropy) / S`` of the weights, over all heads and queries: 1 if uniform, 1 / S if one-hot.

    Inputs of variance 1, S = 128 keys, heads of ``size`` features; two layers, since each draws its weights.
    """
    shares = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = ConeMultiheadAttention(heads * size, heads, batch_first=True, score=score, qk_dim=qk_dim)
            x = torch.randn(1, KEYS, heads * size)
        with torch.no_grad():
            _, weights = layer(x, x, x, average_attn_weights=False)  # [1, H, L, S]
        shares.append(torch.special.entr(weights).sum(-1).exp().mean() / KEYS)
    return torch.stack(shares).mean().item()


def rows() -> list[Row]:
    """One row for each score."""
    return [
        Row(
            name,
            {size: share_of_keys(name, size) for size in SIZES},
            {size: share_of_keys(resolve(name), size) for size in SIZES},
        )
        for name in BY_NAME
    ]
