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
TINY = 1e-37  # not so small that a GPU may read 0
# What room has more than it should, as a share of four light heights: rounding must not find a descendant of a point at
# the light beyond it.
MARGIN = 2.0**-18
# The squared norm of what fills up the last tile. It is farther from every token than tokens are from each other, by so
# much that it has no weight, and no score or slope of it is infinite.
FAR = 2.0**126

Slots = list[Tensor | float]


def in_whole_tiles(rows: Tensor, width: int) -> Tensor:
    """[..., L, N] with 0s after the last of each row and after the last row, so that tiles are read without a mask."""
    missing = (width - rows.shape[-1], -rows.shape[-2] % WHOLE)
    return pad(rows, (0, missing[0], 0, missing[1])) if any(missing) else rows


def with_16_bits(level: Tensor, light_height: Tensor) -> Tensor:
    """Rounded to what two bfloat16 hold, and not above the light. (Half precision might have 8 or 11 bits.)"""
    nearest = ((level.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
    light = (light_height.float().view(torch.int32) & ~0xFF).view(torch.float32)
    return torch.minimum(nearest, light)


def _split(number: Tensor, count: int) -> Slots:
    """As bfloat16 that add up to it, or to its first 8 `count` bits: each is nearest to what those before have left."""
    parts: Slots = []
    left = number.float()
    for _ in range(count):
        parts.append(left.bfloat16().float())
        left = left - parts[-1]
    return parts


def _stacked(slots: Slots, like: Tensor) -> Tensor:
    """[..., L, 16]; the slots that are not given are 0."""
    columns = [slot if isinstance(slot, Tensor) else torch.full_like(like, slot) for slot in slots]
    return pad(torch.stack(columns, -1), (0, SLOTS - len(columns)))


def _in_memory(parts: Slots, sides: list[Slots], like: Tensor, *, far: bool) -> tuple[Tensor, Tensor]:
    """Parts [..., L', 16] and sides [..., L', 16 * sums], L' in whole tiles. far: see FAR."""
    all_parts = in_whole_tiles(_stacked(parts, like), SLOTS)
    all_sides = in_whole_tiles(torch.cat([_stacked(side, like) for side in sides], -1), SLOTS * len(sides))
    if far:
        end = like.shape[-1]
        all_parts[..., end:, 3] = FAR
        all_sides[..., end:, 0] = FAR
        all_sides[..., end:, 3:6] = 1
    return all_parts.bfloat16(), all_sides.bfloat16()


def of_levels(norm_sq: Tensor, level: Tensor, sign: int, *, far: bool) -> tuple[Tensor, Tensor]:
    """Parts and sides of tokens with squared norms and levels [..., L].

    The sums are those of the squared norms, the difference q - k of the levels, and their sum. sign: 1 for queries, -1
    for keys.
    """
    norms, levels = _split(norm_sq, 3), _split(level, 3)
    parts = [1.0] * 3 + norms + levels
    sides = [
        norms + [1.0] * 3,
        [sign * part for part in levels] + [0.0] * 3 + [-float(sign)] * 3,
        levels + [0.0] * 3 + [1.0] * 3,
    ]
    return _in_memory(parts, sides, norm_sq, far=far)


def of_penumbral(norm_sq: Tensor, level: Tensor, light_height: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """The same for penumbral cones: see `_penumbral` in scores.py for what the sums mean.

    With L the level ``with_16_bits``, h the light's height and t = h - L, the depth below it, the sums are

        squared norms;  L_q - L_k;  room 2 (t_q + t_k);  base M_q + M_k - 2 L_q L_k, where M = L (4h - L);
        squares 4h^2 - 2 t_q^2 - 2 t_k^2;  apart_sq (t_q^2 - t_k^2)^2;  apart 2 (t_other^2 - t_own^2).

    A product of two numbers is that of their first 8 bits, and of these with the next 8: it is off by 2^-16, and M, t^2
    and t^4 by 2^-17. That does not grow: base is a third of its terms at least, and apart_sq is divided by D^2 only
    where D is above both depths.
    """
    h = light_height
    depth_sq = (h - level.double()).square()
    base = level * (4 * h - level) + TINY
    norms, bases, squares = _split(norm_sq, 3), _split(base, 2), _split(depth_sq, 2)
    high, low = _split(level, 2)
    parts = [1.0] * 3 + norms + [high, low, high] + bases + [*squares, squares[0]] + _split(depth_sq.square(), 2)

    none: Slots = [0.0] * 3

    def side(
        own: Slots, norm: float = 0, level: Slots = none, base: float = 0, square: Slots = none, fourth: float = 0
    ) -> Slots:
        return own + [norm] * 3 + level + [base] * 2 + square + [fourth] * 2

    def times(factor: float, parts: Slots) -> Slots:
        return [factor * part for part in parts]

    sides = [
        side(norms, norm=1.0),
        side([*times(sign, [high, low]), 0.0], level=[-float(sign), -float(sign), 0.0]),
        side(_split(4 * h * (1 + MARGIN) - 2 * level, 3), level=[-2.0, -2.0, 0.0]),
        side(_split(base, 3), level=times(-2, [high, high, low]), base=1.0),
        side(_split(4 * h.square() - 2 * depth_sq, 3), square=[-2.0, -2.0, 0.0]),
        side(_split(depth_sq.square(), 3), square=times(-2, [squares[0], *squares]), fourth=1.0),
        side(_split(-2 * depth_sq, 3), square=[2.0, 2.0, 0.0]),
    ]
    return _in_memory(parts, sides, norm_sq, far=True)
