"""Scores in Triton: what a pair of points is worth, and the derivatives of that. The mathematics is in docs/math.md.

A score is two functions, chosen by the number SCORE when a kernel is compiled: ``value`` of tiles of pairs, and
``slopes``, a gradient times the derivatives of the score. Both see m, the measure of a pair (its squared distance or
product); its terms, which are the difference and the sum of their levels and, for penumbral cones, what ``penumbral``
finds; aux of both points, and the constants of the head:

    score          a           b        c          factor                        aux
    dot            scale                           scale log2 e
    laplacian      gamma                           gamma log2 e
    penumbral      h           gamma    1/h^2      gamma log2 e / 2              4 height^2
      height_sq                                    gamma log2 e / 4
      distance                                     gamma / 2
    umbral         1/sinh r    gamma    1/tanh r   gamma log2 e / (2 sinh r)     1: the row is close
      height_sq                                    gamma log2 e / (4 sinh^2 r)
      distance                                     gamma
    finite cones   gamma                           gamma log2 e / 2
    half_space     beta        offset              2 beta log2 e                 1/sqrt(height)
    hyperboloid    beta        offset              2 beta log2 e                 sinh(radius)

Lengths (positions, levels, and h) are SCALED in half precision if all numbers of a penumbral or umbral cone are fixed
and it reads heights: in units in which factor is 1, so that no pair is multiplied by it. Nobody asks for gradients of
its numbers then.

``value`` is in base 2, for ``exp2``, and leaves out what all keys add to a query alike: the offsets, and for the umbral
cone -gamma level / sinh r, or more in float32 (``umbral_relative``). The log-sum-exp gets it afterwards. A factor is
made in float64, since what it is off by counts as often as it is multiplied by a large score.
"""

import triton
import triton.language as tl

from coneheads.backends.triton import functions, interpreted

DOT = tl.constexpr(0)
LAPLACIAN = tl.constexpr(1)
PENUMBRAL = tl.constexpr(2)  # reads the height; + 1: its square, + 2: the distance
UMBRAL = tl.constexpr(5)  # likewise
FINITE_CONE = tl.constexpr(8)
HALF_SPACE = tl.constexpr(9)
HYPERBOLOID = tl.constexpr(10)
# What SUMS is: 0 for float32, IN_REGISTERS for half precision, or IN_TENSOR_MEMORY where the GPU has one for sums of
# products. Such a GPU, since sm_100, also computes in twos.
IN_REGISTERS = tl.constexpr(1)
IN_TENSOR_MEMORY = tl.constexpr(2)

HEIGHT_SQ_FLOOR = tl.constexpr(1.8048513878454153e-35)  # e^-80: "distance" reads lower squared heights as this
TINY = tl.constexpr(1e-37)  # squares that are divided by stay above it; a GPU may read what is much smaller as 0
# A maximum of NaN and a number is the number, and so the root of what rounding has left below 0 needs no care; but for
# the interpreter it is NaN.
INTERPRETED = tl.constexpr(interpreted())
# What an lca may be above the light, as a share of its height, before it counts as such: rounding must not find a
# descendant of a point at the light beyond it. In half precision, where sums have 16 bits.
MARGIN = tl.constexpr(2.0**-18)
LEAST_DEPTH = tl.constexpr(2.0**-20)  # as a share of the light's height
SMALL = tl.constexpr(1e-18)  # whose square is above TINY
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def value(
    SCORE: tl.constexpr, SUMS: tl.constexpr, m, terms, q_aux, k_aux, a, c, factor, SLOPES: tl.constexpr
):  # fmt: skip
    """The scores of a tile of pairs, in base 2. SUMS: in half precision, with what that has (see sums.py).

    SLOPES: whether they share their steps with the ``slopes`` that follow. Not so in float32: where a query attends to
    almost one key, backward must find the very numbers of forward.
    """
    difference, both = terms[0], terms[1]
    if SCORE == DOT:
        return m * factor
    elif SCORE == LAPLACIAN:
        return tl.sqrt(m) * -factor
    elif SCORE < UMBRAL:
        four_height_sq = terms[2]
        if SCORE == PENUMBRAL:
            if SLOPES:
                return four_height_sq * (tl.rsqrt(four_height_sq) * -factor)
            else:
                return tl.sqrt(four_height_sq) * -factor
        elif SCORE == PENUMBRAL + 1:
            return four_height_sq * -factor
        else:
            return functions.log2(tl.maximum(four_height_sq * 0.25, HEIGHT_SQ_FLOOR) * c, SUMS) * -factor
    elif SCORE < FINITE_CONE:
        reach = _reach(SCORE, m, difference, SLOPES)
        if SCORE == UMBRAL:
            return (reach - difference) * -factor
        elif SCORE == UMBRAL + 1:
            twice = both + reach
            return twice * (twice * -factor)
        else:
            return functions.log2((both + reach) * (a * 0.5), SUMS) * -factor
    elif SCORE == FINITE_CONE:
        return (both + tl.maximum(tl.abs(difference), functions.angle(m))) * -factor
    elif SCORE == HALF_SPACE:
        return functions.asinh(tl.sqrt(difference * difference + m) * (q_aux * k_aux * 0.5)) * -factor
    else:
        radial = functions.sinh(difference * 0.5)
        return functions.asinh(tl.sqrt(radial * radial + q_aux * k_aux * (m * 0.25))) * -factor


@triton.jit
def umbral_relative(m, lean, q_level, k_level, q_sq, close, factor):
    """The scores of the umbral cone in float32, relative to those of a key at the origin, except for close rows.

    Left out is -factor (L_q + |x_q|): where x_q is large, D is |x_q| and little more, and their difference keeps its
    digits as (D^2 - |x_q|^2) / (D + |x_q|), the numerator being ``lean``. What is left of twice the level of the lca,
    L_q + L_k + max(D, |L_q - L_k|), is L_k + D - |x_q| or, of an ancestor and its descendant, L_q - |x_q|, the same for
    all descendants of a query, or 2 L_k - L_q - |x_q|. But a small D would drown in |x_q|: of a close row, one that
    attends to a near key, only -factor L_q is left out, and these are the same formulas with 0 in place of |x_q|.
    """
    norm = tl.where(close > 0, 0.0, tl.sqrt(q_sq))
    d = tl.sqrt(tl.maximum(m, 0.0) if INTERPRETED else m)
    lean = tl.where(close > 0, m, lean)
    of_ancestor = tl.maximum(q_level - norm, 2 * k_level - (q_level + norm))
    return tl.maximum(k_level + lean * functions.inverse(d + (norm + TINY)), of_ancestor) * -factor


@triton.jit
def slopes(
    SCORE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, OF_QUERY: tl.constexpr,
    g, m, terms, q_level, k_level, q_aux, k_aux, a, b, c, factor, sum_level,
):  # fmt: skip
    """g times the derivatives of the score for m, one level, and its two parameters, in the order of `pair_fields`.

    For a squared distance the first is that for its half, of which a query gets as much as it is off the key. The level
    is that of the program's own token, the query or else the key: its slopes are added to sum_level, and the sum is
    what comes back. Sums of these two over its pairs are to be multiplied by its ``unit``. The parameters are not
    always a and b: of the umbral cone they are radius and gamma.

    An umbral score is linear in the query's level, but for ancestors and their descendants: -gamma level / sinh r is
    what ``value`` leaves out. Its slope is the same for all keys, and is left out here too.
    """
    difference, both = terms[0], terms[1]
    if SCORE == DOT:
        return g * a, sum_level, g * m, g
    elif SCORE == LAPLACIAN:
        return g * functions.inverse_root(m) * -a, sum_level, -(g * tl.sqrt(m)), g
    elif SCORE < UMBRAL:
        level, other_level = (q_level, k_level) if OF_QUERY else (k_level, q_level)
        return _penumbral_slopes(SCORE, SUMS, g, terms, level, other_level, a, b, c, factor, sum_level)
    elif SCORE < FINITE_CONE:
        height = (both + _reach(SCORE, m, difference, True)) * (a * 0.5)
        if SCORE == UMBRAL:
            g_level = -g if SCALED else g * (a * b * -0.5)
            for_gamma = -(g * height)
        elif SCORE == UMBRAL + 1:
            g_level = g * height * -(a * b)
            for_gamma = -(g * height * height)
        else:
            g_level = g / height * (a * b * -0.5)
            for_gamma = -(g * tl.log(height))
        inward = g_level * _inverse_reach(SCORE, m, difference)
        if SCORE == UMBRAL and OF_QUERY:
            for_m, sum_level = _through_reach(OF_QUERY, inward, sum_level, m, difference)
        else:
            for_m, for_level = _through_reach(OF_QUERY, inward, g_level, m, difference)
            sum_level += for_level
        return for_m, sum_level, g_level * height * (c / a * -2), for_gamma
    elif SCORE == FINITE_CONE:
        angle = functions.angle(m)
        apart, share = _lca_slopes(difference if OF_QUERY else -difference, angle)
        g_level = g * -a
        for_m = tl.where(apart, g_level * functions.inverse_root(m * tl.maximum(4.0 - m, 0.0)), 0.0)
        return for_m, sum_level + g_level * share, g * (both + tl.maximum(tl.abs(difference), angle)) * -0.5, g
    elif SCORE == HALF_SPACE:
        chord_sq = difference * difference + m
        inverse = functions.inverse_root(chord_sq)
        outer = tl.rsqrt(chord_sq + q_level * k_level * 4)
        for_m = g * inverse * outer * (a * -2)
        stretch = g * (chord_sq * inverse) * outer * a
        aux = q_aux if OF_QUERY else k_aux
        d = functions.asinh(tl.sqrt(chord_sq) * (q_aux * k_aux * 0.5))
        turn = difference * for_m if OF_QUERY else -difference * for_m
        return for_m, sum_level + (turn + stretch * (aux * aux)), g * d * -2, -g
    else:
        radial = functions.sinh((difference if OF_QUERY else -difference) * 0.5)
        sq = radial * radial + q_aux * k_aux * (m * 0.25)
        g_sq = g * functions.inverse_root(sq) * tl.rsqrt(sq + 1) * -a
        aux, other_aux = (q_aux, k_aux) if OF_QUERY else (k_aux, q_aux)
        for_level = g_sq * (radial * tl.sqrt(radial * radial + 1) + tl.sqrt(aux * aux + 1) * other_aux * (m * 0.25))
        return g_sq * (q_aux * k_aux) * 0.5, sum_level + for_level, g * functions.asinh(tl.sqrt(sq)) * -2, -g


@triton.jit
def unit(SCORE: tl.constexpr, SCALED: tl.constexpr, level, a, b):
    """Of the slopes of tokens with these levels, one number each: what is the same for all pairs of a token."""
    if SCORE >= PENUMBRAL and SCORE < UMBRAL:
        return depth(level, a) * (2 * _unit(SCORE, SCALED, a, b))
    else:
        return tl.full(level.shape, 1.0, tl.float32) * _unit(SCORE, SCALED, a, b)


@triton.jit
def _unit(SCORE: tl.constexpr, SCALED: tl.constexpr, a, b):
    """Slopes of penumbral cones are those of four times the squared height, and of the height made of what the score in
    base 2 is made of; those of scaled lengths leave out what is the same for all pairs."""
    if SCALED:
        return b * 0.25 if SCORE == PENUMBRAL else a * b * 0.5
    elif SCORE == PENUMBRAL:
        return 0.5 / LOG2_E
    elif SCORE > PENUMBRAL and SCORE < UMBRAL:
        return 0.25
    else:
        return 1.0


@triton.jit
def reach_sq(m, difference):
    """The square of max(D, |q - k|), never 0. The maximum also raises what rounding has left below 0."""
    return tl.maximum(m, difference * difference + TINY)


@triton.jit
def _inverse_reach(SCORE: tl.constexpr, m, difference):
    """Of equal points, whose slope of D is 0, it is large, or 0 for the logarithm of penumbral heights.

    These may be so small that what is not 0 in place of 0 would count, and slopes would overflow.
    """
    inverse = tl.rsqrt(reach_sq(m, difference))
    if SCORE == PENUMBRAL + 2:
        inverse = functions.if_larger(reach_sq(m, difference), 2 * TINY, inverse, 0.0)
    return inverse


@triton.jit
def _reach(SCORE: tl.constexpr, m, difference, SLOPES: tl.constexpr):
    """max(D, |q - k|), where q and k are levels: twice the level of the lca is q + k + it.

    For max(q, k) = (q + k + |q - k|) / 2. Slopes need its inverse, from which it is made then.
    """
    if SLOPES:
        return reach_sq(m, difference) * _inverse_reach(SCORE, m, difference)
    else:
        if INTERPRETED:
            m = tl.maximum(m, 0.0)
        return functions.larger_size(tl.sqrt(m), difference)


@triton.jit
def _through_reach(OF_QUERY: tl.constexpr, inward, for_both, m, difference):
    """Slopes for m/2 and one level, from those for half the square of the reach (inward) and for the sum of levels.

    The reach is D between points of which neither is an ancestor of the other, and otherwise the difference of levels:
    so an ancestor's level counts twice, and the other not at all. Equal points share it, and the slope of D is 0 there.
    """
    of_levels = difference * difference + TINY
    for_level = functions.fma_if_larger(
        of_levels, m, difference if OF_QUERY else -difference, inward, for_both, for_both
    )
    return functions.if_larger(of_levels, m, 0.0, inward), for_level


@triton.jit
def _lca_slopes(ahead, distance):
    """Whether the level of the lca grows with D, by 1/2, and how it grows with one that is `ahead` of the other.

    If neither point is an ancestor of the other, by 1/2; otherwise the ancestor's level counts 1 and the rest 0, and
    two equal points share it. Of two such D is not counted: the slope of a root is 0 there.
    """
    of_ancestor = (ahead > 0).to(tl.float32)
    return distance > tl.abs(ahead), tl.where(distance >= tl.abs(ahead), 0.5, of_ancestor)


@triton.jit
def depth(level, h):
    """Twice the depth below the light, 2 (h - level); not quite 0 at the light, since slopes divide by it."""
    return tl.maximum(2 * (h - level), tl.maximum(h * LEAST_DEPTH, SMALL))


@triton.jit
def _most(SUMS: tl.constexpr, h):
    return 4 * h * (1 + MARGIN) if SUMS else 4 * h


@triton.jit
def penumbral(
    SCORE: tl.constexpr, SUMS: tl.constexpr, SLOPES: tl.constexpr,
    m, difference, both, squares, apart, level, h,
):  # fmt: skip
    """The terms of penumbral scores: L_own - L_other and L_q + L_k as they come; four times the squared height of the
    lca or, where a pair has none, of the lowest light that would give one; and, with SLOPES, w, 4h - w, and what
    ``_penumbral_slopes`` multiplies slopes of the squared height by, for the own level and then for m.

    L are the levels of the two points (level that of a program's own token, y its height), z the height of the other,
    and apart = z^2 - y^2. With the reach D of the pair, twice the level of the lca is w = L_q + L_k + D: so its height
    is that of w (4h - w), while w is below 2h. Beyond, it is the radius of the semicircle through both points, whose
    centre is (D + apart / D) / 2 from the own one: so four times its square is (D + apart / D)^2 + 4 y^2. Where D and
    apart / D cancel, nearly all of it is 4 y^2; 4h - w is at least half of 4h. float32 multiplies this out, as
    (apart / D)^2 + D^2 + 2 (y^2 + z^2), to find the very same from both ends. squares is what is added to the first
    square: 4 y^2, or in float32 2 (y^2 + z^2).

    Forward in half precision takes 1 / D of m: where that is not the square of the reach, or not above 0, one point is
    an ancestor of the other, and never beyond the light.
    """
    TWOS: tl.constexpr = SUMS == IN_TENSOR_MEMORY
    if SUMS and not SLOPES:
        inverse = tl.rsqrt(tl.maximum(m, TINY) if INTERPRETED else m)
        distance = functions.root(m, inverse, TWOS)
        reach = functions.larger_size(distance, difference)
    else:
        inverse = _inverse_reach(SCORE, m, difference)
        distance = functions.multiply(reach_sq(m, difference), inverse, TWOS)
        reach = distance
    twice = functions.add(both, reach, TWOS)
    rest = functions.subtract(_most(SUMS, h), twice, TWOS)
    if SUMS:
        side = functions.multiply_add(apart, inverse, distance, TWOS)
    else:
        side = apart * inverse
        squares += reach_sq(m, difference)
    below = functions.multiply(twice, rest, TWOS)
    if SLOPES:
        share = 1 / depth(level, h)
        four_sq, rise, outward = _of_three_kinds(
            twice, rest, m, difference, side, 2.0 if SUMS else 1.0, inverse, below, squares,
            _most(SUMS, h) * 0.5 * share, -share, 2 * share,
        )  # fmt: skip
        return difference, both, four_sq, twice, rest, rise, outward
    else:
        return difference, both, functions.fma_if_larger(twice, rest, side, side, squares, below)


@triton.jit
def _of_three_kinds(
    twice, rest, m, difference, side, most_rise, inverse, below, squares, at_leaf, minus_share, twice_share
):  # fmt: skip
    """What depends on the kind of a pair, of ``penumbral``: four times the squared height, and what slopes of it are
    multiplied by.

    Below the light and without an ancestor in the pair, these are at_leaf - share twice, and 1 / D. Beyond the light
    the first is 1 + a (most_rise - side / D), the second share (2 - first). An ancestor and its descendant are as if a
    were the sign of their difference: the first is 2 or 0, and so the second is 0 or does not count.

    All at once, so that the compiler keeps fewer numbers for later, and none of the predicates, of which it has seven.
    """
    of_levels = difference * difference + TINY
    if functions.PTX:  # instructions that only some threads carry out; each of them would be three
        return tl.inline_asm_elementwise(
            "{ .reg .pred beyond, other; setp.gt.f32 beyond, $3, $4; setp.gt.or.f32 other, $6, $5, beyond; "
            ".reg .f32 minus; neg.f32 minus, $10; "
            "mov.f32 $0, $11; "
            "@beyond fma.rn.f32 $0, $8, $8, $12; "
            "fma.rn.f32 $1, $3, $14, $13; "
            "@other fma.rn.f32 $1, $7, $10, 0f3F800000; "
            "@beyond fma.rn.f32 $1, $8, minus, $9; "
            "mov.f32 $2, $10; "
            "@other fma.rn.f32 $2, $1, $14, $15; }",
            "=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f",
            [
                twice, rest, m, of_levels, difference, side, most_rise, inverse, below, squares,
                at_leaf, minus_share, twice_share,
            ],
            (tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    else:
        beyond = twice > rest
        other = (of_levels > m) | beyond
        rise = tl.where(other, difference * inverse + 1, twice * minus_share + at_leaf)
        rise = tl.where(beyond, most_rise - side * inverse, rise)
        outward = tl.where(other, rise * minus_share + twice_share, inverse)
        return tl.where(beyond, side * side + squares, below), rise, outward


@triton.jit
def _penumbral_slopes(
    SCORE: tl.constexpr, SUMS: tl.constexpr, g, terms, level, other_level, h, gamma, inverse_h_sq, factor, sum_level
):
    """Through X, four times the squared height: below the light dX/dw = 4h - 2w, for D and for both levels; beyond it,
    with a = apart / D^2, half of dX/dy^2 is 1 + a, dX/dD^2 = (1 + a) (1 - a), and dy^2/dL = 2 t, t = h - L being the
    depth: so dX/dL = 4 t (1 + a). What all pairs of a token share, 4 t, is left to ``unit``."""
    _, _, four_sq, twice, rest, rise, outward = terms
    TWOS: tl.constexpr = SUMS == IN_TENSOR_MEMORY
    if SCORE == PENUMBRAL:
        g_sq = functions.multiply(g, tl.rsqrt(four_sq) * -factor, TWOS)
        for_gamma = g * tl.sqrt(four_sq) * -0.5
        more = g * 0
    elif SCORE == PENUMBRAL + 1:
        g_sq = g * -gamma
        for_gamma = g * four_sq * -0.25
        more = g * 0
    else:
        inverse_root = tl.rsqrt(four_sq)
        g_sq = g * (inverse_root * inverse_root) * (gamma * -2)
        g_sq = functions.if_larger(four_sq, 4 * HEIGHT_SQ_FLOOR, g_sq, 0.0)
        for_gamma = g * tl.log(tl.maximum(four_sq * 0.25, HEIGHT_SQ_FLOOR) * inverse_h_sq) * -0.5
        more = g * (gamma / h)
    for_level = functions.multiply(g_sq, rise, TWOS)
    for_m = functions.multiply(for_level, outward, TWOS)
    # dX/dh is 4 times twice the level of the lca, and beyond the light 4 times (1 + a) level + (1 - a) other_level.
    leaning = level + other_level + (rise - 1) * (level - other_level)
    growth = functions.if_larger(twice, rest, leaning, twice)
    return for_m, sum_level + for_level, g_sq * growth * (4 * _unit(SCORE, False, h, gamma)) + more, for_gamma
