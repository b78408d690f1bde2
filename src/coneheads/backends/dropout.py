"""Dropout by a counter: whether a weight is kept depends on the seed and on its place, and on nothing else.

So backward finds the same choices again without storing them, tiles of any size agree, and all backends that use it
drop the same weights for the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit flips each output bit half of the time."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def keep_scale(seed: Tensor, rows: Tensor, columns: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """``1/(1-p)`` where a weight is kept and 0 where it is dropped.

    seed: int64 []. rows: int64 [..., L, 1], the number of each row of weights over batch, heads and queries.
    columns: int64 [S], the number of each key.
    """
    high, low = seed >> 32 & _WORD, seed & _WORD
    row_word = _mix(_mix(rows & _WORD ^ low) ^ _mix(rows >> 32 & _WORD ^ high))  # [..., L, 1]
    word = _mix(row_word ^ _mix(columns & _WORD ^ high))  # [..., L, S]
    return (word >= int(dropout_p * 2**32)).to(dtype) / (1 - dropout_p)


def row_numbers(batch: int, heads: int, length: int, device: torch.device) -> Tensor:
    """The number of every row of weights, int64 [B, H, L, 1]."""
    return torch.arange(batch * heads * length, device=device).view(batch, heads, length, 1)
