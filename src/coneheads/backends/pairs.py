"""Scores of tiles of pairs, and their gradients, by matrix products that do not lose the digits of near pairs.

Squared distances come from one product, ``D^2 = |a|^2 + |b|^2 - 2 ab``, which is fast but cancels for near pairs. Three
things keep it exact: positions are taken relative to the mean key of the head; the product is computed in float64 (on
devices that have it); and a pair with ``D^2 < eps_rel |a|^2`` is computed again from the difference of its positions,
in forward and in backward. So a point's distance to itself is 0, and near pairs are as accurate as far ones. Positions
of few coordinates need no product: all their distances are computed from differences.

Scores that share a large part are made of these distances before they are rounded, and come in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from coneheads.backends.inputs import Points, higher_precision
from coneheads.scores import Score
from coneheads.scores.base import NO_LEVEL

# Below this share of |a|^2 a squared distance is computed directly: where the product has the precision of the result,
# a tenth keeps all but one digit; in float64 for a float32 result, 1e-7 keeps them all and next to no pair is near.
NEAR_SAME_PRECISION = 0.2
NEAR_HIGHER_PRECISION = 2e-7
# Up to so many coordinates the differences themselves are cheaper than the product.
FEW_COORDINATES = 4
# Differences that are held at once while near pairs are computed, in elements.
NEAR_BLOCK = 1 << 20
# Elements of a tile, so that a few of its kind fit into the caches, and its keys at the most. Rows that one tile holds
# whole have the most accurate gradients.
TILE = 1 << 19
COLUMNS = 4096


class Tile(NamedTuple):
    """A block of the scores [B, H, L, S]: slices of the batch, of the key heads, of the queries and of the keys."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    columns: slice


def cut(tensor: Tensor, *slices: slice) -> Tensor:
    """A block of a tensor by one slice a dimension; a dimension of size 1 broadcasts and stays whole."""
    return tensor[tuple(slice(None) if n == 1 else s for n, s in zip(tensor.shape, slices, strict=False))]


def blocks(total: int, step: int) -> Iterator[slice]:
    """``total`` in slices of ``step``."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


class Blocking(NamedTuple):
    """How the scores [B, H, L, S] are cut: sizes of a tile in batch, key heads, rows and columns."""

    batch: int
    kv_heads: int
    rows: int
    columns: int

    @staticmethod
    def of(batch: int, kv_heads: int, group: int, length: int, keys: int) -> Blocking:
        """Tiles of about TILE pairs: long in keys, so that few partial results are rescaled, then in all the rest."""
        columns = max(1, min(keys, COLUMNS))
        rows = max(1, min(length, TILE // (columns * group)))
        heads = min(kv_heads, max(1, TILE // (columns * group * rows)))
        whole_batches = TILE // (columns * group * rows * heads) if heads == kv_heads else 1
        return Blocking(max(1, min(batch, whole_batches)), heads, rows, columns)


class Pairs:
    """The pairs of one call, to be had in tiles."""

    def __init__(self, score: Score, points: Points) -> None:
        self.score = score
        self.points = points
        self.group = points.q.shape[1] // points.k.shape[1]
        self.direct = score.measures == "distance_sq" and points.q.shape[-1] <= FEW_COORDINATES
        self.score_dtype = higher_precision(points.q) if score.shares_large_part() else points.q.dtype
        if score.measures == "distance_sq" and not self.direct:
            dtype = higher_precision(points.q)
            self.near = NEAR_SAME_PRECISION if dtype == points.q.dtype else NEAR_HIGHER_PRECISION
            k = points.k.to(dtype)
            centre = k.mean(-2, keepdim=True)  # [B, Hkv, 1, P]
            k = k - centre
            q = points.q.to(dtype) - centre.repeat_interleave(self.group, 1)
            q_sq, k_sq = q.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True)
            # [-2q, |q|^2, 1] times [k, 1, |k|^2] is the squared distance: one product and no further pass.
            self.left = torch.cat([-2 * q, q_sq, torch.ones_like(q_sq)], -1)
            self.right = torch.cat([k, torch.ones_like(k_sq), k_sq], -1)

    def blocking(self) -> Blocking:
        """The tiles of this call."""
        batch, kv_heads, keys, _ = self.points.k.shape
        return Blocking.of(batch, kv_heads, self.group, self.points.q.shape[2], keys)

    def head_blocks(self, blocking: Blocking) -> Iterator[tuple[slice, slice, slice]]:
        """Slices of batch, key heads and query heads that are worked on together."""
        for batch in blocks(self.points.k.shape[0], blocking.batch):
            for kv_heads in blocks(self.points.k.shape[1], blocking.kv_heads):
                yield batch, kv_heads, slice(kv_heads.start * self.group, kv_heads.stop * self.group)

    def at(self, tile: Tile) -> TilePairs:
        """The pairs of a tile, measured."""
        return TilePairs(self, tile)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a [B, H, L, X] times b [B, Hkv, X, Y], without a copy of b for each head of a group: [B, H, L, Y]."""
        return (self._fold(a) @ b).unflatten(2, (self.group, -1)).flatten(1, 2)

    def product_over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """The transpose of a [B, H, L, S] times b [B, H, L, Y], summed over each group: [B, Hkv, S, Y]."""
        return self._fold(a).mT @ self._fold(b)

    def _fold(self, tensor: Tensor) -> Tensor:
        """[B, H, L, X] -> [B, Hkv, group * L, X]: the queries that share a key head, as rows of one matrix."""
        return tensor.unflatten(1, (-1, self.group)).flatten(2, 3)


class TilePairs:
    """The pairs of one tile: their scores, and what a gradient of these scores gives."""

    def __init__(self, pairs: Pairs, tile: Tile) -> None:
        self._pairs = pairs
        self._query = (tile.batch, tile.heads, tile.rows)
        self._key = (tile.batch, tile.kv_heads, tile.columns)
        self._near: _Near | None = None
        points = pairs.points
        if pairs.score.measures == "product":
            self._measure = self._exact = pairs.product(points.q[self._query], points.k[self._key].mT)
        else:
            self._exact = self._direct_distances_sq() if pairs.direct else self._distances_sq()
            self._measure = self._exact.to(points.q.dtype)
        self._levels = (NO_LEVEL, NO_LEVEL)
        if points.q_level is not None and points.k_level is not None:
            k_level = points.k_level[self._key].repeat_interleave(pairs.group, 1)
            self._levels = (points.q_level[self._query][..., :, None], k_level[..., None, :])
        parameters = pairs.score.parameters()
        self._score = pairs.score.with_parameters(
            {name: cut(torch.as_tensor(parameters[name]), *self._query) for name in pairs.score.pair_fields}
        )

    def scores(self) -> Tensor:
        """The scores [B, H, L, S] of the tile in ``score_dtype``, which the caller may change.

        They may be the measure itself, if the score is; its derivative then does not depend on what stands there.
        """
        q_level, k_level = (level.to(self._exact.dtype) for level in self._levels)
        return self._score.pair(self._exact, q_level, k_level)

    def backward(self, grad: Tensor, grads: PairGradients) -> None:
        """Adds what the gradient of the tile's scores gives to the gradients of points and parameters."""
        pair = self._score.pair_backward(grad, self._measure, *self._levels, tuple(grads.parameters))
        if pair.q_level is not None and pair.k_level is not None:
            assert grads.q_level is not None
            assert grads.k_level is not None
            by_key = pair.k_level.expand_as(grad).sum(-2).unflatten(1, (-1, self._pairs.group)).sum(2)
            grads.q_level[self._query] += pair.q_level.expand_as(grad).sum(-1)
            grads.k_level[self._key] += by_key
        for name, total in grads.parameters.items():
            part = cut(total, *self._query)
            part += pair.parameters[name].expand_as(grad).sum_to_size(part.shape)
        if self._pairs.score.measures == "product":
            grads.q[self._query] += self._pairs.product(pair.measure, self._pairs.points.k[self._key])
            grads.k[self._key] += self._pairs.product_over_rows(pair.measure, self._pairs.points.q[self._query])
        elif self._pairs.direct:
            self._direct_backward(2 * pair.measure, grads)
        else:
            self._distance_backward(2 * pair.measure, grads)

    def _differences(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """q - k of the tile's pairs, [B, H, L, S], one coordinate after the other."""
        q, k = self._pairs.points.q[self._query].to(dtype), self._pairs.points.k[self._key].to(dtype)
        k = k.repeat_interleave(self._pairs.group, 1)
        for coordinate in range(q.shape[-1]):
            yield q[..., :, None, coordinate] - k[..., None, :, coordinate]

    def _direct_backward(self, weight: Tensor, grads: PairGradients) -> None:
        """``sum_k w (q - k)`` for every query and ``sum_q w (k - q)`` for every key, with ``w = 2 d score / d D^2``."""
        for coordinate, difference in enumerate(self._differences(weight.dtype)):
            step = weight * difference
            by_key = step.sum(-2).unflatten(1, (-1, self._pairs.group)).sum(2)
            grads.q[self._query][..., coordinate] += step.sum(-1)
            grads.k[self._key][..., coordinate] -= by_key

    def _direct_distances_sq(self) -> Tensor:
        return functools.reduce(torch.add, (d.square() for d in self._differences(self._pairs.score_dtype)))

    def _distances_sq(self) -> Tensor:
        """The squared distances of the tile's pairs; those of near pairs directly."""
        points, left = self._pairs.points, self._pairs.left[self._query]
        d_sq = self._pairs.product(left, self._pairs.right[self._key].mT).to(self._pairs.score_dtype)
        limit = (self._pairs.near * left[..., -2:-1]).to(d_sq.dtype)
        if (d_sq - limit).amin() < 0:
            self._near = _Near(d_sq < limit, points.q[self._query], points.k[self._key], self._pairs.group)
            self._near.store_distances(d_sq)
        return d_sq

    def _distance_backward(self, weight: Tensor, grads: PairGradients) -> None:
        """The same sums by products, near pairs apart."""
        if self._near is not None:
            self._near.add_gradients(weight, grads.q[self._query], grads.k[self._key])
        weight = weight.to(grads.q.dtype)
        left, right = self._pairs.left[self._query], self._pairs.right[self._key]
        over_keys = self._pairs.product(weight, right[..., :-1])  # [sum w k, sum w]
        over_rows = self._pairs.product_over_rows(weight, left)  # [-2 sum w q, sum w |q|^2, sum w]
        grads.q[self._query] += over_keys[..., -1:] * left[..., :-2] / -2 - over_keys[..., :-1]
        grads.k[self._key] += over_rows[..., -1:] * right[..., :-2] + over_rows[..., :-2] / 2


class PairGradients:
    """Gradients of points and wanted parameters, gathered tile by tile; of positions in the dtype of their products."""

    def __init__(self, pairs: Pairs, wanted: tuple[str, ...]) -> None:
        points, parameters = pairs.points, pairs.score.parameters()
        by_distance_product = pairs.score.measures == "distance_sq" and not pairs.direct
        dtype = higher_precision(points.q) if by_distance_product else points.q.dtype
        self.q = torch.zeros_like(points.q, dtype=dtype)
        self.k = torch.zeros_like(points.k, dtype=dtype)
        self.q_level = None if points.q_level is None else torch.zeros_like(points.q_level)
        self.k_level = None if points.k_level is None else torch.zeros_like(points.k_level)
        self.parameters = {name: torch.zeros_like(torch.as_tensor(parameters[name])) for name in wanted}


class _Near:
    """The near pairs of a tile, computed from the differences of their original positions."""

    def __init__(self, where: Tensor, q: Tensor, k: Tensor, group: int) -> None:
        self._pairs = torch.nonzero(where)  # [pairs, 4]
        self._q, self._k, self._group = q, k, group

    def _blocks(self) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], Tensor]]:
        for pairs in self._pairs.split(max(1, NEAR_BLOCK // self._q.shape[-1])):
            batch, head, row, column = pairs.unbind(-1)
            query, key = (batch, head, row), (batch, head // self._group, column)
            yield (batch, head, row, column), query, key, self._q[query] - self._k[key]

    def store_distances(self, d_sq: Tensor) -> None:
        """Writes the squared distances into their places."""
        for place, _, _, difference in self._blocks():
            d_sq[place] = difference.square().sum(-1).to(d_sq.dtype)

    def add_gradients(self, weight: Tensor, grad_q: Tensor, grad_k: Tensor) -> None:
        """Adds ``w (q - k)`` of these pairs to the gradients, and sets their weights to 0 for the product."""
        for place, query, key, difference in self._blocks():
            step = (weight[place][:, None] * difference).to(grad_q.dtype)
            _add_rows(grad_q, query, step)
            _add_rows(grad_k, key, -step)
            weight[place] = 0


def _add_rows(target: Tensor, index: tuple[Tensor, ...], rows: Tensor) -> None:
    """``target[index] += rows``, repeated indices summed in a fixed order."""
    flat = (index[0] * target.shape[1] + index[1]) * target.shape[2] + index[2]
    total = torch.zeros(target.shape[:3].numel(), target.shape[3], dtype=target.dtype, device=target.device)
    if target.device.type == "cpu":
        total.index_add_(0, flat, rows)
    else:  # sorted, and so deterministic, on other devices, where index_add_ is not
        total.index_put_((flat,), rows, accumulate=True)
    target += total.view(target.shape)
