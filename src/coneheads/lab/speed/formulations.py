"""Attention as others would write it: what the backends are compared with. All take query, key, value and a score.

``authors`` follows the equations of the paper as they are printed: dense, distances by ``torch.cdist``, a matrix for
every term. ``plain`` is the best that a few lines of PyTorch do: distances by one matrix product. ``direct`` never
cancels, needs L x S x E numbers, and sets the error that a backend may have. ``flex`` is FlexAttention.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from coneheads.scores import Penumbral, Score, Umbral
from coneheads.scores.base import NO_LEVEL

# FlexAttention on a CPU wants a head size that its vector code can divide.
FLEX_MULTIPLE = 16


def dot_product(query: Tensor, key: Tensor, value: Tensor, score: Score, is_causal: bool = False) -> Tensor:
    """The yardstick: PyTorch's own fused attention. The score is not read."""
    return sdpa(query, key, value, is_causal=is_causal)


def authors(query: Tensor, key: Tensor, value: Tensor, score: Score, is_causal: bool = False) -> Tensor:
    """The paper's equations for penumbral and umbral cones, written out term by term."""
    if isinstance(score, Penumbral):
        return _weigh(_authors_penumbral(query, key, score), value, _causal_mask(query, key, is_causal))
    if isinstance(score, Umbral):
        return _weigh(_authors_umbral(query, key, score), value, _causal_mask(query, key, is_causal))
    raise ValueError(f"the paper gives no formula of its own for {score.name!r}")


def plain(query: Tensor, key: Tensor, value: Tensor, score: Score, is_causal: bool = False) -> Tensor:
    """Dense, with ``D^2 = |a|^2 + |b|^2 - 2 a.b``: inexact for near pairs."""
    return _dense(query, key, value, score, _causal_mask(query, key, is_causal), _distance_sq_by_product)


def direct(query: Tensor, key: Tensor, value: Tensor, score: Score, mask: Tensor | None = None) -> Tensor:
    """Dense, with ``D^2 = |a - b|^2``, in the dtype of the inputs: for few queries. mask: as in ``attention``."""
    return _dense(query, key, value, score, mask, _distance_sq_by_difference)


def flex(query: Tensor, key: Tensor, value: Tensor, score: Score, is_causal: bool = False) -> Tensor:
    """FlexAttention, compiled: it multiplies the positions, and ``score_mod`` makes a score of every product.

    The sum ``|a|^2 + |b|^2 - 2 a.b`` and the levels come in as captured tensors. Forward only: on a CPU it has no
    backward.
    """
    score = score.for_size(query.shape[-1])
    (q, q_level), (k, k_level) = score.points(query), score.points(key)
    q_sq, k_sq = q.square().sum(-1), k.square().sum(-1)  # [B, H, L], [B, H, S]
    # A score without levels reads none; the squares stand in, since a captured tensor has to be one.
    q_level, k_level = (q_sq, k_sq) if q_level is None or k_level is None else (q_level, k_level)

    def score_mod(product: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        measure = product
        if score.measures == "distance_sq":
            measure = (q_sq[b, h, row] + k_sq[b, h, column] - 2 * product).clamp_min(0)
        pair = score.pair(measure, q_level[b, h, row], k_level[b, h, column])
        return torch.where(row >= column, pair, -torch.inf) if is_causal else pair

    missing = -q.shape[-1] % FLEX_MULTIPLE
    return _compiled_flex()(pad(q, (0, missing)), pad(k, (0, missing)), value, score_mod=score_mod, scale=1.0)


def compiling_every_size() -> contextlib.AbstractContextManager[object]:
    """Inside, ``flex`` and ``compiled_plain`` are compiled however many sizes and scores they meet.

    After 8 of them torch otherwise goes on uncompiled, with no more than a warning, and that would be timed.
    """
    import torch._dynamo.config as config

    return config.patch(recompile_limit=10_000, fail_on_recompile_limit_hit=True)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # With dynamic shapes, a second length with captured tensors breaks its code generation.
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=1)
def compiled_plain() -> Callable[..., Tensor]:
    """``plain`` through ``torch.compile``."""
    return torch.compile(plain, dynamic=False)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    mask: Tensor | None,
    distance_sq: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    score = score.for_size(query.shape[-1])
    (q, q_level), (k, k_level) = score.points(query), score.points(key)
    measure = q @ k.mT if score.measures == "product" else distance_sq(q, k)  # [B, H, L, S]
    if q_level is None or k_level is None:
        return _weigh(score.pair(measure, NO_LEVEL, NO_LEVEL), value, mask)
    return _weigh(score.pair(measure, q_level[..., :, None], k_level[..., None, :]), value, mask)


def _distance_sq_by_product(q: Tensor, k: Tensor) -> Tensor:
    squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
    return (squares - 2 * (q @ k.mT)).clamp_min(0)


def _distance_sq_by_difference(q: Tensor, k: Tensor) -> Tensor:
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def _causal_mask(query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    """[L, S], True where a query sees a key: those up to its own place."""
    sizes = (query.shape[-2], key.shape[-2])
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril() if is_causal else None


def _weigh(scores: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return torch.softmax(scores, -1) @ value


def _authors_penumbral(query: Tensor, key: Tensor, score: Penumbral) -> Tensor:
    """``-gamma * height``: of the lowest common ancestor, or of the lowest light under which there would be one.

    With ``s = sqrt(h^2 - y^2)``, a common ancestor exists if ``D <= s_q + s_k``; where one point lies in the cone of
    the other the height is the larger of the two, else ``sqrt(h^2 - ((s_q + s_k - D) / 2)^2)``.
    """
    h = score.light_height
    (q_x, q_y), (k_x, k_y) = (_lift(features, h * features[..., -1:].sigmoid()) for features in (query, key))
    k_y = k_y.mT
    distance = torch.cdist(q_x, k_x)
    q_side, k_side = (h * h - q_y.square()).sqrt(), (h * h - k_y.square()).sqrt()
    exists = distance <= q_side + k_side
    between = (h * h - ((q_side + k_side - distance) / 2).square()).clamp_min(0).sqrt()
    related = distance <= (q_side - k_side).abs()
    inside = torch.where(related, torch.maximum(q_y, k_y), between)
    foot = (distance.square() + k_y.square() - q_y.square()) / (2 * distance)
    outside = (foot.square() + q_y.square()).sqrt()
    return -score.gamma * torch.where(exists, inside, outside)


def _authors_umbral(query: Tensor, key: Tensor, score: Umbral) -> Tensor:
    """``-gamma * max(y_q, y_k, D / (2 sinh r) + (y_q + y_k) / 2)``."""
    (q_x, q_y), (k_x, k_y) = (_lift(features, features[..., -1:].exp()) for features in (query, key))
    k_y = k_y.mT
    sinh_r = score.radius.sinh() if isinstance(score.radius, Tensor) else math.sinh(score.radius)
    apex = torch.cdist(q_x, k_x) / (2 * sinh_r) + (q_y + k_y) / 2
    return -score.gamma * torch.maximum(torch.maximum(q_y, k_y), apex)


def _lift(features: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """Position [..., E-1] and height [..., 1]: the paper's psi and xi differ in the height alone."""
    return features[..., :-1] * height, height
