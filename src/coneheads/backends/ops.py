"""The fused operators as torch sees them: schemas, shapes for tracing, and autograd. It needs torch alone.

A fused backend brings two functions, forward and backward; ``define_attention`` makes of them one operator that
``torch.compile`` and ``torch.export`` keep whole, so that what happens inside may depend on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coneheads.backends.inputs import Points, higher_precision, without_autocast
from coneheads.scores import Score
from coneheads.scores.base import from_spec

LIBRARY = torch.library.Library("coneheads", "FRAGMENT")

POINTS = "Tensor q, Tensor? q_level, Tensor k, Tensor? k_level, Tensor[] parameters, str spec"
FIXED = "&fixed"  # ends the spec of a score whose pair fields are numbers of usual size: see FusedInputs
REST = "Tensor value, Tensor? bad, Tensor? mask, Tensor? seed, bool is_causal, float dropout_p"


class FusedInputs(NamedTuple):
    """The arguments of a fused attention, as its two functions receive them."""

    score: Score  # the fields that `pair` reads are tensors [B|1, H|1, 1, 1], the others have their defaults
    points: Points
    value: Tensor  # [B, Hkv, S, Ev], finite
    bad: Tensor | None  # bool [B, Hkv, S]: keys that make NaN of every row that attends to them
    mask: Tensor | None  # [B|1, H|1, L|1, S|1]
    seed: Tensor | None  # int64 []
    is_causal: bool
    dropout_p: float
    fixed: bool = False  # those fields were positive numbers of usual size, not tensors, and nobody learns them


class Wanted(NamedTuple):
    """Which gradients are asked for, besides those of points and value."""

    parameters: tuple[str, ...]
    mask: bool


class FusedGradients(NamedTuple):
    """What a fused backward gives: None where an input is absent or its gradient not wanted."""

    q: Tensor
    q_level: Tensor | None
    k: Tensor
    k_level: Tensor | None
    parameters: dict[str, Tensor]
    value: Tensor
    mask: Tensor | None


Forward = Callable[[FusedInputs], tuple[Tensor, Tensor]]
Backward = Callable[[FusedInputs, Tensor, Tensor, Tensor, Tensor, Wanted], FusedGradients]


def pair_parameters(score: Score, like: Tensor) -> list[Tensor]:
    """The fields that ``pair`` reads, as tensors [B|1, H|1, 1, 1] of the dtype and device of ``like``."""
    values = score.parameters()
    return [
        value.to(like) if isinstance(value := values[name], Tensor) else like.new_full((1, 1, 1, 1), value)
        for name in score.pair_fields
    ]


def rebuild(spec: str, parameters: list[Tensor]) -> Score:
    """The score that an operator was given as text and tensors."""
    score = from_spec(spec.removesuffix(FIXED))
    return score.with_parameters(dict(zip(score.pair_fields, parameters, strict=True)))


def wanted_names(score: Score, wanted: list[bool]) -> tuple[str, ...]:
    """The names of the pair fields whose gradient is asked for."""
    return tuple(name for name, want in zip(score.pair_fields, wanted, strict=True) if want)


def pack(gradients: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """An operator cannot return None: a gradient that is not there travels as a tensor of shape [0]."""
    return [like.new_empty(0) if grad is None else grad for grad in gradients]


def unpack(gradients: list[Tensor]) -> list[Tensor | None]:
    """The inverse of ``pack``."""
    return [None if grad.shape == (0,) else grad for grad in gradients]


def empty_like(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Tensors of the same shapes and kinds, for tracing."""
    return [None if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors]


def define_attention(name: str, forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator ``coneheads::<name>_attention`` -> (out [B, H, L, Ev], lse [B, H, L]), traceable and differentiable.

    lse is float64 where the device has it: backward subtracts it from scores that may be large.
    ``name`` is the backend's. Its arguments are those of POINTS and REST, in this order.
    """
    qualified = f"coneheads::{name}_attention"
    LIBRARY.define(f"{name}_attention({POINTS}, {REST}) -> (Tensor out, Tensor lse)")
    LIBRARY.define(
        f"{name}_attention_backward({POINTS}, {REST}, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, "
        "bool[] wanted, bool mask_wanted) -> Tensor[]"
    )

    def run(q, q_level, k, k_level, parameters, spec, *rest):  # type: ignore[no-untyped-def]
        with torch.no_grad(), without_autocast(q.device.type):
            inputs = FusedInputs(rebuild(spec, parameters), Points(q, q_level, k, k_level), *rest)
            return forward(inputs._replace(fixed=spec.endswith(FIXED)))

    def trace(q, q_level, k, k_level, parameters, spec, value, *rest):  # type: ignore[no-untyped-def]
        return q.new_empty(*q.shape[:3], value.shape[-1]), q.new_empty(q.shape[:3], dtype=higher_precision(q))

    def run_backward(q, q_level, k, k_level, parameters, spec, *rest):  # type: ignore[no-untyped-def]
        *call, out, lse, grad_out, grad_lse, wanted, mask_wanted = rest
        score = rebuild(spec, parameters)
        inputs = FusedInputs(score, Points(q, q_level, k, k_level), *call)._replace(fixed=spec.endswith(FIXED))
        names = Wanted(wanted_names(score, wanted), mask_wanted)
        with torch.no_grad(), without_autocast(q.device.type):  # backward may run where autocast is on
            grads = backward(inputs, out, lse, grad_out, grad_lse, names)
        points = [grads.q, grads.q_level, grads.k, grads.k_level, grads.value, grads.mask]
        return pack(points + [grads.parameters.get(field) for field in score.pair_fields], out)

    def trace_backward(q, q_level, k, k_level, parameters, spec, value, bad, mask, *rest):  # type: ignore[no-untyped-def]
        *_, out, _lse, _grad_out, _grad_lse, wanted, mask_wanted = rest
        asked = [p if want else None for p, want in zip(parameters, wanted, strict=True)]
        return pack(empty_like([q, q_level, k, k_level, value, mask if mask_wanted else None, *asked]), out)

    def save(ctx, inputs, output):  # type: ignore[no-untyped-def]
        q, q_level, k, k_level, parameters, ctx.spec, value, bad, mask, seed, ctx.is_causal, ctx.dropout_p = inputs
        ctx.save_for_backward(q, q_level, k, k_level, value, bad, mask, seed, *output, *parameters)

    def differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once, as gradient checkpointing asks
        *points, value, bad, mask, seed, out, lse = saved[:10]
        rest = (value, bad, mask, seed, ctx.is_causal, ctx.dropout_p, out, lse, grad_out, grad_lse)
        wanted, mask_wanted = list(ctx.needs_input_grad[4]), ctx.needs_input_grad[8]
        grads = unpack(operator_backward(*points, list(saved[10:]), ctx.spec, *rest, wanted, mask_wanted))
        q, q_level, k, k_level, value, mask = grads[:6]
        return q, q_level, k, k_level, grads[6:], None, value, None, mask, None, None, None

    def refuse(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"backend={name!r} has no second derivative, which was asked for (create_graph=True): "
            f"use backend='reference', which has every derivative"
        )

    LIBRARY.impl(f"{name}_attention", run, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_attention_backward", run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, trace, lib=LIBRARY)
    torch.library.register_fake(f"{qualified}_backward", trace_backward, lib=LIBRARY)
    torch.library.register_autograd(qualified, differentiate, setup_context=save, lib=LIBRARY)
    torch.library.register_autograd(f"{qualified}_backward", refuse, lib=LIBRARY)
    operator = getattr(torch.ops.coneheads, f"{name}_attention").default
    operator_backward = getattr(torch.ops.coneheads, f"{name}_attention_backward").default
    return operator


def call_arguments(score: Score, points: Points, *, fixed: bool = False) -> tuple[Any, ...]:
    """The arguments of POINTS."""
    return (*points, pair_parameters(score, points.q), score.spec() + (FIXED if fixed else ""))
