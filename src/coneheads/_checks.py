"""Every rule on what a caller may pass, and the sentence that a wrong call gets.

Each sentence names the argument, says what came and what would be accepted.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def describe(value: object) -> str:
    """``float32 [2, 4, 16, 8] on cpu`` for a tensor, the type's name for anything else."""
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_of(argument: str, value: object, known: Iterable[str]) -> None:
    """``value`` is one of the known names; otherwise an error with the nearest one as a guess."""
    known = list(known)
    if isinstance(value, str) and value in known:
        return
    accepted = ", ".join(repr(name) for name in known)
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be one of the names {accepted}; got {describe(value)}")
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{argument} must be one of {accepted}; got {value!r}.{guess}")


def number(argument: str, value: object, *, least: float = -math.inf, above: bool = False) -> None:
    """A finite real number or a floating-point tensor; a number is also checked against ``least``.

    The values of a tensor are not looked at: it may be learned, on another device or traced.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{argument} must be a number or a floating-point tensor; got {describe(value)}")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number or a floating-point tensor; got {describe(value)}")
    in_range = value > least if above else value >= least
    if not -math.inf < value < math.inf or not in_range:
        bound = "" if least == -math.inf else f" {'above' if above else 'of at least'} {least:g}"
        raise ValueError(f"{argument} must be a finite number{bound}; got {value!r}")


def per_head(argument: str, value: Tensor, query: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A parameter tensor, as a view [..., H, 1, 1] that broadcasts against the scores [..., H, L, S].

    Accepted: shape [], [1], [H] (one value a head), or any shape that broadcasts to [..., H, 1, 1]; on the device of
    query, or a single value on the CPU.
    """
    if value.device != query.device and not (value.dim() == 0 and value.device.type == "cpu"):
        raise ValueError(
            f"{argument} is a tensor and must be on the device of query; "
            f"got query {describe(query)} and {argument} {describe(value)}"
        )
    heads = lead[-1] if lead else 1
    if value.dim() == 1 and value.shape[0] in (1, heads):
        return value[:, None, None]
    if value.dim() == 0:
        return value[None, None, None]
    if value.dim() >= 3 and value.shape[-2:] == (1, 1) and _broadcasts(value.shape[:-2], lead):
        return value
    raise ValueError(
        f"{argument} is a tensor and must have shape [], [{heads}] (one value a head) or one that broadcasts to "
        f"{[*lead, 1, 1]}; got {describe(value)}"
    )


def _broadcasts(shape: Iterable[int], target: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` can be expanded to ``target``."""
    shape = tuple(shape)
    tail = target[len(target) - len(shape) :] if len(shape) <= len(target) else None
    return tail is not None and all(s in (1, t) for s, t in zip(shape, tail, strict=True))


def query_and_key(query: object, key: object, *, enable_gqa: bool) -> None:
    """query [..., H, L, E] and key [..., H, S, E]: floating, one dtype, one device, E >= 2, leading sizes fit."""
    _features("query", query)
    _features("key", key)
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    _same_kind("key", key, query)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query and key must have the same last size E; got query {describe(query)} and key {describe(key)}"
        )
    if query.shape[-1] < 2:
        raise ValueError(
            f"query must have a last size E of at least 2 (E - 1 features of position and one of height); "
            f"got query {describe(query)}"
        )
    _leading_sizes("key", key, query, enable_gqa=enable_gqa)


def value_fits(query: Tensor, key: Tensor, value: object, *, enable_gqa: bool) -> None:
    """value [..., H, S, Ev]: as many rows as key, Ev >= 1, leading sizes that fit query's."""
    _features("value", value)
    assert isinstance(value, Tensor)
    _same_kind("value", value, query)
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key and value must have the same number of rows S (their second last size); "
            f"got key {describe(key)} and value {describe(value)}"
        )
    if value.shape[-1] < 1:
        raise ValueError(f"value must have a last size Ev of at least 1; got value {describe(value)}")
    _leading_sizes("value", value, query, enable_gqa=enable_gqa)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"key and value must have the same number of heads (their third last size) with enable_gqa=True; "
            f"got key {describe(key)} and value {describe(value)}"
        )


def _features(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} must be a tensor [..., H, length, size]; got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{argument} must be a dense (strided) tensor; got layout {value.layout}. "
            f"Call .to_dense(), or pad a nested tensor and pass attn_mask."
        )
    if value.dtype not in FLOATING:
        accepted = ", ".join(_name(dtype) for dtype in FLOATING)
        raise TypeError(f"{argument} must have one of the dtypes {accepted}; got {describe(value)}")
    if value.dim() < 2:
        raise ValueError(f"{argument} must have at least 2 dimensions, [..., H, length, size]; got {describe(value)}")


def _same_kind(argument: str, value: Tensor, query: Tensor) -> None:
    if value.device != query.device:
        raise ValueError(
            f"query and {argument} must be on the same device; "
            f"got query {describe(query)} and {argument} {describe(value)}"
        )
    if value.dtype != query.dtype:
        raise TypeError(
            f"query and {argument} must have the same dtype; "
            f"got query {describe(query)} and {argument} {describe(value)}"
        )


def _leading_sizes(argument: str, value: Tensor, query: Tensor, *, enable_gqa: bool) -> None:
    got = f"got query {describe(query)} and {argument} {describe(value)}"
    if enable_gqa:
        if query.dim() < 3 or value.dim() < 3:
            raise ValueError(f"enable_gqa=True needs a heads dimension, [..., H, length, size]; {got}")
        heads, kv_heads = query.shape[-3], value.shape[-3]
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"with enable_gqa=True the heads of query (its third last size) must be a multiple of the heads "
                f"of {argument}; {got}"
            )
        lead, query_lead = value.shape[:-3], query.shape[:-3]
    else:
        lead, query_lead = value.shape[:-2], query.shape[:-2]
    short, long = sorted((tuple(lead), tuple(query_lead)), key=len)
    tail = long[len(long) - len(short) :]
    if any(a != b and 1 not in (a, b) for a, b in zip(short, tail, strict=True)):
        hint = ""
        if not enable_gqa and query.dim() >= 3 and value.dim() >= 3 and value.shape[-3] > 0:
            grouped = query.shape[-3] != value.shape[-3] and query.shape[-3] % value.shape[-3] == 0
            hint = ". For grouped queries pass enable_gqa=True" if grouped else ""
        raise ValueError(f"the leading sizes of query and {argument} must be equal or 1; {got}{hint}")


def mask(attn_mask: object, query: Tensor, shape: tuple[int, ...], *, is_causal: bool) -> None:
    """A boolean mask (True = attend) or a float mask (added), broadcastable to [..., H, L, S]; not with is_causal."""
    if attn_mask is None:
        return
    if is_causal:
        raise ValueError(
            "attn_mask must be None when is_causal=True; put the causal triangle into attn_mask, or drop one of the two"
        )
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None; got {describe(attn_mask)}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATING:
        raise TypeError(
            f"attn_mask must be boolean (True = attend) or floating-point (added to the scores); "
            f"got {describe(attn_mask)}"
        )
    if attn_mask.device != query.device:
        raise ValueError(
            f"attn_mask must be on the device of query; got query {describe(query)} and attn_mask {describe(attn_mask)}"
        )
    if not _broadcasts(attn_mask.shape, shape):
        raise ValueError(
            f"attn_mask must broadcast to the shape [..., H, L, S] of the scores, {list(shape)}; "
            f"got {describe(attn_mask)}"
        )


def flag(argument: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False; got {describe(value)}")


def dropout(dropout_p: object) -> None:
    """A probability in [0, 1)."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number in [0, 1); got {describe(dropout_p)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be a number in [0, 1); got {dropout_p!r}")


def edges(edge_index: object, sources: object, targets: object) -> None:
    """edge_index [2, M] of integers, (source, target), each of them the number of a node that exists."""
    for argument, count in (("sources", sources), ("targets", targets)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise TypeError(f"{argument} must be a number of nodes, 0 or more; got {describe(count)}")
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"edge_index must be a tensor [2, edges] of integers; got {describe(edge_index)}")
    if edge_index.layout != torch.strided:
        raise TypeError(
            f"edge_index must be a dense tensor [2, edges] of integers; got layout {edge_index.layout}. "
            f"A sparse adjacency becomes one by .to_sparse_coo().indices(); if its rows are targets, also by .flip(0)"
        )
    if edge_index.dtype not in (torch.int64, torch.int32):
        hint = "" if edge_index.numel() else "; without edges it is torch.empty(2, 0, dtype=torch.int64)"
        raise TypeError(f"edge_index must be int64 or int32; got {describe(edge_index)}{hint}")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        hint = " Transpose it: .T" if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
        raise ValueError(
            f"edge_index must have the shape [2, edges], (source, target); got {describe(edge_index)}.{hint}"
        )
    if max(edge_index.shape[1], int(sources), int(targets)) >= 2**31:  # type: ignore[call-overload]
        raise ValueError(f"edge_index and nodes must number fewer than 2^31; got {describe(edge_index)}")
    if torch.compiler.is_compiling() or edge_index.numel() == 0 or edge_index.device.type == "meta":
        return
    for row, (what, argument, count) in enumerate((("source", "key", sources), ("target", "query", targets))):
        low, high = (int(bound) for bound in edge_index[row].aminmax())
        if low < 0 or high >= count:  # type: ignore[operator]
            wrong = low if low < 0 else high
            raise ValueError(
                f"edge_index[{row}] (the {what} of each edge) must be between 0 and {count - 1}, "  # type: ignore[operator]
                f"since {argument} has {count} nodes; got {wrong}"
            )


def nodes(query: object, key: object, value: object) -> None:
    """query [targets, H, E], key [sources, H, E], value [sources, H, Ev]: floating, one dtype, one device."""
    for argument, tensor in (("query", query), ("key", key), ("value", value)):
        _features(argument, tensor)
        assert isinstance(tensor, Tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{argument} must have 3 dimensions, [nodes, heads, size]; got {describe(tensor)}")
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    _same_kind("key", key, query)
    _same_kind("value", value, query)
    if key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]:
        raise ValueError(
            f"query, key and value must have the same number of heads (their second size); "
            f"got query {describe(query)}, key {describe(key)} and value {describe(value)}"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"query and key must have the same last size E; got query {describe(query)} and key {describe(key)}"
        )
    if value.shape[0] != key.shape[0]:
        raise ValueError(
            f"key and value must have the same number of nodes; got key {describe(key)} and value {describe(value)}"
        )
    if query.shape[2] < 1 or value.shape[2] < 1:
        raise ValueError(
            f"query and value must have a last size of at least 1; "
            f"got query {describe(query)} and value {describe(value)}"
        )


def enough_features(query: Tensor, name: str) -> None:
    """All scores but the concatenation need a position and a height."""
    if query.shape[-1] < 2 and name != "concatenation":
        raise ValueError(
            f"query must have a last size E of at least 2 (E - 1 features of position and one of height) for the score "
            f"{name!r}; got query {describe(query)}"
        )
