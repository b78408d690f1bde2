"""Linear memory in plain PyTorch: tiles of the scores and a running softmax, forward and backward.

It works on every device and dtype. The matrix of scores is never held: forward keeps, for each query, the largest score
so far, the sum of the exponentials relative to it, and the sum of values weighted by them; backward computes each tile
again from the log-sum-exp that forward saved. It is an operator of its own for ``torch.compile``, because its loops and
its near pairs depend on sizes and data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coneheads.backends import ops
from coneheads.backends.dropout import keep_scale
from coneheads.backends.inputs import Inputs, causal_mask, higher_precision, prepare
from coneheads.backends.ops import FusedGradients, FusedInputs, Wanted
from coneheads.backends.pairs import PairGradients, Pairs, Tile, blocks, cut


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, Ev] and log-sum-exp of the masked scores [B, H, L], in the compute dtype."""
    points, value, bad, bad_query = prepare(inputs)
    arguments = (value, bad, inputs.mask, inputs.seed, inputs.is_causal, inputs.dropout_p)
    out, lse = _operator(*ops.call_arguments(inputs.score, points), *arguments)
    lse = lse.to(out.dtype)
    attends = bad_query & (lse != -torch.inf)
    return out.masked_fill(attends[..., None], torch.nan), lse.masked_fill(attends, torch.nan)


class _Tiles:
    """The masked scores of one call, tile by tile."""

    def __init__(self, inputs: FusedInputs) -> None:
        self.inputs = inputs
        self.pairs = Pairs(inputs.score, inputs.points)
        self.blocking = self.pairs.blocking()
        _, self.heads, self.length, _ = inputs.points.q.shape
        self.keys = inputs.points.k.shape[2]
        self.bad = inputs.bad if inputs.bad is not None and bool(inputs.bad.any()) else None
        _keep_freed_memory(inputs.value.device)

    def row_blocks(self) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Slices of batch, key heads, heads and rows: the queries that are worked on together."""
        for batch, kv_heads, heads in self.pairs.head_blocks(self.blocking):
            for rows in blocks(self.length, self.blocking.rows):
                yield batch, kv_heads, heads, rows

    def along_keys(self, batch: slice, kv_heads: slice, heads: slice, rows: slice) -> Iterator[Tile]:
        """The tiles of those queries; with is_causal, without the tiles that are masked whole."""
        keys = min(self.keys, rows.stop) if self.inputs.is_causal else self.keys
        for columns in blocks(keys, self.blocking.columns):
            yield Tile(batch, kv_heads, heads, rows, columns)

    def masked(self, scores: Tensor, tile: Tile) -> Tensor:
        """The scores of a tile with -inf where masked out, and NaN where a query attends to a bad key."""
        device = scores.device
        if self.inputs.is_causal and tile.columns.stop > tile.rows.start + 1:
            rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)
            columns = torch.arange(tile.columns.start, tile.columns.stop, device=device)
            scores.masked_fill_(~causal_mask(rows, columns), -torch.inf)
        if self.inputs.mask is not None:
            mask = cut(self.inputs.mask, tile.batch, tile.heads, tile.rows, tile.columns)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        if self.bad is not None:
            bad = self.bad[tile.batch, tile.kv_heads, None, tile.columns].repeat_interleave(self.pairs.group, 1)
            scores.masked_fill_(bad & (scores != -torch.inf), torch.nan)
        return scores

    def keep(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """The factors of dropout on a tile's weights."""
        seed = self.inputs.seed
        if seed is None:
            return None
        batch, head, row, column = (
            torch.arange(part.start, part.stop, device=seed.device)
            for part in (tile.batch, tile.heads, tile.rows, tile.columns)
        )
        rows = (batch[:, None, None] * self.heads + head[:, None]) * self.length + row  # [B, H, L]
        return keep_scale(seed, rows[..., None], column, self.inputs.dropout_p, dtype)


def _keep_freed_memory(device: torch.device) -> None:
    """Make and free one large block, which is never touched and costs nothing.

    glibc gives freed memory back to the system, and every tile would take it again page by page, which can double the
    time of an operation. It gives back less once a large block was freed.
    """
    if device.type == "cpu":
        torch.empty(31 << 20, dtype=torch.uint8)


def _forward(inputs: FusedInputs) -> tuple[Tensor, Tensor]:
    tiles = _Tiles(inputs)
    q, value = inputs.points.q, inputs.value
    out = q.new_zeros(*q.shape[:3], value.shape[-1])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=higher_precision(q))
    for batch, kv_heads, heads, rows in tiles.row_blocks():
        here = (batch, heads, rows)
        weighted, total = out[here], None
        largest = q.new_full((*weighted.shape[:3], 1), -torch.inf, dtype=tiles.pairs.score_dtype)
        for tile in tiles.along_keys(batch, kv_heads, heads, rows):
            scores = tiles.masked(tiles.pairs.at(tile).scores(), tile)
            previous, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            # A row that is masked so far has -inf here; 0 in its place keeps its exponentials 0.
            base = largest.masked_fill(largest == -torch.inf, 0)
            exp = scores.sub_(base).to(q.dtype).exp_()
            kept = previous.sub(base).to(q.dtype).exp_()
            row_total = exp.sum(-1, keepdim=True)
            total = row_total if total is None else total * kept + row_total
            keep = tiles.keep(tile, exp.dtype)
            weights = exp if keep is None else exp.mul_(keep)
            weighted = weighted * kept + tiles.pairs.product(weights, value[batch, kv_heads, tile.columns])
        if total is not None:
            empty = total == 0
            total = total.masked_fill(empty, 1)
            out[here] = weighted / total
            exact = total.to(lse.dtype).log() + largest
            lse[here] = exact.masked_fill(empty, -torch.inf).squeeze(-1)
    return out, lse


def _backward(
    inputs: FusedInputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, wanted: Wanted
) -> FusedGradients:
    """With P the weights and S the scores: dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dP P) + dlse).

    The weights are exp(S - lse). Where one tile holds a whole row, they are divided by their sum instead, and the sum
    of dP P is taken over the tile: the gradients of a row then cancel as they should. Elsewhere that sum is ``dO O``.
    """
    tiles = _Tiles(inputs)
    pairs, value, mask = tiles.pairs, inputs.value, inputs.mask
    grads = PairGradients(pairs, wanted.parameters)
    grad_value = torch.zeros_like(value)
    grad_mask = torch.zeros_like(mask, dtype=out.dtype) if mask is not None and wanted.mask else None
    # Scores can be large and near to the log-sum-exp: it is subtracted as it is rounded, and the rest is divided out.
    lse = lse.masked_fill(lse == -torch.inf, 0)
    rounded = lse.to(pairs.score_dtype)
    rest = (lse - rounded).to(out.dtype).exp()
    one_tile = tiles.keys <= tiles.blocking.columns
    for batch, kv_heads, heads, rows in tiles.row_blocks():
        here = (batch, heads, rows)
        grad_rows, shift = grad_out[here], grad_lse[here].to(out.dtype)[..., None]
        if not one_tile:
            shift = shift - (grad_rows * out[here]).sum(-1, keepdim=True)
        for tile in tiles.along_keys(batch, kv_heads, heads, rows):
            there = (batch, kv_heads, tile.columns)
            tile_pairs = pairs.at(tile)
            scores = tiles.masked(tile_pairs.scores(), tile)
            weights = scores.sub_(rounded[here][..., None]).to(out.dtype).exp_()
            total = weights.sum(-1, keepdim=True) if one_tile else rest[here][..., None]
            weights /= total.masked_fill(total == 0, 1)
            grad_weights = pairs.product(grad_rows, value[there].mT)
            keep = tiles.keep(tile, weights.dtype)
            if keep is not None:
                grad_weights *= keep
            grad_scores = grad_weights.mul_(weights)
            if one_tile:
                shift = shift - grad_scores.sum(-1, keepdim=True)
            grad_scores.addcmul_(weights, shift)
            used = weights if keep is None else weights.mul_(keep)
            grad_value[there] += pairs.product_over_rows(used, grad_rows)
            if grad_mask is not None:
                part = cut(grad_mask, tile.batch, tile.heads, tile.rows, tile.columns)
                part += grad_scores.sum_to_size(part.shape)
            tile_pairs.backward(grad_scores, grads)
    dtype = inputs.points.q.dtype
    q, k = grads.q.to(dtype), grads.k.to(dtype)
    grad_mask = None if grad_mask is None or mask is None else grad_mask.to(mask.dtype)
    return FusedGradients(q, grads.q_level, k, grads.k_level, grads.parameters, grad_value, grad_mask)


_operator = ops.define_attention("chunked", _forward, _backward)
