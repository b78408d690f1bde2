"""The public functions: check the call, choose a backend, call it."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from coneheads import _checks, backends
from coneheads.backends import cpp, dense_scores, reference
from coneheads.backends.edges import EdgeInputs
from coneheads.backends.inputs import Inputs, autocast_is_on, compute_dtype, without_autocast
from coneheads.backends.sorted_edges import SortedEdges as SortedEdges  # a public name
from coneheads.scores import Concatenation, Score, resolve


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    score: Score | str = "penumbral",
    enable_gqa: bool = False,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    score: Score | str = "penumbral",
    enable_gqa: bool = False,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    score: Score | str = "penumbral",
    enable_gqa: bool = False,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(score(query, key) + mask) @ value``: a drop-in for ``F.scaled_dot_product_attention``.

    Args:
        query: [..., H, L, E], E >= 2.
        key: [..., H, S, E].
        value: [..., H, S, Ev]. All three floating-point, of one dtype, on one device; leading sizes broadcast.
        attn_mask: broadcasts to [..., H, L, S]; boolean (True = attend) or floating-point (added to the scores).
        dropout_p: the share of weights set to 0, in [0, 1); seeded by torch's generator.
        is_causal: query i attends to the keys 0..i; not together with attn_mask.
        score: a score object or its name: penumbral, umbral, penumbral_finite, umbral_finite, half_space, hyperboloid,
            laplacian, dot.
        enable_gqa: key and value may have fewer heads than query, each serving an equal group of query heads.
        backend: "auto", or one of ``available_backends()``; an explicit one never falls back to another.
        return_lse: also return the log-sum-exp of the masked scores, [..., H, L], float32 (float64 for float64 inputs).

    Returns:
        [..., H, L, Ev] in the dtype of query; 0 in a row whose keys are all masked out. Masked-out keys have no
        influence, even if they hold NaN. Half precision computes in float32.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)   # batch 2, 4 heads, 10 tokens, 16 features
        >>> attention(q, k, v, is_causal=True, score="umbral").shape
        torch.Size([2, 4, 10, 16])
    """
    if (
        attn_mask is None
        and type(query) is type(key) is type(value) is Tensor
        and type(dropout_p) is float
        and dropout_p == 0
        and type(is_causal) is type(return_lse) is bool
        and enable_gqa is False
        and backend in ("auto", "cpp")
        and (type(score) is str or isinstance(score, Score))
        and (result := cpp.attention_at_once(query, key, value, is_causal, score)) is not None
    ):
        return (result[0], result[1].to(compute_dtype(query.dtype))) if return_lse else result[0]
    query, key, value = _autocast(query, key, value)
    _checks.flag("is_causal", is_causal)
    _checks.flag("enable_gqa", enable_gqa)
    _checks.flag("return_lse", return_lse)
    _checks.dropout(dropout_p)
    _checks.query_and_key(query, key, enable_gqa=enable_gqa)
    _checks.value_fits(query, key, value, enable_gqa=enable_gqa)
    lead = _leading_sizes(query, key, value, enable_gqa=enable_gqa)
    length, keys = query.shape[-2], key.shape[-2]
    _checks.mask(attn_mask, query, (*lead, length, keys), is_causal=is_causal)
    with without_autocast(query.device.type):
        inputs = _inputs(query, key, value, attn_mask, lead, score, enable_gqa)
        if dropout_p > 0:
            seed = torch.randint(2**62, (), device=query.device)
            inputs = inputs._replace(dropout_p=float(dropout_p), seed=seed)
        inputs = inputs._replace(is_causal=is_causal)
        out, lse = backends.choose(backend, inputs).attention(inputs)
    out = out.to(query.dtype).reshape(*lead, length, value.shape[-1])
    return (out, lse.to(compute_dtype(query.dtype)).reshape(*lead, length)) if return_lse else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    score: Score | str = "penumbral",
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(score(query, key) + mask)``: the weights that ``attention`` gives to the values, [..., H, L, S].

    Arguments as in ``attention``. Every row sums to 1, or to 0 if its keys are all masked out.

    Example:
        >>> q = torch.randn(1, 5, 8)
        >>> weights = attention_weights(q, q, score="umbral")
        >>> weights.shape, torch.allclose(weights.sum(-1), torch.ones(1, 5))
        (torch.Size([1, 5, 5]), True)
    """
    query, key = _autocast(query, key)
    _checks.flag("is_causal", is_causal)
    lead = _checked_lead(query, key, enable_gqa)
    _checks.mask(attn_mask, query, (*lead, query.shape[-2], key.shape[-2]), is_causal=is_causal)
    with without_autocast(query.device.type):
        scores = _scores(query, key, lead, score, enable_gqa)
        weights, _ = reference.softmax(reference.masked(scores, attn_mask, is_causal))
    return weights.to(query.dtype)


def attention_scores(
    query: Tensor, key: Tensor, *, score: Score | str = "penumbral", enable_gqa: bool = False
) -> Tensor:
    """The scores of all pairs before mask and softmax, [..., H, L, S]: what replaces ``q k^T / sqrt(E)``.

    Arguments as in ``attention``.

    Example:
        >>> q = torch.tensor([[[0.0, 1.0], [5.0, 1.0]]])               # two points of the same height
        >>> same, other = attention_scores(q, q, score="umbral")[0, 0]
        >>> bool(same > other)                                         # a point is nearest to itself
        True
    """
    query, key = _autocast(query, key)
    lead = _checked_lead(query, key, enable_gqa)
    with without_autocast(query.device.type):
        scores = _scores(query, key, lead, score, enable_gqa)
    return scores.to(query.dtype)


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor | SortedEdges,
    *,
    score: Score | str = "penumbral",
    dropout_p: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on the edges of a graph: each node attends to the sources of its incoming edges.

    For a target i with the incoming edges (j, i), ``out_i = sum_j softmax_j( score(query_i, key_j) ) value_j``. On a
    complete graph this is ``attention``. Edges that occur twice count twice, and self-loops only if they are given.

    Args:
        query: [targets, H, E].
        key: [sources, H, E].
        value: [sources, H, Ev]. In an ordinary graph sources and targets are the same nodes.
        edge_index: int64 [2, M], the source and the target of each edge, or ``SortedEdges`` of it: a graph that is used
            again need not be sorted again.
        score: as in ``attention``, or "concatenation" (``LeakyReLU(q + k)``, E = 1): the score of GAT.
        dropout_p: the share of weights set to 0, in [0, 1); seeded by torch's generator.
        backend: "auto", "cpp" or "reference"; an explicit one never falls back to another.
        return_weights: also return the weight of each edge after dropout, [M, H].

    Returns:
        [targets, H, Ev] in the dtype of query; 0 for a node without an incoming edge.

    Example:
        >>> x = torch.randn(4, 2, 8)                                       # 4 nodes, 2 heads, 8 features
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 0]])             # 0 -> 1, 1 -> 1, 2 -> 0, 3 -> 0
        >>> out, weights = edge_attention(x, x, x, edges, return_weights=True)
        >>> out.shape, weights.shape, bool((out[2:] == 0).all())           # nothing points to 2 and 3
        (torch.Size([4, 2, 8]), torch.Size([4, 2]), True)
    """
    query, key, value = _autocast(query, key, value)
    _checks.flag("return_weights", return_weights)
    _checks.dropout(dropout_p)
    _checks.nodes(query, key, value)
    resolved = Concatenation() if isinstance(score, str) and score == Concatenation.name else resolve(score)
    _checks.enough_features(query, resolved.name)
    resolved = resolved.for_size(query.shape[-1])
    edges = _edges(edge_index, query, key)
    with without_autocast(query.device.type):
        parameters = {
            name: _flatten_batch(_checks.per_head(name, field, query, (query.shape[1],)), (1,))
            for name, field in resolved.parameters().items()
            if isinstance(field, Tensor)
        }
        wide = {name: field.to(compute_dtype(query.dtype)) for name, field in parameters.items()}
        seed = torch.randint(2**62, (), device=query.device) if dropout_p > 0 else None
        given = (query, key, value, edges, resolved.with_parameters(wide), float(dropout_p), seed, return_weights)
        inputs = EdgeInputs(*given)
        out, weights = backends.choose(backend, inputs, backends.EDGE_BACKENDS).attention(inputs)
    return (out.to(query.dtype), weights.to(query.dtype)) if return_weights else out.to(query.dtype)


def _edges(edge_index: Tensor | SortedEdges, query: Tensor, key: Tensor) -> SortedEdges:
    """The edges of a call, sorted, once they are found to fit its nodes."""
    if not isinstance(edge_index, SortedEdges):
        edges = SortedEdges.of(edge_index, key.shape[0], query.shape[0])
    else:
        edges = edge_index
    if (edges.sources, edges.targets) != (key.shape[0], query.shape[0]):
        raise ValueError(
            f"edge_index is of a graph with {edges.sources} sources and {edges.targets} targets; "
            f"got query {_checks.describe(query)} and key {_checks.describe(key)}"
        )
    if edges.edge_index.device != query.device:
        raise ValueError(f"edge_index must be on the device of query; got {_checks.describe(edges.edge_index)}")
    return edges


def available_backends() -> list[str]:
    """The backends that can run on this machine, in the order in which ``backend="auto"`` prefers them.

    Example:
        >>> "reference" in available_backends()
        True
    """
    return [backend.name for backend in backends.BACKENDS if backend.available()]


def _checked_lead(query: Tensor, key: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading sizes [..., H] of the scores, once query and key are found to fit."""
    _checks.flag("enable_gqa", enable_gqa)
    _checks.query_and_key(query, key, enable_gqa=enable_gqa)
    return _leading_sizes(query, key, key, enable_gqa=enable_gqa)


def _scores(query: Tensor, key: Tensor, lead: tuple[int, ...], score: Score | str, enable_gqa: bool) -> Tensor:
    """The scores [..., H, L, S] in the compute dtype."""
    inputs = _inputs(query, key, key, None, lead, score, enable_gqa)
    return dense_scores.pair_scores(inputs).reshape(*lead, query.shape[-2], key.shape[-2])


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the inputs take its dtype, as those of SDPA do; float64 stays."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not autocast_is_on(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in eligible else t for t in tensors)


def _leading_sizes(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> tuple[int, ...]:
    """The leading sizes [..., H] of the result."""
    if enable_gqa:
        return (*_broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3]), query.shape[-3])
    return _broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])


def _broadcast(*shapes: torch.Size) -> tuple[int, ...]:
    """The common shape of checked shapes. (``torch.broadcast_shapes`` loads sympy, which takes a second.)"""
    sizes: list[int] = []
    for shape in shapes:
        sizes = [1] * (len(shape) - len(sizes)) + sizes
        start = len(sizes) - len(shape)
        sizes[start:] = [new if old == 1 else old for old, new in zip(sizes[start:], shape, strict=True)]
    return tuple(sizes)


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lead: tuple[int, ...],
    score: Score | str,
    enable_gqa: bool,
) -> Inputs:
    """The call in the four dimensions that backends know. Copies only where several batch sizes are flattened."""
    resolved = resolve(score).for_size(query.shape[-1])
    batch, heads = tuple(lead[:-1]), (lead[-1] if lead else 1)
    kv_heads = key.shape[-3] if enable_gqa else heads
    parameters = {
        name: _flatten_batch(_checks.per_head(name, value, query, lead), batch).to(compute_dtype(query.dtype))
        for name, value in resolved.parameters().items()
        if isinstance(value, Tensor)
    }
    query = _flatten_batch(query.expand(*batch, heads, *query.shape[-2:]), batch)
    key = _flatten_batch(key.expand(*batch, kv_heads, *key.shape[-2:]), batch)
    value = _flatten_batch(value.expand(*batch, kv_heads, *value.shape[-2:]), batch)
    mask = None if attn_mask is None else _flatten_batch(attn_mask, batch)
    return Inputs(query, key, value, mask, False, 0.0, None, resolved.with_parameters(parameters))


def _flatten_batch(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[..., H, L, S] -> [B, H, L, S]; batch sizes that are all 1 or absent become one of 1, which broadcasts."""
    missing = 3 - tensor.dim()
    tensor = tensor[(None,) * missing] if missing > 0 else tensor
    own = tensor.shape[:-3]
    if len(own) == len(batch) == 1:
        return tensor
    if all(n == 1 for n in own):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])
