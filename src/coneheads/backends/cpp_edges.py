"""Fused kernels for attention on edges: no message is ever in memory. The sources are csrc/edges.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coneheads.backends import cpp
from coneheads.backends.edges import EdgeInputs
from coneheads.backends.inputs import compute_dtype, finite_or_zero
from coneheads.backends.ops import LIBRARY
from coneheads.scores import Concatenation, Score

CONCATENATION = cpp.Kernel(11)

CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor[] by_target, Tensor[] by_source, Tensor? seed, Tensor[] tensors, "
    "float[] numbers, int score, int lift, float dropout_p"
)


def find_kernel(score: Score) -> cpp.Kernel | None:
    """The kernel that computes this score; None for a score of someone else's."""
    return CONCATENATION if type(score) is Concatenation else cpp.find_kernel(score)


def why_not(inputs: EdgeInputs) -> str | None:
    """The reason why the kernels cannot serve this call, beyond device, dtype and transforms."""
    if find_kernel(inputs.score) is None:
        return f"it has no kernel for the score {type(inputs.score).__qualname__}"
    return cpp.unavailable()


def attention(inputs: EdgeInputs) -> tuple[Tensor, Tensor | None]:
    """Output [targets, H, Ev] and the weights [M, H] if wanted, in the dtype of query."""
    score = inputs.score
    kernel = find_kernel(score)
    assert kernel is not None
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (inputs.query, inputs.key, inputs.value))
    if kernel.lift == cpp.GIVEN and kernel is not CONCATENATION:
        query, key, value = _points(score, query), _points(score, key), value.to(compute_dtype(value.dtype))
    tensors, numbers = cpp.parameters(score, kernel, query)
    out, weights = _operator(
        query,
        key,
        value,
        inputs.edges.by_target,
        inputs.edges.by_source,
        inputs.seed,
        tensors,
        numbers,
        kernel.score,
        kernel.lift,
        inputs.dropout_p,
        inputs.weights_wanted,
    )
    return out, weights if inputs.weights_wanted else None


def _points(score: Score, features: Tensor) -> Tensor:
    """Features as points in their place, (position..., level)."""
    finite, bad = finite_or_zero(features)
    position, level = score.points(finite)
    assert level is not None
    return torch.cat([position, level[..., None]], -1).masked_fill(bad[..., None], torch.nan)


LIBRARY.define(f"cpp_edge_attention({CALL}, bool weights_wanted) -> (Tensor out, Tensor weights)")
LIBRARY.define(f"cpp_edge_attention_backward({CALL}, Tensor grad_out, Tensor? grad_weights) -> Tensor[]")


def _trace(query, key, value, by_target, *rest):  # type: ignore[no-untyped-def]
    shape = (by_target[1].shape[0], query.shape[1]) if rest[-1] else (0,)
    return query.new_empty(query.shape[2], query.shape[1], value.shape[3]), query.new_empty(shape)


def _trace_backward(query, key, value, by_target, by_source, seed, tensors, *rest):  # type: ignore[no-untyped-def]
    grads = [t.new_empty(t.shape[2], t.shape[1], t.shape[3]) for t in (query, key, value)]
    return grads + [t.new_empty(t.shape) for t in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, by_target, by_source, seed, tensors, *rest = inputs
    *ctx.rest, ctx.weights_wanted = rest
    ctx.save_for_backward(query, key, value, seed, *by_target, *by_source, *tensors)


def _differentiate(ctx, grad_out, grad_weights):  # type: ignore[no-untyped-def]
    query, key, value, seed, *saved = ctx.saved_tensors
    by_target, by_source, tensors = saved[:3], saved[3:6], saved[6:]
    grad_out = grad_out.transpose(0, 1)[None]
    grad_weights = grad_weights.to(compute_dtype(query.dtype)).contiguous() if ctx.weights_wanted else None
    call = (query, key, value, by_target, by_source, seed, tensors, *ctx.rest)
    grad_query, grad_key, grad_value, *grad_tensors = _operator_backward(*call, grad_out, grad_weights)
    grads = [grad.transpose(0, 1)[None] for grad in (grad_query, grad_key, grad_value)]
    none = [None] * 3
    return *grads, none, none, None, grad_tensors, None, None, None, None, None


torch.library.register_fake("coneheads::cpp_edge_attention", _trace, lib=LIBRARY)
torch.library.register_fake("coneheads::cpp_edge_attention_backward", _trace_backward, lib=LIBRARY)
torch.library.register_autograd("coneheads::cpp_edge_attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("coneheads::cpp_edge_attention_backward", cpp.refuse_second_derivative, lib=LIBRARY)
_operator = torch.ops.coneheads.cpp_edge_attention.default
_operator_backward = torch.ops.coneheads.cpp_edge_attention_backward.default
