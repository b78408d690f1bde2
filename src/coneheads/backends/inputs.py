"""What every backend receives, and the two steps that the plain-PyTorch backends share before they see pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coneheads.scores import Score


class Inputs(NamedTuple):
    """One checked call, in the shapes that backends know. Tensor fields of ``score`` have shape [B|1, H|1, 1, 1]."""

    query: Tensor  # [B, H, L, E]
    key: Tensor  # [B, Hkv, S, E], H a multiple of Hkv
    value: Tensor  # [B, Hkv, S, Ev]
    mask: Tensor | None  # [B|1, H|1, L|1, S|1], boolean (True = attend) or floating-point (added)
    is_causal: bool
    dropout_p: float
    seed: Tensor | None  # int64 [], only with dropout
    score: Score


class Points(NamedTuple):
    """Tokens as points: positions [B, H, L, P] and levels [B, H, L] of queries and keys, in the compute dtype."""

    q: Tensor
    q_level: Tensor | None
    k: Tensor
    k_level: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Distances, scores, softmax and sums are float64 for float64 inputs and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def higher_precision(tensor: Tensor) -> torch.dtype:
    """The dtype for what must not be rounded to float32: float64, except on devices that have none."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def finite_or_zero(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in the compute dtype, those that hold NaN or inf replaced by zeros; and which those are, [..., L].

    A masked-out key must not influence anything, but 0 * NaN is NaN, in the sums and in their gradients. So the numbers
    and the NaN travel separately: a bad row computes as zeros, and its mark reaches only what attends to it.
    """
    finite = tensor.isfinite().all(-1)
    return tensor.to(compute_dtype(tensor.dtype)).masked_fill(~finite[..., None], 0), ~finite


def lift(query: Tensor, key: Tensor, score: Score) -> Points:
    """Queries and keys as points of the score."""
    q, q_level = score.points(query)
    k, k_level = score.points(key)
    return Points(q, q_level, k, k_level)


def causal_mask(rows: Tensor, columns: Tensor) -> Tensor:
    """True where key ``column`` is not later than query ``row`` (both counted from 0): the alignment of SDPA."""
    return columns[None, :] <= rows[:, None]
