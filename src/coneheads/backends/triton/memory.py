"""How the Triton kernels read what they need of tokens and heads, and write what they found.

Positions are stored in the dtype of the products, and tensors are contiguous. Where a tile begins in memory is counted
in 64 bits, which is one number, and places inside of it in 32, which are many. Of whole tiles the former is added last:
what it is added to stays the same in the loop over tiles, and each address there is one instruction.
"""

import triton
import triton.language as tl

from coneheads.backends.triton import scores

SLOTS = tl.constexpr(16)  # of a token's parts and of each of its sides: see sums.py
WHOLE = tl.constexpr(128)  # a multiple of the rows and columns of every tile


@triton.jit
def load_rows(
    pointer, start, count, width, ROWS: tl.constexpr, PADDED: tl.constexpr, used=None, SUMS: tl.constexpr = False
):
    """Rows of `width` numbers from `start` on, all or the first `used` numbers of them, as a tile [ROWS, PADDED].

    It is 0 beyond both ends. With SUMS there are whole tiles in memory.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    if SUMS:
        return tl.load((pointer + (rows[:, None] * PADDED + columns[None, :])) + tl.cast(start, tl.int64) * PADDED)
    else:
        inside = (start + rows < count)[:, None] & (columns < (width if used is None else used))[None, :]
        place = pointer + tl.cast(start, tl.int64) * width
        return tl.load(place + (rows[:, None] * width + columns[None, :]), mask=inside, other=0.0)


@triton.jit
def turned(tile, pointer, start, ROWS: tl.constexpr, PADDED: tl.constexpr, AGAIN: tl.constexpr):
    """A tile of ``load_rows``, turned over: loaded once more if AGAIN, for float32 positions in half precision.

    Two products read it, one turned over, and the tensor cores read float32 in one order alone: the compiler would make
    the other by way of registers, and fetch nothing ahead. Wide tiles have no room for both, narrow ones gain nothing.
    """
    if AGAIN:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
        place = pointer + tl.cast(start, tl.int64) * PADDED
        return tl.load(place + (rows[None, :] * PADDED + columns[:, None]))
    else:
        return tl.trans(tile)


@triton.jit
def rows_in_memory(count, SUMS: tl.constexpr):
    """Of a head: whole tiles, with SUMS."""
    return tl.cdiv(count, WHOLE) * WHOLE if SUMS else count


@triton.jit
def of_head(pointer, head, count, width, PADDED: tl.constexpr, SUMS: tl.constexpr):
    """Where the rows of a head begin; with SUMS they are as wide as a tile."""
    return pointer + head * rows_in_memory(count, SUMS) * (PADDED if SUMS else width)


@triton.jit
def store_rows(pointer, tile, start, count, width, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The inverse of ``load_rows``."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (start + rows < count)[:, None] & (columns < width)[None, :]
    place = pointer + tl.cast(start, tl.int64) * width
    tl.store(place + (rows[:, None] * width + columns[None, :]), tile, mask=inside)


@triton.jit
def load_numbers(pointer, rows, count, other=0.0):
    """One number a row, and `other` beyond the end."""
    return tl.load(pointer + rows, mask=rows < count, other=other)


@triton.jit
def load_saved(pointer, head, start, count, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """Numbers of the queries of a head that backward is given, from `start` on: like ``load_rows``."""
    rows = tl.arange(0, ROWS)
    place = pointer + head * rows_in_memory(count, SUMS)
    if SUMS:
        return tl.load((place + rows) + tl.cast(start, tl.int64))
    else:
        return load_numbers(place, start + rows, count)


@triton.jit
def load_levels(pointer, rows, count, SCORE: tl.constexpr):
    """Levels, or aux. Beyond the end a 0 is loaded faster, but for some scores it makes NaN of what has weight 0."""
    if SCORE == scores.PENUMBRAL or SCORE == scores.UMBRAL:
        return load_numbers(pointer, rows, count)
    else:
        return load_numbers(pointer, rows, count, 1.0)


@triton.jit
def load_parts(PARTS, head, start, count, SUMS: tl.constexpr, OF_KEYS: tl.constexpr, ROWS: tl.constexpr):
    """What the others bring to sums with a program's own tokens, once for each sum; nothing without SUMS.

    [ROWS, SLOTS], or turned over for keys.
    """
    if SUMS:
        rows, slots = tl.arange(0, ROWS), tl.arange(0, SLOTS)
        place = PARTS + head * rows_in_memory(count, True) * SLOTS + (rows[:, None] * SLOTS + slots[None, :])
        parts = tl.load(place + tl.cast(start, tl.int64) * SLOTS)
        if OF_KEYS:
            parts = tl.trans(parts)
        return parts, parts, parts, parts
    else:
        return None, None, None, None


@triton.jit
def load_side(
    SIDES, NUMBER: tl.constexpr, COUNT: tl.constexpr, head, start, count, OF_KEYS: tl.constexpr, ROWS: tl.constexpr
):
    """One of COUNT sides. Those of keys are in memory as they are multiplied, a row for each slot."""
    rows, slots = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    tokens = tl.cast(rows_in_memory(count, True), tl.int64)
    if OF_KEYS:  # from row to row it is so far that places inside of a tile are counted in 64 bits too
        first = (head * COUNT + NUMBER) * SLOTS * tokens + start
        return tl.load(SIDES + first + (slots[:, None] * tokens + rows[None, :]))
    else:
        first = ((head * tokens + start) * COUNT + NUMBER) * SLOTS
        return tl.load(SIDES + first + (rows[:, None] * (COUNT * SLOTS) + slots[None, :]))


@triton.jit
def load_sides(
    SIDES, head, start, count, SCORE: tl.constexpr, SUMS: tl.constexpr, OF_KEYS: tl.constexpr, ROWS: tl.constexpr
):
    """What a program's own tokens bring to sums, a side for each of them, in the order of sums.py.

    They come from memory as they are. (What is computed in registers would be multiplied from there, and on sm_90 all
    products of the kernel would wait for each other then.)
    """
    if SUMS and scores.PENUMBRAL <= SCORE and SCORE < scores.UMBRAL:
        return (
            load_side(SIDES, 0, 4, head, start, count, OF_KEYS, ROWS),
            load_side(SIDES, 1, 4, head, start, count, OF_KEYS, ROWS),
            load_side(SIDES, 2, 4, head, start, count, OF_KEYS, ROWS),
            load_side(SIDES, 3, 4, head, start, count, OF_KEYS, ROWS),
        )
    elif SUMS:
        return (
            load_side(SIDES, 0, 3, head, start, count, OF_KEYS, ROWS),
            load_side(SIDES, 1, 3, head, start, count, OF_KEYS, ROWS),
            load_side(SIDES, 2, 3, head, start, count, OF_KEYS, ROWS),
        )
    else:
        return None, None, None


@triton.jit
def load_coordinate(pointer, start, count, width, i, ROWS: tl.constexpr):
    """The i-th number of rows from `start` on, in float32; 0 beyond the end."""
    rows = tl.arange(0, ROWS)
    place = pointer + tl.cast(start, tl.int64) * width
    return tl.load(place + (rows * width + i), mask=start + rows < count, other=0.0).to(tl.float32)


@triton.jit
def constants(CONSTANTS, head, SCALED: tl.constexpr):
    """a, b, c and factor of a head's score: CONSTANTS is [B, H, 4]."""
    place = CONSTANTS + head * 4
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), (1.0 if SCALED else tl.load(place + 3))
