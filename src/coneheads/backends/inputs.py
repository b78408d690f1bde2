"""What every backend receives, and what backends in Python share: preparation of a call, dtypes, the state of torch."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

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


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is enabled on a device; some devices do not know it."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Autocast off: distances and sums are float32 at least."""
    return torch.autocast(device_type, enabled=False) if autocast_is_on(device_type) else contextlib.nullcontext()


def in_transform() -> bool:
    """Whether this runs under a transform of ``torch.func`` (grad, vmap, ...) or in forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


def in_onnx_export() -> bool:
    """Whether ``torch.onnx.export`` is at work, which knows the operators of PyTorch and none of ours."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


# torch.compile and strict export call it instead of looking inside: they take torch.onnx.is_in_onnx_export for False,
# although torch.onnx.export itself tries strict export where the other one fails.
in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def higher_precision(tensor: Tensor) -> torch.dtype:
    """The dtype for what must not be rounded to float32: float64, except on devices that have none."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def finite_or_zero(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in the compute dtype, those that hold NaN or inf replaced by zeros; and which those are, [..., L].

    A masked-out key must not influence anything, but 0 * NaN is NaN, in the sums and in their gradients. So the numbers
    and the NaN travel separately: a bad row computes as zeros, and its mark reaches only what attends to it.
    """
    finite = tensor.isfinite().all(-1)
    wide = _Widen.apply(tensor) if tensor.dtype == torch.float16 else tensor.to(compute_dtype(tensor.dtype))
    return wide.masked_fill(~finite[..., None], 0), ~finite


class _Widen(torch.autograd.Function):
    """float16 to float32, with gradients that saturate at +-65504 on the way back.

    A finite gradient may be too large for float16: the direction of a tiny vector turns fast.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        largest = torch.finfo(torch.float16).max
        return grad.clamp(-largest, largest).half()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.float()


class Prepared(NamedTuple):
    """A call as points and finite numbers, in the compute dtype."""

    points: Points
    value: Tensor  # [B, Hkv, S, Ev]
    bad: Tensor  # bool [B, Hkv, S]: a row that attends to such a key is NaN
    bad_query: Tensor  # bool [B, H, L]: such a row is NaN, unless it attends to nothing


def prepare(inputs: Inputs, *, every_head: bool = False) -> Prepared:
    """Lift queries and keys, NaN apart. With ``every_head``, keys and values are repeated for each query head.

    They are also repeated where the score has a lift for each head, which makes another point of a key for each.
    """
    query, bad_query = finite_or_zero(inputs.query)
    key, bad_key = finite_or_zero(inputs.key)
    value, bad_value = finite_or_zero(inputs.value)
    bad = bad_key | bad_value
    group = query.shape[1] // key.shape[1]
    if group > 1 and (every_head or inputs.score.lifts_per_head()):
        key, value, bad = (tensor.repeat_interleave(group, 1) for tensor in (key, value, bad))
    points = Points(*inputs.score.points(query), *inputs.score.points(key))
    return Prepared(points, value, bad, bad_query)


def causal_mask(rows: Tensor, columns: Tensor) -> Tensor:
    """True where key ``column`` is not later than query ``row`` (both counted from 0): the alignment of SDPA."""
    return columns[None, :] <= rows[:, None]
