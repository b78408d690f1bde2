"""What all Triton kernels do to a tile of pairs: measure it, score it, mask it, drop from it.

Every kernel sees queries as rows and keys as columns, and calls ``scores_of`` on a tile: so forward and all kernels of
backward find the same scores. Positions are stored in the dtype of the products, and tensors are contiguous. Where a
tile begins in memory is counted in 64 bits, which is one number, and places inside of it in 32, which are many.
"""

import triton
import triton.language as tl

from coneheads.backends.triton import scores

# A squared distance |a|^2 + |b|^2 - 2ab below this share of |a|^2 has lost digits: float32 computes it directly.
NEAR = tl.constexpr(0.2)
SLOTS = tl.constexpr(16)  # for the parts of a token: see ``load_others``
SIDES = tl.constexpr(4)  # of a token: see ``sides_of_queries``
WHOLE = tl.constexpr(128)  # a multiple of the rows and columns of every tile


@triton.jit
def load_rows(pointer, start, count, width, ROWS: tl.constexpr, PADDED: tl.constexpr, used=None):
    """Rows of `width` numbers from `start` on, all or the first `used` numbers of them, as a tile [ROWS, PADDED].

    It is 0 beyond both ends.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    inside = (start + rows < count)[:, None] & (columns < (width if used is None else used))[None, :]
    place = pointer + tl.cast(start, tl.int64) * width
    return tl.load(place + (rows[:, None] * width + columns[None, :]), mask=inside, other=0.0)


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
def load_levels(pointer, rows, count, SCORE: tl.constexpr):
    """Levels, or aux. Beyond the end a 0 is loaded faster, but for some scores it makes NaN of what has weight 0."""
    if SCORE == scores.PENUMBRAL or SCORE == scores.UMBRAL:
        return load_numbers(pointer, rows, count)
    else:
        return load_numbers(pointer, rows, count, 1.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr, start=None):
    """a times b, summed in float32 from `start`. PRECISION is that of float32: half precision is multiplied as it is.

    WIDEN: as float32, for the interpreter, which has no bfloat16.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, start, input_precision="tf32" if PRECISION == "tf32" else "ieee")


@triton.jit
def places_of_parts(PARTS, head, start, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the first SLOTS of WIDTH numbers a token are, from `start` on. There are whole blocks, 0 beyond `count`."""
    rows, slots = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    first = (head * tl.cdiv(count, WHOLE) * WHOLE + start) * WIDTH
    return PARTS + first + (rows[:, None] * WIDTH + slots[None, :])


@triton.jit
def load_others(PARTS, head, start, count, SUMS: tl.constexpr, ROWS: tl.constexpr):
    """The parts of tokens, for sums over all pairs of one of them with one of a program's own; nothing without SUMS.

    On the tensor cores such sums are products, for a quarter of the instructions that additions take. For each token
    there are three 1s and then numbers, as three bfloat16 each, which add up to float32: squared norm, level, squared
    height (kinds 1, 2, 3). A sum OWN a + OTHER b has a side for each own token, in which the parts of a, times OWN,
    meet the 1s of the other, and three times OTHER meets the parts of b.
    """
    if SUMS:
        parts = tl.load(places_of_parts(PARTS, head, start, count, ROWS, SLOTS))
        return parts, parts, parts, parts
    else:
        return None, None, None, None


@triton.jit
def sides_of_queries(SIDES_OF_QUERIES, head, start, count, SUMS: tl.constexpr, ROWS: tl.constexpr):
    """The sides of queries: for sums of squares, q - k, q + k, and z^2 - y^2, y being the query's height.

    They come from memory as they are. (What is computed in registers would be multiplied from there, and on sm_90 all
    products of the kernel would wait for each other then.)
    """
    if SUMS:
        places = places_of_parts(SIDES_OF_QUERIES, head, start, count, ROWS, SIDES * SLOTS)
        return tl.load(places), tl.load(places + SLOTS), tl.load(places + 2 * SLOTS), tl.load(places + 3 * SLOTS)
    else:
        return None, None, None, None


@triton.jit
def side_of_keys(places, KIND: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr):
    """One side of keys, made of their parts."""
    slots = tl.arange(0, SLOTS)[None, :]
    own = tl.load(places + 3 * KIND, mask=slots < 3, other=0.0).to(tl.float32) * OWN
    return tl.where(slots // 3 == KIND, OTHER, own).to(tl.bfloat16)


@triton.jit
def sides_of_keys(PARTS, head, start, count, SUMS: tl.constexpr, ROWS: tl.constexpr):
    """The same of keys, which one kernel alone needs; from memory it would take more instructions."""
    if SUMS:
        places = places_of_parts(PARTS, head, start, count, ROWS, SLOTS)
        return (
            side_of_keys(places, 1, 1.0, 1.0),
            side_of_keys(places, 2, -1.0, 1.0),
            side_of_keys(places, 2, 1.0, 1.0),
            side_of_keys(places, 3, -1.0, 1.0),
        )
    else:
        return None, None, None, None


@triton.jit
def round_gradients(w, ROUND: tl.constexpr):
    """Gradients as their products see them, in float32: as they are, or rounded to tf32 or to bfloat16.

    A query gets the sum of w (q - k), which is computed as q sum(w) - sum(w k): both sums must be of the same w, or
    what was rounded would be multiplied by q and k, and not by their small difference.
    """
    if ROUND == "tf32":
        bits = w.to(tl.uint32, bitcast=True)
        return ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    elif ROUND == "bf16":
        return w.to(tl.bfloat16).to(tl.float32)
    else:
        return w


@triton.jit
def gradient_product(w, tile, ROUND: tl.constexpr, WIDEN: tl.constexpr):
    """Of rounded gradients with a tile of positions. float16 is multiplied as tf32: it would not hold large ones."""
    if ROUND == "bf16":
        return product(w.to(tl.bfloat16), tile, ROUND, WIDEN)
    else:
        return product(w, tile.to(tl.float32), ROUND, WIDEN)


@triton.jit
def load_coordinate(pointer, start, count, width, i, ROWS: tl.constexpr):
    """The i-th number of rows from `start` on, in float32; 0 beyond the end."""
    rows = tl.arange(0, ROWS)
    place = pointer + tl.cast(start, tl.int64) * width
    return tl.load(place + (rows * width + i), mask=start + rows < count, other=0.0).to(tl.float32)


@triton.jit
def direct_distance_sq(
    Q, K, first_row, first_column, length, keys, positions, coordinates, BM: tl.constexpr, BN: tl.constexpr
):
    """The squared distances of a tile from the differences of its positions."""
    total = tl.zeros([BM, BN], tl.float32)
    for i in range(coordinates):
        q = load_coordinate(Q, first_row, length, positions, i, BM) * -0.5
        k = load_coordinate(K, first_column, keys, positions, i, BN)
        difference = q[:, None] - k[None, :]
        total += difference * difference
    return total


@triton.jit
def direct_excess(
    Q, K, first_row, first_column, length, keys, positions, coordinates, BM: tl.constexpr, BN: tl.constexpr
):
    """Squared distances without the query's |q|^2, as k (k - 2q), which does not round what is left out."""
    total = tl.zeros([BM, BN], tl.float32)
    for i in range(coordinates):
        q = load_coordinate(Q, first_row, length, positions, i, BM)
        k = load_coordinate(K, first_column, keys, positions, i, BN)
        total += (q[:, None] + k[None, :]) * k[None, :]
    return total


@triton.jit
def direct_gradient(
    grad, w, Q, K, first_row, first_column, length, keys, positions, coordinates,
    TO_QUERY: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds the sums of w (k - q) over the keys, or twice those over the queries, from the differences themselves."""
    places = tl.arange(0, PADDED)[None, :]
    for i in range(coordinates):
        q = load_coordinate(Q, first_row, length, positions, i, BM) * -0.5
        k = load_coordinate(K, first_column, keys, positions, i, BN)
        step = w * (k[None, :] - q[:, None])
        grad += tl.where(places == i, (tl.sum(step, 1) if TO_QUERY else 2 * tl.sum(step, 0))[:, None], 0.0)
    return grad


@triton.jit
def add_gradients(
    grad, pull, w, m, any_near, q_sq, other, Q, K, first_row, first_column, length, keys, positions, coordinates,
    TO_QUERY: tl.constexpr, MEASURE: tl.constexpr, ONES: tl.constexpr, ROUND: tl.constexpr, WIDEN: tl.constexpr,
    PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What a tile adds to the sums of w and of w times `other`, the points at the other end as they are in memory.

    w are what ``slopes`` gives for the measures. any_near is what ``measure`` has found. See ``gradient_of`` for what
    becomes of the sums.
    """
    if MEASURE == "direct":
        grad = direct_gradient(
            grad, w, Q, K, first_row, first_column, length, keys, positions, coordinates, TO_QUERY, PADDED, BM, BN
        )
    else:
        w = round_gradients(w, ROUND)
        if MEASURE == "exact":
            # The two terms of a near pair would cancel. What is added is the same, once both are put together.
            if any_near:
                near = tl.where(m < (q_sq * NEAR)[:, None], w, 0.0)
                grad = direct_gradient(
                    grad, near, Q, K, first_row, first_column, length, keys, positions, coordinates,
                    TO_QUERY, PADDED, BM, BN,
                )  # fmt: skip
                w -= near
        if not TO_QUERY:
            w = tl.trans(w)
        if MEASURE != "product" and not ONES:  # with a 1 after their last coordinate, it comes with the product
            pull += tl.sum(w, 1)
        grad += gradient_product(w, other, ROUND, WIDEN)
    return grad, pull


@triton.jit
def gradient_of(
    own, pull, grad, coordinates, unit,
    TO_QUERY: tl.constexpr, MEASURE: tl.constexpr, ONES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of points from the sums over their pairs. With ONES, the pull is where other points have their 1.

    Of products it is the sum of w times the other point. A squared distance gives w (own - other), and queries in
    memory are -2 q: so a query gets q pull - grad and a key k pull + grad / 2. unit is that of ``slopes``.
    """
    if ONES:
        pull = tl.sum(tl.where((tl.arange(0, PADDED) == coordinates)[None, :], grad, 0.0), 1)
    if MEASURE == "product":
        return grad
    elif TO_QUERY:
        return (own.to(tl.float32) * pull[:, None] * -0.5 - grad) * unit
    else:
        return (own.to(tl.float32) * pull[:, None] + grad * 0.5) * unit


@triton.jit
def measure(
    q, k, q_sq, k_sq, q_sides, k_sides, Q, K, first_row, first_column, length, keys, positions, coordinates,
    SCORE: tl.constexpr, MEASURE: tl.constexpr, ROUND: tl.constexpr, WIDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products or squared distances of a tile, its excess, and whether a pair of it may be near.

    Queries of distances are -2 q. The excess is the squared distance without |q|^2, had before that is added; umbral
    cones alone need it, in float32 (see `umbral_relative` in scores.py), and elsewhere it is the measure again.
    MEASURE: "product"; or squared distances, "direct" from differences, "exact" from products and those of near pairs
    from differences, "bounded" from products, what may be rounding taken off. What this leaves below 0 is raised to 0,
    except for cones, which raise it to more. ROUND: see ``round_gradients``.
    """
    if MEASURE == "direct":
        m = direct_distance_sq(Q, K, first_row, first_column, length, keys, positions, coordinates, BM, BN)
        if SCORE == scores.UMBRAL:
            excess = direct_excess(Q, K, first_row, first_column, length, keys, positions, coordinates, BM, BN)
            return m, excess, True
        else:
            return m, m, True
    elif MEASURE == "bounded":
        squares = product(q_sides[0], tl.trans(k_sides[0]), "bf16", WIDEN)
        m = product(q, tl.trans(k), ROUND, WIDEN, squares)
        if scores.PENUMBRAL <= SCORE and SCORE < scores.FINITE_CONE:
            return m, m, False
        else:
            m = tl.maximum(m, 0.0)
            return m, m, False
    elif MEASURE == "exact":
        if SCORE == scores.UMBRAL:
            excess = k_sq[None, :] + product(q, tl.trans(k), ROUND, WIDEN)
            m = q_sq[:, None] + excess
        else:
            m = (q_sq[:, None] + k_sq[None, :]) + product(q, tl.trans(k), ROUND, WIDEN)
            excess = m
        limit = (q_sq * NEAR)[:, None]
        any_near = tl.min(m - limit) < 0
        if any_near:
            direct = direct_distance_sq(Q, K, first_row, first_column, length, keys, positions, coordinates, BM, BN)
            m = tl.where(m < limit, direct, m)
        return m, excess, any_near
    else:
        m = product(q, tl.trans(k), ROUND, WIDEN)
        return m, m, False


@triton.jit
def levels_of(
    m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides,
    SCORE: tl.constexpr, OF_QUERY: tl.constexpr, SUMS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """For all pairs of a tile, the difference of their levels, q - k, and their sum; and for penumbral cones two more.

    These are D^2 + z^2 - y^2 and 4 y^2, D the reach and y and z the heights of the two points. With SUMS, y is that of
    a program's own token, which it has at hand. In float32 it is that of the query, so that all kernels find the same
    scores. Umbral cones have the excess of a pair in the place of the first.
    """
    if SUMS:
        difference = product(q_sides[1], tl.trans(k_sides[1]), "bf16", WIDEN)
        both = product(q_sides[2], tl.trans(k_sides[2]), "bf16", WIDEN)
    else:
        difference = q_level[:, None] - k_level[None, :]
        both = q_level[:, None] + k_level[None, :]
    if SCORE < scores.PENUMBRAL or SCORE >= scores.UMBRAL:
        return difference, both, excess, m
    elif SUMS:
        lean = product(q_sides[3], tl.trans(k_sides[3]), "bf16", WIDEN, scores.reach_sq(m, difference))
        return difference, both, lean, (q_aux[:, None] if OF_QUERY else k_aux[None, :])
    else:
        apart = difference * (2 * a - both)  # y^2 - z^2, since y^2 = level (2h - level)
        return difference, both, scores.reach_sq(m, difference) - apart, q_aux[:, None]


@triton.jit
def scores_of(
    m, difference, both, lean, four_sq, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
    MASK, mask_row, mask_column, rows, columns, length, keys,
    SCORE: tl.constexpr, SUMS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    SLOPES: tl.constexpr = True, mark=None,
):  # fmt: skip
    """The scores of a tile in base 2, -inf where masked out. MASKED: "none", "boolean" or "float".

    SLOPES: whether their slopes follow, as in backward. mark: NaN for keys that make NaN of every row that attends to
    them, where their numbers do not (in a maximum NaN gets lost). Backward has none, since the log-sum-exp of such a
    row is NaN.
    """
    if SCORE == scores.UMBRAL and not SUMS:
        s = scores.umbral_relative(m, lean, q_level[:, None], k_level[None, :], q_sq[:, None], q_aux[:, None], factor)
    else:
        s = scores.value(
            SCORE, SUMS, m, difference, both, lean, four_sq, q_aux[:, None], k_aux[None, :], a, c, factor,
            SUMS and SLOPES,
        )  # fmt: skip
    if mark is not None:
        s = s + mark[None, :]
    seen = (columns < keys)[None, :]
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    if MASKED != "none":
        place = MASK + rows.to(tl.int64)[:, None] * mask_row + columns.to(tl.int64)[None, :] * mask_column
        inside = (rows < length)[:, None] & (columns < keys)[None, :]
        if MASKED == "boolean":
            seen = seen & (tl.load(place, mask=inside, other=0) != 0)
        else:
            added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            s = s + added * scores.LOG2_E
            seen = seen & (added != float("-inf"))
    return tl.where(seen, s, float("-inf"))


@triton.jit
def rows_with_near_keys(
    m, q_sq, close, MASK, mask_row, mask_column, rows, columns, length, keys,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """1 for rows that attend to a near key in this tile, or are close already, else 0."""
    # With the squared distance as their score, pairs that are not masked out are finite.
    s = scores_of(
        m, m, m, m, m, q_sq, close, close, close, columns, 1.0, 1.0, 1.0,
        MASK, mask_row, mask_column, rows, columns, length, keys, scores.DOT, False, MASKED, CAUSAL,
    )  # fmt: skip
    near = (m < (q_sq * NEAR)[:, None]) & (s > float("-inf"))
    return tl.maximum(close, tl.max(tl.where(near, 1.0, 0.0), 1))


@triton.jit
def kept(seed, row_numbers, columns, dropout_p):
    """1/(1-p) where a weight is kept and 0 where it is dropped: Philox, by the numbers of row and key."""
    low = (row_numbers & 0xFFFFFFFF).to(tl.uint32)[:, None] + (columns * 0).to(tl.uint32)[None, :]
    high = (row_numbers >> 32).to(tl.uint32)[:, None] + (columns * 0).to(tl.uint32)[None, :]
    column = (row_numbers * 0).to(tl.uint32)[:, None] + columns.to(tl.uint32)[None, :]
    word, _, _, _ = tl.philox(seed, column, low, high, high * 0)
    return tl.where(tl.uint_to_uniform_float(word) >= dropout_p, 1 / (1 - dropout_p), 0.0)


@triton.jit
def constants(CONSTANTS, head, SCALED: tl.constexpr):
    """a, b, c and factor of a head's score: CONSTANTS is [B, H, 4]."""
    place = CONSTANTS + head * 4
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), (1.0 if SCALED else tl.load(place + 3))
