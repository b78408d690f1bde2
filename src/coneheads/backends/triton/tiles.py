"""What all Triton kernels do to a tile of pairs: measure it, score it, mask it, drop from it.

Every kernel sees queries as rows and keys as columns, and calls ``scores_of`` on a tile: so forward and all kernels of
backward find the same scores.
"""

import triton
import triton.language as tl

from coneheads.backends.triton import functions, memory, scores

# A squared distance |a|^2 + |b|^2 - 2ab below this share of |a|^2 has lost digits: float32 computes it directly.
NEAR = tl.constexpr(0.2)
# A gradient that is cut off to tf32 loses up to 2^-10 of itself, and 2^-12 / log(2) on the average over all sizes:
# their sums are made larger by as much.
CUT_OFF = tl.constexpr(1 + 2.0**-12 / 0.6931471805599453)


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
def round_gradients(w, ROUND: tl.constexpr, TWICE: tl.constexpr):
    """Gradients as their products see them, in float32: as they are, or cut off to tf32, or rounded to bfloat16.

    A query gets the sum of w (q - k), which is computed as q sum(w) - sum(w k): both sums must be of the same w, or
    what was rounded would be multiplied by q and k, and not by their small difference. TWICE: whether w is read by more
    than its product, which cuts off the bits that tf32 has not by itself. (Rounding would be two steps more a pair; see
    CUT_OFF.)
    """
    if ROUND == "tf32":
        if TWICE or scores.INTERPRETED:
            return (w.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        else:
            return w
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
def direct_distance_sq(
    Q, K, first_row, first_column, length, keys, positions, coordinates, BM: tl.constexpr, BN: tl.constexpr
):
    """The squared distances of a tile from the differences of its positions."""
    total = tl.zeros([BM, BN], tl.float32)
    for i in range(coordinates):
        q = memory.load_coordinate(Q, first_row, length, positions, i, BM) * -0.5
        k = memory.load_coordinate(K, first_column, keys, positions, i, BN)
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
        q = memory.load_coordinate(Q, first_row, length, positions, i, BM)
        k = memory.load_coordinate(K, first_column, keys, positions, i, BN)
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
        q = memory.load_coordinate(Q, first_row, length, positions, i, BM) * -0.5
        k = memory.load_coordinate(K, first_column, keys, positions, i, BN)
        step = w * (k[None, :] - q[:, None])
        grad += tl.where(
            places == i, (functions.total(step, 1) if TO_QUERY else 2 * functions.total(step, 0))[:, None], 0.0
        )
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
        w = round_gradients(w, ROUND, MEASURE == "exact" or (MEASURE == "bounded" and not ONES))
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
            pull += functions.total(w, 1)
        grad += gradient_product(w, other, ROUND, WIDEN)
    return grad, pull


@triton.jit
def gradient_of(
    own, pull, grad, coordinates, unit,
    TO_QUERY: tl.constexpr, MEASURE: tl.constexpr, ONES: tl.constexpr, ROUND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of points from the sums over their pairs. With ONES, the pull is where other points have their 1.

    Of products it is the sum of w times the other point. A squared distance gives w (own - other), and queries in
    memory are -2 q: so a query gets q pull - grad and a key k pull + grad / 2. unit is that of ``slopes``. ROUND: see
    ``round_gradients``.
    """
    if ONES:
        pull = tl.sum(tl.where((tl.arange(0, PADDED) == coordinates)[None, :], grad, 0.0), 1)
    if ROUND == "tf32" and MEASURE != "direct":
        unit *= CUT_OFF
    if MEASURE == "product":
        return grad * unit[:, None]
    elif TO_QUERY:
        return (own.to(tl.float32) * pull[:, None] * -0.5 - grad) * unit[:, None]
    else:
        return (own.to(tl.float32) * pull[:, None] + grad * 0.5) * unit[:, None]


@triton.jit
def measure(
    q, k_turned, q_sq, k_sq, q_sides, k_sides, Q, K, first_row, first_column, length, keys, positions, coordinates,
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
        m = product(q, k_turned, ROUND, WIDEN, sum_of(0, q_sides, k_sides, WIDEN))
        if scores.PENUMBRAL <= SCORE and SCORE < scores.FINITE_CONE:
            return m, m, False
        else:
            m = tl.maximum(m, 0.0)
            return m, m, False
    elif MEASURE == "exact":
        if SCORE == scores.UMBRAL:
            excess = k_sq[None, :] + product(q, k_turned, ROUND, WIDEN)
            m = q_sq[:, None] + excess
        else:
            m = (q_sq[:, None] + k_sq[None, :]) + product(q, k_turned, ROUND, WIDEN)
            excess = m
        limit = (q_sq * NEAR)[:, None]
        any_near = tl.min(m - limit) < 0
        if any_near:
            direct = direct_distance_sq(Q, K, first_row, first_column, length, keys, positions, coordinates, BM, BN)
            m = tl.where(m < limit, direct, m)
        return m, excess, any_near
    else:
        m = product(q, k_turned, ROUND, WIDEN)
        return m, m, False


@triton.jit
def sum_of(NUMBER: tl.constexpr, q_sides, k_sides, WIDEN: tl.constexpr, start=None):
    """One of the sums of sums.py over all pairs of a tile; one of the two has sides, and the other parts."""
    return product(q_sides[NUMBER], k_sides[NUMBER], "bf16", WIDEN, start)


@triton.jit
def terms_of(
    m, excess, q_level, k_level, q_aux, k_aux, a, q_sides, k_sides,
    SCORE: tl.constexpr, OF_QUERY: tl.constexpr, SUMS: tl.constexpr, WIDEN: tl.constexpr, SLOPES: tl.constexpr = True,
):  # fmt: skip
    """What the scores of a tile are made of besides its measures, for all pairs: see scores.py. SLOPES: as there."""
    if SUMS:
        difference = sum_of(1, q_sides, k_sides, WIDEN)
        second = sum_of(2, q_sides, k_sides, WIDEN)
    else:
        difference = q_level[:, None] - k_level[None, :]
        second = q_level[:, None] + k_level[None, :]
    if SCORE < scores.PENUMBRAL or SCORE >= scores.UMBRAL:
        return difference, second, excess
    else:
        if SUMS:
            apart = sum_of(3, q_sides, k_sides, WIDEN)
            squares = q_aux[:, None] if OF_QUERY else k_aux[None, :]
        else:  # z^2 - y^2, since y^2 = level (2h - level)
            apart = difference * (second - 2 * a)
            apart = apart if OF_QUERY else -apart
            difference = difference if OF_QUERY else -difference
            squares = (q_aux[:, None] + k_aux[None, :]) * 0.5
        level = q_level[:, None] if OF_QUERY else k_level[None, :]
        return scores.penumbral(SCORE, SUMS, SLOPES, m, difference, second, squares, apart, level, a)


@triton.jit
def scores_of(
    m, terms, q_sq, q_level, k_level, q_aux, k_aux, a, c, factor,
    MASK, mask_row, mask_column, rows, columns, length, keys,
    SCORE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    SLOPES: tl.constexpr = True, mark=None,
):  # fmt: skip
    """The scores of a tile in base 2, -inf where masked out. MASKED: "none", "boolean" or "float".

    With SCALED, what is beyond the last key is far off (see sums.py) and has no weight. SLOPES: whether their slopes
    follow, as in backward. mark: NaN for keys that make NaN of every row that attends to them, where their numbers do
    not (in a maximum NaN gets lost). Backward has none, since the log-sum-exp of such a row is NaN.
    """
    if SCORE == scores.UMBRAL and not SUMS:
        s = scores.umbral_relative(
            m, terms[2], q_level[:, None], k_level[None, :], q_sq[:, None], q_aux[:, None], factor
        )
    else:
        s = scores.value(SCORE, SUMS, m, terms, q_aux[:, None], k_aux[None, :], a, c, factor, SUMS and SLOPES)
    if mark is not None:
        s = s + mark[None, :]
    if MASKED == "float":
        s = s + mask_entries(MASK, mask_row, mask_column, rows, columns, length, keys, SUMS, MASKED) * scores.LOG2_E
    if SCALED and MASKED == "none" and not CAUSAL:
        return s
    else:
        seen = pairs_seen(MASK, mask_row, mask_column, rows, columns, length, keys, SUMS, MASKED, CAUSAL)
        return tl.where(seen, s, float("-inf"))


@triton.jit
def mask_entries(
    MASK, mask_row, mask_column, rows, columns, length, keys, SUMS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The mask's entries of a tile, 0 beyond its ends: numbers in float32, or 1 where a pair is not masked out."""
    inside = (rows < length)[:, None] & (columns < keys)[None, :]
    place = MASK + rows.to(tl.int64)[:, None] * mask_row + columns.to(tl.int64)[None, :] * mask_column
    entries = tl.load(place, mask=inside, other=0)
    if MASKED == "float":
        entries = entries.to(tl.float32)
    if not SUMS and MASK.dtype.element_ty.primitive_bitwidth < 32:
        entries = functions.as_if_wide(entries)
    return entries


@triton.jit
def pairs_seen(
    MASK, mask_row, mask_column, rows, columns, length, keys,
    SUMS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile are not masked out."""
    seen = (columns < keys)[None, :]
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    if MASKED != "none":
        entries = mask_entries(MASK, mask_row, mask_column, rows, columns, length, keys, SUMS, MASKED)
        seen = seen & (entries != 0 if MASKED == "boolean" else entries != float("-inf"))
    return seen


@triton.jit
def rows_with_near_keys(
    m, q_sq, close, MASK, mask_row, mask_column, rows, columns, length, keys,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """1 for rows that attend to a near key in this tile, or are close already, else 0."""
    seen = pairs_seen(MASK, mask_row, mask_column, rows, columns, length, keys, 0, MASKED, CAUSAL)
    near = tl.where(seen, q_sq[:, None] * NEAR - m, 0.0)
    return tl.where(tl.max(near, 1) > 0, 1.0, close)


@triton.jit
def kept(seed, row_numbers, columns, dropout_p):
    """1/(1-p) where a weight is kept and 0 where it is dropped: Philox, by the numbers of row and key."""
    low = (row_numbers & 0xFFFFFFFF).to(tl.uint32)[:, None] + (columns * 0).to(tl.uint32)[None, :]
    high = (row_numbers >> 32).to(tl.uint32)[:, None] + (columns * 0).to(tl.uint32)[None, :]
    column = (row_numbers * 0).to(tl.uint32)[:, None] + columns.to(tl.uint32)[None, :]
    word, _, _, _ = tl.philox(seed, column, low, high, high * 0)
    return tl.where(tl.uint_to_uniform_float(word) >= dropout_p, 1 / (1 - dropout_p), 0.0)
