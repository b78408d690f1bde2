"""Fused kernels for the CPU: one pass over tiles in C++, forward and backward, for every built-in score.

The operators take the features themselves: the kernels lift tokens while they pack them. Lifts that the kernels do not
know, and lifts with learned parameters, are done in PyTorch, and the operators get points. The sources are in csrc/,
and build.py compiles them on first use.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coneheads import _checks
from coneheads.backends import build
from coneheads.backends.inputs import Inputs, compute_dtype, finite_or_zero, in_transform
from coneheads.backends.ops import LIBRARY, unpack
from coneheads.scores import (
    BY_NAME,
    DotProduct,
    FinitePenumbral,
    FiniteUmbral,
    HalfSpaceDistance,
    HyperboloidDistance,
    Laplacian,
    Penumbral,
    Score,
    Umbral,
    resolve,
)

GIVEN = 1  # the lift of points that are lifted already


class Kernel(NamedTuple):
    """How the operators are told a score: by its place in `kScores` of csrc/rows.h and in `Lift` of csrc/lifts.h."""

    score: int
    lift: int = GIVEN  # the points are made in PyTorch
    inner: str | None = None  # the field that the lift reads


READOUTS = ("height", "height_sq", "distance")
#: by class, lift and read-out
KERNELS: dict[tuple[type[Score], str | None, str | None], Kernel] = {
    (DotProduct, None, None): Kernel(0, 0),
    (Laplacian, None, None): Kernel(1, 0),
    **{(Penumbral, "xi", name): Kernel(2 + i, 2, "light_height") for i, name in enumerate(READOUTS)},
    **{(Penumbral, "psi", name): Kernel(2 + i, 3, "light_height") for i, name in enumerate(READOUTS)},
    **{(Penumbral, "exp", name): Kernel(2 + i) for i, name in enumerate(READOUTS)},
    **{(Umbral, "psi", name): Kernel(5 + i, 4, "radius") for i, name in enumerate(READOUTS)},
    **{(Umbral, "exp", name): Kernel(5 + i) for i, name in enumerate(READOUTS)},
    (FinitePenumbral, None, None): Kernel(8, 7, "light_radius"),
    (FiniteUmbral, None, None): Kernel(8, 8, "radius"),
    (HalfSpaceDistance, "psi", None): Kernel(9, 5),
    (HalfSpaceDistance, "exp", None): Kernel(9),
    (HyperboloidDistance, None, None): Kernel(10, 6),
}

CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor[] tensors, float[] numbers, "
    "int score, int lift, bool is_causal, float dropout_p"
)


def find_kernel(score: Score) -> Kernel | None:
    """The kernel that computes this score, its lift included if it can; None for a score of someone else's."""
    found = KERNELS.get((type(score), getattr(score, "lift", None), getattr(score, "readout", None)))
    if found is not None and any(isinstance(getattr(score, name), Tensor) for name in score.point_fields):
        return Kernel(found.score)  # a lift that is learned is done by autograd
    return found


def unavailable() -> str | None:
    """The reason why there are no kernels on this machine; None if there are. The first call may build them."""
    return build.why_unavailable()


def warn_once() -> None:
    """Tell why a slower backend serves."""
    build.warn_once()


# torch.compile calls them instead of looking inside, where a compiler may be started. (The decorator for it,
# torch.compiler.assume_constant_result, would load all of torch's compiler with the import of this file.)
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]
warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not(inputs: Inputs) -> str | None:
    """The reason why the kernels cannot serve this call, beyond device, dtype and transforms."""
    if find_kernel(inputs.score) is None:
        return f"it has no kernel for the score {type(inputs.score).__qualname__}"
    return unavailable()


def lift_numbers(score: Score, kernel: Kernel) -> list[float]:
    """What a lift reads, after the pair fields in `numbers`: its inner parameter, and the scale of the last feature."""
    inner = 0.0 if kernel.inner is None else getattr(score, kernel.inner)
    return [inner, getattr(score, "height_scale", 1.0) if kernel.lift != GIVEN else 1.0]


def parameters(score: Score, kernel: Kernel, like: Tensor) -> tuple[list[Tensor], list[float]]:
    """The arguments `tensors` and `numbers`: the pair fields, as tensors if one of them is, and what the lift reads."""
    fields = [getattr(score, name) for name in score.pair_fields]
    tensors: list[Tensor] = []
    if any(isinstance(field, Tensor) for field in fields):
        whole = functools.partial(like.new_full, (1, 1, 1, 1), dtype=compute_dtype(like.dtype))
        tensors = [field if isinstance(field, Tensor) else whole(field) for field in fields]
        fields = [0.0 for _ in fields]
    return tensors, [*fields, *lift_numbers(score, kernel)]


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, Ev] in the dtype of query, and log-sum-exp of the masked scores [B, H, L] in float64."""
    score, query, key, value = inputs.score, inputs.query, inputs.key, inputs.value
    kernel = find_kernel(score)
    assert kernel is not None
    if kernel.lift == GIVEN:
        query, key, value = _points(inputs)
    tensors, numbers = parameters(score, kernel, query)
    arguments = (inputs.mask, inputs.seed, tensors, numbers, kernel.score, kernel.lift)
    return _operator(query, key, value, *arguments, inputs.is_causal, inputs.dropout_p)


def attention_at_once(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, score: Score | str
) -> tuple[Tensor, Tensor] | None:
    """The same for the plainest calls, with nothing on the way that takes time: small calls would take twice as long.

    Plain are tensors [B, H, L, E] of one dtype, a score of numbers, no mask, no dropout, no autocast, and nothing that
    traces or transforms. None if the call is another: then the usual way serves it, or says what is wrong with it.
    """
    dtype = query.dtype
    if (
        torch.compiler.is_compiling()
        or not query.is_cpu
        or not key.is_cpu
        or not value.is_cpu
        or not dtype == key.dtype == value.dtype
        or torch.is_autocast_enabled("cpu")
        or in_transform()
        or (isinstance(score, Score) and any(isinstance(value, Tensor) for value in vars(score).values()))
    ):
        return None
    plan = _plan(score, query.shape, key.shape, value.shape, dtype)
    if plan is None:
        return None
    arguments: tuple[Any, ...] = (query, key, value, None, None, [], *plan, is_causal, 0.0)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(*arguments)


@functools.lru_cache(maxsize=1024)
def _plan(
    score: Score | str, q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, dtype: torch.dtype
) -> tuple[list[float], int, int] | None:
    """The arguments `numbers`, `score` and `lift` of a plain call; None if it is not plain or not right."""
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4 or dtype not in _checks.FLOATING:
        return None
    if not q_shape[:2] == k_shape[:2] == v_shape[:2] or k_shape[2] != v_shape[2] or v_shape[3] < 1:
        return None
    if q_shape[3] != k_shape[3] or q_shape[3] < 2:
        return None
    resolved = resolve(score).for_size(q_shape[3]) if isinstance(score, Score) or score in BY_NAME else None
    kernel = None if resolved is None else find_kernel(resolved)
    if resolved is None or kernel is None or kernel.lift == GIVEN or unavailable() is not None:
        return None
    fields = [getattr(resolved, name) for name in resolved.pair_fields]
    return [*fields, *lift_numbers(resolved, kernel)], kernel.score, kernel.lift


def _points(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key as points in the place of features, (position..., level); and the value."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    repeat = group > 1 and inputs.score.lifts_per_head()
    value = inputs.value.to(compute_dtype(inputs.value.dtype))
    points = []
    for features, of_key in ((inputs.query, False), (inputs.key, True)):
        finite, bad = finite_or_zero(features)
        if repeat and of_key:
            finite, bad, value = (t.repeat_interleave(group, 1) for t in (finite, bad, value))
        position, level = inputs.score.points(finite)
        assert level is not None
        # A bad row stays one: the kernels look for NaN, and no gradient goes through.
        points.append(torch.cat([position, level[..., None]], -1).masked_fill(bad[..., None], torch.nan))
    return points[0], points[1], value


LIBRARY.define(f"cpp_attention({CALL}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"cpp_attention_backward({CALL}, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, bool mask_wanted) "
    "-> Tensor[]"
)


def _trace(query, key, value, *rest):  # type: ignore[no-untyped-def]
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float64)


def _trace_backward(query, key, value, mask, seed, tensors, *rest):  # type: ignore[no-untyped-def]
    mask_wanted = rest[-1]
    grad_mask = mask.new_empty(mask.shape) if mask_wanted else query.new_empty(0)
    return [t.new_empty(t.shape) for t in (query, key, value)] + [grad_mask] + [t.new_empty(t.shape) for t in tensors]


def _load_and_run(query, *rest):  # type: ignore[no-untyped-def]
    """The operator while the kernels are not loaded: a program of ``torch.export`` calls it first in a new process."""
    reason = unavailable() if query.is_cpu else f"query is on {query.device}"
    if reason is not None:
        raise RuntimeError(
            f"this program was exported with the fused kernels for the CPU, which cannot serve here: {reason}. "
            "With CONEHEADS_CPP=off in the environment of torch.export the program does without them"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(query, *rest)  # the kernels take precedence over this function once they are there


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, tensors, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, mask, seed, *output, *tensors)


def _differentiate(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    query, key, value, mask, seed, out, lse, *tensors = ctx.saved_tensors  # read once, as checkpointing asks
    mask_wanted = ctx.needs_input_grad[3]
    arguments = (query, key, value, mask, seed, tensors, *ctx.rest, out, lse, grad_out, grad_lse, mask_wanted)
    grads = unpack(_operator_backward(*arguments))
    return *grads[:4], None, grads[4:], None, None, None, None, None


def refuse_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "backend='cpp' has no second derivative, which was asked for (create_graph=True): "
        "use backend='reference', which has every derivative"
    )


LIBRARY.impl("cpp_attention", _load_and_run, "CompositeExplicitAutograd")
torch.library.register_fake("coneheads::cpp_attention", _trace, lib=LIBRARY)
torch.library.register_fake("coneheads::cpp_attention_backward", _trace_backward, lib=LIBRARY)
torch.library.register_autograd("coneheads::cpp_attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("coneheads::cpp_attention_backward", refuse_second_derivative, lib=LIBRARY)
_operator = torch.ops.coneheads.cpp_attention.default
_operator_backward = torch.ops.coneheads.cpp_attention_backward.default
