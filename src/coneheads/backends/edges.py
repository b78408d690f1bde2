"""Attention on the edges of a graph in plain PyTorch: gather, softmax by target, scatter. The oracle of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coneheads.backends.dropout import keep_scale
from coneheads.backends.inputs import finite_or_zero
from coneheads.backends.sorted_edges import SortedEdges
from coneheads.scores import Score
from coneheads.scores.base import NO_LEVEL


class EdgeInputs(NamedTuple):
    """A checked call."""

    query: Tensor  # [targets, H, E]
    key: Tensor  # [sources, H, E]
    value: Tensor  # [sources, H, Ev]
    edges: SortedEdges
    score: Score  # its tensors have the shape [1, H|1, 1, 1]
    dropout_p: float
    seed: Tensor | None  # int64 []
    weights_wanted: bool


def attention(inputs: EdgeInputs) -> tuple[Tensor, Tensor | None]:
    """Output [targets, H, Ev] and the weights [M, H] if wanted, in the compute dtype."""
    source, target = inputs.edges.edge_index.unbind(0)
    scores = edge_scores(inputs.score, inputs.query, inputs.key, source, target)  # [M, H]
    value = inputs.value.to(scores.dtype)
    index = target[:, None].expand_as(scores)
    floor = scores.new_full((inputs.edges.targets, scores.shape[1]), -torch.inf)
    largest = floor.scatter_reduce(0, index, scores.detach(), "amax")
    scores = scores - largest[target]
    total = torch.zeros_like(floor).scatter_add(0, index, scores.exp())
    weights = (scores - total.log()[target]).exp()  # a quotient would lose digits in its gradient
    if inputs.seed is not None:
        heads = torch.arange(scores.shape[1], device=scores.device)[:, None]
        numbers = torch.arange(len(inputs.edges), device=scores.device)
        weights = weights * keep_scale(inputs.seed, heads, numbers, inputs.dropout_p, weights.dtype).T
    messages = weights[..., None] * value[source]
    out = value.new_zeros(inputs.edges.targets, *value.shape[1:]).index_add(0, target, messages)
    return out, weights if inputs.weights_wanted else None


def edge_scores(score: Score, query: Tensor, key: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The score of each edge, [M, H], in the compute dtype; NaN if one of its nodes holds NaN.

    query [targets, H, E] and key [sources, H, E] are lifted once a node; distances come from differences. Fields of the
    score that are tensors have the shape [1, H|1, 1, 1].
    """
    q, q_level, bad_query = _points(score, query)
    k, k_level, bad_key = (q, q_level, bad_query) if query is key else _points(score, key)
    q, k = q.index_select(2, target), k.index_select(2, source)  # [1, H, M, P]
    measure = (q * k if score.measures == "product" else (q - k).square()).sum(-1, keepdim=True)
    levels = (NO_LEVEL, NO_LEVEL)
    if q_level is not None and k_level is not None:
        levels = (q_level.index_select(2, target)[..., None], k_level.index_select(2, source)[..., None])
    scores = score.pair(measure, *levels)[0, ..., 0]  # to a score, the edges are queries with one key each
    return scores.masked_fill(
        bad_query.index_select(1, target) | bad_key.index_select(1, source), torch.nan
    ).T.contiguous()


def _points(score: Score, features: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """features [N, H, E] -> positions [1, H, N, P], levels [1, H, N] or None, and which hold NaN or inf, [H, N].

    The bad ones compute as zeros, so that their NaN reaches the scores of their own edges and no gradient.
    """
    finite, bad = finite_or_zero(features.transpose(0, 1)[None])
    return *score.points(finite), bad[0]
