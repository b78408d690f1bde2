"""Scores of tiles of pairs, and their gradients, by matrix products that do not lose the digits of near pairs.

Squared distances come from one product, ``D^2 = |a|^2 + |b|^2 - 2 ab``, which is fast but cancels for near pairs. Three
things keep it exact: positions are taken relative to the mean key of the head; the product is computed in float64 (on
devices that have it); and a pair with ``D^2 < eps_rel |a|^2`` is computed again from the difference of its positions,
in forward and in backward. So a point's distance to itself is 0, and near pairs are as accurate as far ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from coneheads.backends.inputs import Points
from coneheads.scores import Score

# Below this share of |a|^2 a squared distance is computed directly: where the product has the precision of the result,
# a tenth keeps all but one digit; in float64 for a float32 result, 1e-7 keeps them all and next to no pair is near.
NEAR_SAME_PRECISION = 0.2
NEAR_HIGHER_PRECISION = 2e-7
# Differences that are held at once while near pairs are computed, in elements.
NEAR_BLOCK = 1 << 20
# Elements of a tile: a few of its kind fit into the caches.
TILE = 1 << 18


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
        columns = min(keys, 1024)
        rows = min(length, max(1, TILE // (columns * group)))
        heads = min(kv_heads, max(1, TILE // (columns * group * rows)))
        whole_batches = TILE // (columns * group * rows * heads) if heads == kv_heads else 1
        return Blocking(max(1, min(batch, whole_batches)), heads, rows, columns)


class Pairs:
    """The pairs of one call: a tile of their scores, and the gradient of that tile."""

    def __init__(self, score: Score, points: Points) -> None:
        self.score = score
        self.points = points
        self.group = points.q.shape[1] // points.k.shape[1]
        if score.measures == "distance_sq":
            dtype = _product_dtype(points.q)
            self._near = NEAR_SAME_PRECISION if dtype == points.q.dtype else NEAR_HIGHER_PRECISION
            keys = points.k.to(dtype)
            centre = keys.mean(-2, keepdim=True)  # [B, Hkv, 1, P]
            self._k = keys - centre
            self._q = points.q.to(dtype) - centre.repeat_interleave(self.group, 1)
            self._k_sq = self._k.square().sum(-1, keepdim=True)
            self._q_sq = self._q.square().sum(-1, keepdim=True)

    def blocking(self) -> Blocking:
        """The tiles of this call."""
        batch, kv_heads, keys, _ = self.points.k.shape
        return Blocking.of(batch, kv_heads, self.group, self.points.q.shape[2], keys)

    def head_blocks(self, blocking: Blocking) -> Iterator[tuple[slice, slice, slice]]:
        """Slices of batch, key heads and query heads that are worked on together."""
        for batch in blocks(self.points.k.shape[0], blocking.batch):
            for kv_heads in blocks(self.points.k.shape[1], blocking.kv_heads):
                yield batch, kv_heads, slice(kv_heads.start * self.group, kv_heads.stop * self.group)

    def fold(self, tensor: Tensor) -> Tensor:
        """[B, H, L, ...] -> [B, Hkv, group * L, ...]: the queries that share a key head, as rows of one matrix."""
        return tensor.unflatten(1, (-1, self.group)).flatten(2, 3)

    def unfold(self, tensor: Tensor) -> Tensor:
        """The inverse of ``fold``."""
        return tensor.unflatten(2, (self.group, -1)).flatten(1, 2)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a [B, H, L, X] times b [B, Hkv, X, Y], without a copy of b for each head of a group."""
        return self.unfold(self.fold(a) @ b)

    def product_over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """The transpose of a [B, H, L, S] times b [B, H, L, Y], summed over each group: [B, Hkv, S, Y]."""
        return self.fold(a).mT @ self.fold(b)

    def scores(self, tile: Tile) -> Tensor:
        """The scores of a tile."""
        measure, _ = self._measure(tile)
        return self._tile_score(tile).pair(measure, *self._levels(tile))

    def backward(self, tile: Tile, grad: Tensor, grads: PairGradients) -> None:
        """Adds what the gradient of a tile's scores gives to the gradients of points and parameters."""
        measure, near = self._measure(tile)
        score, (q_level, k_level) = self._tile_score(tile), self._levels(tile)
        pair = score.pair_backward(grad, measure, q_level, k_level, tuple(grads.parameters))
        if pair.q_level is not None and pair.k_level is not None:
            assert grads.q_level is not None
            assert grads.k_level is not None
            by_key = pair.k_level.expand_as(grad).sum(-2).unflatten(1, (-1, self.group)).sum(2)
            grads.q_level[tile.batch, tile.heads, tile.rows] += pair.q_level.expand_as(grad).sum(-1)
            grads.k_level[tile.batch, tile.kv_heads, tile.columns] += by_key
        for name, total in grads.parameters.items():
            part = cut(total, tile.batch, tile.heads)
            part += pair.parameters[name].expand_as(grad).sum_to_size(part.shape)
        if self.score.measures == "product":
            self._product_backward(tile, pair.measure, grads)
        else:
            self._distance_backward(tile, 2 * pair.measure, near, grads)

    def _tile_score(self, tile: Tile) -> Score:
        parameters = self.score.parameters()
        names = [name for name in self.score.pair_fields if isinstance(parameters[name], Tensor)]
        return self.score.with_parameters(
            {name: cut(torch.as_tensor(parameters[name]), tile.batch, tile.heads) for name in names}
        )

    def _levels(self, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
        if self.points.q_level is None or self.points.k_level is None:
            return None, None
        q_level = self.points.q_level[tile.batch, tile.heads, tile.rows, None]
        k_level = self.points.k_level[tile.batch, tile.kv_heads, None, tile.columns]
        return q_level, k_level.repeat_interleave(self.group, 1)

    def _measure(self, tile: Tile) -> tuple[Tensor, _Near | None]:
        """The measure of a tile's pairs [B, H, L, S], and which of them were computed directly."""
        query, key = (tile.batch, tile.heads, tile.rows), (tile.batch, tile.kv_heads, tile.columns)
        if self.score.measures == "product":
            return self.product(self.points.q[query], self.points.k[key].mT), None
        q, q_sq, k, k_sq = self._q[query], self._q_sq[query], self._k[key], self._k_sq[key]
        left = torch.cat([-2 * q, q_sq, torch.ones_like(q_sq)], -1)
        right = torch.cat([k, torch.ones_like(k_sq), k_sq], -1)
        d_sq = self.product(left, right.mT).to(self.points.q.dtype)
        limit = (self._near * q_sq).to(d_sq.dtype)
        if d_sq.numel() == 0 or not (d_sq - limit).amin() < 0:
            return d_sq, None
        near = _Near(d_sq < limit, self.points.q[query], self.points.k[key], self.group)
        near.store_distances(d_sq)
        return d_sq, near

    def _product_backward(self, tile: Tile, grad: Tensor, grads: PairGradients) -> None:
        query, key = (tile.batch, tile.heads, tile.rows), (tile.batch, tile.kv_heads, tile.columns)
        grads.q[query] += self.product(grad, self.points.k[key])
        grads.k[key] += self.product_over_rows(grad, self.points.q[query])

    def _distance_backward(self, tile: Tile, weight: Tensor, near: _Near | None, grads: PairGradients) -> None:
        """``sum_k w (q - k)`` for every query and ``sum_q w (k - q)`` for every key, w = 2 d score / d D^2."""
        query, key = (tile.batch, tile.heads, tile.rows), (tile.batch, tile.kv_heads, tile.columns)
        if near is not None:
            near.add_gradients(weight, grads.q[query], grads.k[key])
        weight = weight.to(self._q.dtype)
        q, k = self._q[query], self._k[key]
        grads.q[query] += weight.sum(-1, keepdim=True) * q - self.product(weight, k)
        by_key = weight.sum(-2).unflatten(1, (-1, self.group)).sum(2)[..., None]
        grads.k[key] += by_key * k - self.product_over_rows(weight, q)


class PairGradients:
    """Gradients of points and wanted parameters, gathered tile by tile. Those of positions are in the product dtype."""

    def __init__(self, pairs: Pairs, wanted: tuple[str, ...]) -> None:
        points, parameters = pairs.points, pairs.score.parameters()
        dtype = _product_dtype(points.q) if pairs.score.measures == "distance_sq" else points.q.dtype
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
            d_sq[place] = difference.square().sum(-1)

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


def _product_dtype(positions: Tensor) -> torch.dtype:
    """The dtype of the distance product: float64, except on devices that have none."""
    return positions.dtype if positions.device.type == "mps" else torch.float64
