"""The oracle: dense attention in plain PyTorch, as the formulas stand. Any dtype, any device, any derivative.

Distances come from differences, never from a product, so nothing cancels; memory is that of [B, H, L, S, E]. Only the
graph that ``torch.onnx.export`` makes of it has a product, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads.backends.dropout import keep_scale, row_numbers
from coneheads.backends.inputs import Inputs, Points, causal_mask, in_onnx_export, prepare
from coneheads.scores import Score
from coneheads.scores.base import NO_LEVEL


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, Ev] and log-sum-exp of the masked scores [B, H, L], in the compute dtype."""
    points, value, bad, bad_query = prepare(inputs, every_head=True)
    scores = masked(pair_scores(inputs.score, points), inputs.mask, inputs.is_causal)
    scores = scores.masked_fill(bad[..., None, :] & (scores != -torch.inf), torch.nan)
    weights, lse = softmax(scores)
    if inputs.seed is not None:
        batch, heads, length, keys = weights.shape
        rows = row_numbers(batch, heads, length, weights.device)
        columns = torch.arange(keys, device=weights.device)
        weights = weights * keep_scale(inputs.seed, rows, columns, inputs.dropout_p, weights.dtype)
    out = weights @ value
    attends = bad_query & (lse != -torch.inf)
    return out.masked_fill(attends[..., None], torch.nan), lse.masked_fill(attends, torch.nan)


def pair_scores(score: Score, points: Points) -> Tensor:
    """The scores of all pairs, [B, H, L, S], by direct differences of the positions."""
    q, q_level, k, k_level = points
    measure = q @ k.mT if score.measures == "product" else _distance_sq(q, k)
    if q_level is None or k_level is None:
        return score.pair(measure, NO_LEVEL, NO_LEVEL)
    return score.pair(measure, q_level[..., :, None], k_level[..., None, :])


def _distance_sq(q: Tensor, k: Tensor) -> Tensor:
    if in_onnx_export() and q.dtype == torch.float32:
        # A runtime would hold all differences at once, 16 times the memory and 8 times the time for heads of 64. The
        # product errs by 1e-8 of the positions' norms, less than float32 rounds them, and no gradient is taken of it.
        q, k = q.double(), k.double()
        lengths_sq = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
        return (lengths_sq - 2 * (q @ k.mT)).clamp_min(0).float()
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The scores with -inf where a key is masked out, and a float mask added."""
    if is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(~causal_mask(rows, columns), -torch.inf)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    # Filled as well, since NaN + -inf is NaN, and a masked-out key may hold NaN.
    return (scores + mask.to(scores.dtype)).masked_fill(mask == -torch.inf, -torch.inf)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp over the last dimension; a row of -inf gives weights 0 and gradient 0."""
    if scores.shape[-1] == 0:  # no key at all: every row is fully masked
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    exp = (scores - largest).exp()
    total = exp.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (total.log() + largest).masked_fill(empty, -torch.inf)
    return exp / total, lse.squeeze(-1)
