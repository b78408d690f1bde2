"""What tokens bring to sums over pairs, in half precision: these are products on the tensor cores.

Distances and scores add numbers of a query to numbers of a key: squared norms, levels, heights. On the tensor cores
such a sum is a product of 16 bfloat16, for a quarter of an instruction a pair where an addition takes one. A token has
*parts*: 1s, and its numbers as two or three bfloat16 each, which add up to them. And it has a *side* for each sum, to
be multiplied with the parts of another token: its own numbers meet the 1s there, and the other's numbers what they
count for. Both are made here, once a token, and multiplied by `terms_of` in tiles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coneheads.backends.triton import memory

SLOTS, WHOLE = memory.SLOTS.value, memory.WHOLE.value
# The squared norm of what fills up the last tile. It is farther from every token than tokens are from each other, by so
# much that it has no weight, and no score or slope of it is infinite.
FAR = 2.0**126


def in_whole_tiles(rows: Tensor, width: int) -> Tensor:
    """[..., L, N] with 0s after the last of each row and after the last row, so that tiles are read without a mask."""
    missing = (width - rows.shape[-1], -rows.shape[-2] % WHOLE)
    return pad(rows, (0, missing[0], 0, missing[1])) if any(missing) else rows


def with_16_bits(level: Tensor, light_height: Tensor) -> Tensor:
    """Rounded to what two bfloat16 hold, and not above the light. (Half precision might have 8 or 11 bits.)"""
    nearest = ((level.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    light = (light_height.float().view(torch.int32) & ~0xFF).view(torch.float32)
    return torch.minimum(nearest, light)


def _split(numbers: Tensor, count: int) -> Tensor:
    """[..., count]: as bfloat16 that add up to them, or to their first 8 `count` bits, each nearest to what is left."""
    parts, left = [], numbers.float()
    for _ in range(count):
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    return torch.stack(parts, -1)


def _sides(own: list[Tensor], others: list[tuple[int, int, int]]) -> Tensor:
    """[..., L', sums, 16]: what is added of the own token to each sum, as three bfloat16, and what slots of the other
    count for: from the first to before the last, so much. L' is L in whole tiles."""
    numbers = torch.stack([number.float() for number in own], -1)
    *shape, length, count = numbers.shape
    sides = numbers.new_zeros((*shape, length + -length % WHOLE, count, SLOTS), dtype=torch.bfloat16)
    sides[..., :length, :, :3] = _split(numbers, 3)
    for number, (first, last, factor) in enumerate(others):
        sides[..., :length, number, first:last] = factor
    return sides


def _finished(parts: Tensor, sides: Tensor, length: int, *, far: bool) -> tuple[Tensor, Tensor]:
    """Parts [..., L', 16] and sides [..., L', 16 * sums], both with what fills up the last tile. far: see FAR."""
    parts[..., :length, :3] = 1
    if far:
        parts[..., length:, 3] = FAR
        sides[..., length:, 0, 0] = FAR
        sides[..., length:, 0, 3:6] = 1
    return parts, sides.flatten(-2)


def of_levels(norm_sq: Tensor, level: Tensor, sign: int, *, far: bool) -> tuple[Tensor, Tensor]:
    """Parts and sides of tokens with squared norms and levels [..., L].

    The sums are those of the squared norms, the difference q - k of the levels, and their sum. sign: 1 for queries, -1
    for keys. In the slots are three 1s, three parts of the squared norm, and three of the level.
    """
    sides = _sides([norm_sq, sign * level, level], [(3, 6, 1), (6, 9, -sign), (6, 9, 1)])
    parts, length = sides.new_zeros((*sides.shape[:-2], SLOTS)), norm_sq.shape[-1]
    parts[..., :length, 3:9] = _split(torch.stack([norm_sq, level], -1), 3).flatten(-2)
    return _finished(parts, sides, length, far=far)


def of_penumbral(norm_sq: Tensor, level: Tensor, light_height: Tensor) -> tuple[Tensor, Tensor]:
    """The same for penumbral cones: see `penumbral` in scores.py for what the sums mean.

    With L the level ``with_16_bits``, h the light's height and t = h - L, the depth below it, the sums are

        squared norms;  L_own - L_other;  L_q + L_k;  t_own^2 - t_other^2, which is other^2 - own^2 of their heights.


    In the slots are three 1s, three parts of the squared norm, two of L, and three of t^2.
    """
    h, wide = light_height, level.double()
    depth_sq = (h - wide).square()
    sides = _sides([norm_sq, level, level, depth_sq], [(3, 6, 1), (6, 8, -1), (6, 8, 1), (8, 11, -1)])
    parts, length = sides.new_zeros((*sides.shape[:-2], SLOTS)), norm_sq.shape[-1]
    parts[..., :length, 3:6] = _split(norm_sq, 3)
    parts[..., :length, 6:8] = _split(wide, 2)
    parts[..., :length, 8:11] = _split(depth_sq, 3)
    return _finished(parts, sides, length, far=True)
