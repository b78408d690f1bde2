"""The scores of all pairs at once, [B, H, L, S]: for those who want to see them. Memory is that of the result.

It is one operator over the tiles of pairs.py, with a gradient. A second derivative goes through the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coneheads.backends import ops, reference
from coneheads.backends.inputs import Inputs, Points, in_onnx_export, in_transform, prepare, without_autocast
from coneheads.backends.ops import LIBRARY, POINTS
from coneheads.backends.pairs import PairGradients, Pairs, Tile, blocks


def pair_scores(inputs: Inputs) -> Tensor:
    """The scores [B, H, L, S] of a call's queries and keys in the compute dtype; NaN where one of them holds NaN."""
    plain = in_transform() or in_onnx_export()  # where the operator has no rule
    points, _, bad, bad_query = prepare(inputs, every_head=plain)
    if plain:
        scores = reference.pair_scores(inputs.score, points)
    else:
        scores = torch.ops.coneheads.pair_scores(*ops.call_arguments(inputs.score, points))
    bad = bad.repeat_interleave(points.q.shape[1] // points.k.shape[1], 1)
    return scores.masked_fill(bad_query[..., :, None] | bad[..., None, :], torch.nan)


def _tiles(pairs: Pairs) -> list[Tile]:
    blocking = pairs.blocking()
    length, keys = pairs.points.q.shape[2], pairs.points.k.shape[2]
    return [
        Tile(batch, kv_heads, heads, rows, columns)
        for batch, kv_heads, heads in pairs.head_blocks(blocking)
        for rows in blocks(length, blocking.rows)
        for columns in blocks(keys, blocking.columns)
    ]


def _run(
    q: Tensor, q_level: Tensor | None, k: Tensor, k_level: Tensor | None, parameters: list[Tensor], spec: str
) -> Tensor:
    pairs = Pairs(ops.rebuild(spec, parameters), Points(q, q_level, k, k_level))
    scores = q.new_empty(*q.shape[:3], k.shape[2])
    with torch.no_grad(), without_autocast(q.device.type):
        for tile in _tiles(pairs):
            scores[tile.batch, tile.heads, tile.rows, tile.columns] = pairs.at(tile).scores()
    return scores


def _run_backward(
    q: Tensor,
    q_level: Tensor | None,
    k: Tensor,
    k_level: Tensor | None,
    parameters: list[Tensor],
    spec: str,
    grad: Tensor,
    wanted: list[bool],
) -> list[Tensor]:
    score = ops.rebuild(spec, parameters)
    pairs = Pairs(score, Points(q, q_level, k, k_level))
    grads = PairGradients(pairs, ops.wanted_names(score, wanted))
    with torch.no_grad(), without_autocast(q.device.type):  # backward may run where autocast is on
        for tile in _tiles(pairs):
            pairs.at(tile).backward(grad[tile.batch, tile.heads, tile.rows, tile.columns], grads)
    asked = [grads.parameters.get(name) for name in score.pair_fields]
    return ops.pack([grads.q.to(q.dtype), grads.q_level, grads.k.to(k.dtype), grads.k_level, *asked], q)


def _trace_backward(*arguments: Any) -> list[Tensor]:
    *points, parameters, _spec, grad, wanted = arguments
    asked = [p if want else None for p, want in zip(parameters, wanted, strict=True)]
    return ops.pack(ops.empty_like([*points, *asked]), grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *points, parameters, ctx.spec = inputs
    ctx.save_for_backward(*points, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, q_level, k, k_level, *parameters = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[4])
    grads = torch.ops.coneheads.pair_scores_backward(q, q_level, k, k_level, parameters, ctx.spec, grad, wanted)
    q, q_level, k, k_level, *asked = ops.unpack(grads)
    return q, q_level, k, k_level, asked, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *points, parameters, ctx.spec, grad, wanted = inputs
    ctx.save_for_backward(grad, *points, *parameters)
    ctx.no_gradient_of_wanted = None if wanted else []  # torch takes an empty list for one of tensors


def _differentiate_twice(ctx: Any, second: list[Tensor]) -> tuple[Any, ...]:
    """Through the dense reference: its first derivative, weighted by ``second``, is differentiated as it stands."""
    with torch.enable_grad():
        variables: list[Any] = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        grad, q, q_level, k, k_level, *parameters = variables
        group = q.shape[1] // k.shape[1]
        keys: list[Any] = [None if t is None else t.repeat_interleave(group, 1) for t in (k, k_level)]
        scores = reference.pair_scores(ops.rebuild(ctx.spec, parameters), Points(q, q_level, *keys))
        inputs = [t for t in (q, q_level, k, k_level, *parameters) if t is not None]
        first = torch.autograd.grad(scores, inputs, grad, create_graph=True, materialize_grads=True)
        weights = [w for w, t in zip(second, variables[1:], strict=True) if t is not None]
        # A gradient that was not wanted came out with the shape [0] and weighs nothing.
        weighed = [(f * w).sum() for f, w in zip(first, weights, strict=True) if f.shape == w.shape]
        present = [t for t in variables if t is not None]
        found = iter(torch.autograd.grad(weighed, present, allow_unused=True, materialize_grads=True))
    by_grad, q, q_level, k, k_level, *parameters = [None if t is None else next(found) for t in variables]
    return q, q_level, k, k_level, parameters, None, by_grad, ctx.no_gradient_of_wanted


LIBRARY.define(f"pair_scores({POINTS}) -> Tensor")
LIBRARY.define(f"pair_scores_backward({POINTS}, Tensor grad, bool[] wanted) -> Tensor[]")
LIBRARY.impl("pair_scores", _run, "CompositeExplicitAutograd")
LIBRARY.impl("pair_scores_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "coneheads::pair_scores", lambda q, q_level, k, *_: q.new_empty(*q.shape[:3], k.shape[2]), lib=LIBRARY
)
torch.library.register_fake("coneheads::pair_scores_backward", _trace_backward, lib=LIBRARY)
torch.library.register_autograd("coneheads::pair_scores", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "coneheads::pair_scores_backward", _differentiate_twice, setup_context=_save_backward, lib=LIBRARY
)
