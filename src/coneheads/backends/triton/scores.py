"""Scores in Triton: what a pair of points is worth, and the derivatives of that. The mathematics is in docs/math.md.

A score is two functions, chosen by the number SCORE when a kernel is compiled: ``value`` of tiles of pairs, and
``slopes``, a gradient times the derivatives of the score. Both see m, the measure of a pair (its squared distance or
product), the difference and the sum of their levels, aux of both points, and the constants of the head:

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
made in float64, since what it is off by counts as often as it is multiplied by a large score. What is not in the GPU's
instructions is computed from what is: the functions at the end keep the digits of small arguments, which a difference
of fast exponentials or a fast logarithm would lose.
"""

import torch
import triton
import triton.language as tl

from coneheads.backends.triton import interpreted

DOT = tl.constexpr(0)
LAPLACIAN = tl.constexpr(1)
PENUMBRAL = tl.constexpr(2)  # reads the height; + 1: its square, + 2: the distance
UMBRAL = tl.constexpr(5)  # likewise
FINITE_CONE = tl.constexpr(8)
HALF_SPACE = tl.constexpr(9)
HYPERBOLOID = tl.constexpr(10)

HEIGHT_SQ_FLOOR = tl.constexpr(1.8048513878454153e-35)  # e^-80: "distance" reads lower squared heights as this
TINY = tl.constexpr(1e-37)  # squares that are divided by stay above it; a GPU may read what is much smaller as 0
# A maximum of NaN and a number is the number, and so the root of what rounding has left below 0 needs no care; but for
# the interpreter it is NaN.
INTERPRETED = tl.constexpr(interpreted())
PTX = tl.constexpr(not interpreted() and torch.version.hip is None)  # whether kernels may have instructions of NVIDIA's
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def value(
    SCORE: tl.constexpr, SUMS: tl.constexpr, m, difference, both, lean, four_sq, q_aux, k_aux, a, c, factor,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """The scores of a tile of pairs, in base 2. SUMS: in half precision, with what that has (see tiles.py).

    SLOPES: whether they share their steps with the ``slopes`` that follow. Not so in float32: where a query attends to
    almost one key, backward must find the very numbers of forward.
    """
    if SCORE == DOT:
        return m * factor
    elif SCORE == LAPLACIAN:
        return tl.sqrt(m) * -factor
    elif SCORE < UMBRAL:
        four_height_sq = _penumbral(SCORE, m, difference, both, lean, four_sq, a)[0]
        if SCORE == PENUMBRAL:
            if SLOPES:
                return four_height_sq * (tl.rsqrt(four_height_sq) * -factor)
            else:
                return tl.sqrt(four_height_sq) * -factor
        elif SCORE == PENUMBRAL + 1:
            return four_height_sq * -factor
        else:
            return _log2(tl.maximum(four_height_sq * 0.25, HEIGHT_SQ_FLOOR) * c, SUMS) * -factor
    elif SCORE < FINITE_CONE:
        reach = _reach(m, difference, SLOPES)
        if SCORE == UMBRAL:
            return (reach - difference) * -factor
        elif SCORE == UMBRAL + 1:
            twice = both + reach
            return twice * (twice * -factor)
        else:
            return _log2((both + reach) * (a * 0.5), SUMS) * -factor
    elif SCORE == FINITE_CONE:
        return (both + tl.maximum(tl.abs(difference), _angle(m))) * -factor
    elif SCORE == HALF_SPACE:
        return asinh(tl.sqrt(difference * difference + m) * (q_aux * k_aux * 0.5)) * -factor
    else:
        radial = sinh(difference * 0.5)
        return asinh(tl.sqrt(radial * radial + q_aux * k_aux * (m * 0.25))) * -factor


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
    return tl.maximum(k_level + lean * _inverse(d + (norm + TINY)), of_ancestor) * -factor


@triton.jit
def slopes(
    SCORE: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, OF_QUERY: tl.constexpr,
    g, m, difference, both, lean, four_sq, q_level, k_level, q_aux, k_aux, a, b, c, factor,
):  # fmt: skip
    """g times the derivatives of the score for m, one level, and its two parameters, in the order of `pair_fields`.

    For a squared distance the first is that for its half, of which a query gets as much as it is off the key. The level
    is the query's, or else the key's. Sums of these two are to be multiplied by ``unit``. The parameters are not always
    a and b: of the umbral cone they are radius and gamma.
    """
    if SCORE == DOT:
        return g * a, g, g * m, g
    elif SCORE == LAPLACIAN:
        return g * _inverse_root(m) * -a, g, -(g * tl.sqrt(m)), g
    elif SCORE < UMBRAL:
        level, other_level = (q_level, k_level) if OF_QUERY else (k_level, q_level)
        return _penumbral_slopes(
            SCORE, SUMS, OF_QUERY, g, m, difference, both, lean, four_sq, level, other_level, a, b, c, factor
        )
    elif SCORE < FINITE_CONE:
        height = (both + _reach(m, difference, True)) * (a * 0.5)
        if SCORE == UMBRAL:
            g_level = -g if SCALED else g * (a * b * -0.5)
            for_gamma = -(g * height)
        elif SCORE == UMBRAL + 1:
            g_level = g * height * -(a * b)
            for_gamma = -(g * height * height)
        else:
            g_level = g / height * (a * b * -0.5)
            for_gamma = -(g * tl.log(height))
        for_m, for_level = _through_reach(
            OF_QUERY, g_level * _inverse_reach(SCORE, m, difference), g_level, m, difference
        )
        return for_m, for_level, g_level * height * (c / a * -2), for_gamma
    elif SCORE == FINITE_CONE:
        angle = _angle(m)
        apart, share = _lca_slopes(difference if OF_QUERY else -difference, angle)
        g_level = g * -a
        for_m = tl.where(apart, g_level * _inverse_root(m * tl.maximum(4.0 - m, 0.0)), 0.0)
        return for_m, g_level * share, g * (both + tl.maximum(tl.abs(difference), angle)) * -0.5, g
    elif SCORE == HALF_SPACE:
        chord_sq = difference * difference + m
        inverse = _inverse_root(chord_sq)
        outer = tl.rsqrt(chord_sq + q_level * k_level * 4)
        for_m = g * inverse * outer * (a * -2)
        stretch = g * (chord_sq * inverse) * outer * a
        aux = q_aux if OF_QUERY else k_aux
        d = asinh(tl.sqrt(chord_sq) * (q_aux * k_aux * 0.5))
        turn = difference * for_m if OF_QUERY else -difference * for_m
        return for_m, turn + stretch * (aux * aux), g * d * -2, -g
    else:
        radial = sinh((difference if OF_QUERY else -difference) * 0.5)
        sq = radial * radial + q_aux * k_aux * (m * 0.25)
        g_sq = g * _inverse_root(sq) * tl.rsqrt(sq + 1) * -a
        aux, other_aux = (q_aux, k_aux) if OF_QUERY else (k_aux, q_aux)
        for_level = g_sq * (radial * tl.sqrt(radial * radial + 1) + tl.sqrt(aux * aux + 1) * other_aux * (m * 0.25))
        return g_sq * (q_aux * k_aux) * 0.5, for_level, g * asinh(tl.sqrt(sq)) * -2, -g


@triton.jit
def unit(SCORE: tl.constexpr, SCALED: tl.constexpr, a, b):
    """Of slopes: those of the penumbral height are made of what the score in base 2 is made of, and those of scaled
    lengths leave out what is the same for all pairs."""
    if SCALED:
        return b if SCORE == PENUMBRAL else a * b * 0.5
    elif SCORE == PENUMBRAL:
        return 2 / LOG2_E
    else:
        return 1.0


@triton.jit
def _if_larger(x, y, yes, no):
    """yes where x > y, no elsewhere. Of such a choice LLVM makes vectors of bits, which cost more than the choice."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred larger; setp.gt.f32 larger, $1, $2; selp.f32 $0, $3, $4, larger; }",
            "=f,f,f,f,f", [x, y, yes, no], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.where(x > y, yes, no)


@triton.jit
def _inverse(x):
    """1 / x, off by a unit in the last place; the division of the language has ten steps more."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1 / x


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
        inverse = _if_larger(reach_sq(m, difference), 2 * TINY, inverse, 0.0)
    return inverse


@triton.jit
def _reach(m, difference, SLOPES: tl.constexpr):
    """max(D, |q - k|), where q and k are levels: twice the level of the lca is q + k + it.

    For max(q, k) = (q + k + |q - k|) / 2. Slopes need its inverse, from which it is made then.
    """
    if SLOPES:
        return reach_sq(m, difference) * _inverse_reach(UMBRAL, m, difference)
    else:
        if INTERPRETED:
            m = tl.maximum(m, 0.0)
        return tl.maximum(tl.abs(difference), tl.sqrt(m))


@triton.jit
def _through_reach(OF_QUERY: tl.constexpr, inward, for_both, m, difference):
    """Slopes for m/2 and one level, from those for half the square of the reach (inward) and for the sum of levels.

    The reach is D between points of which neither is an ancestor of the other, and otherwise the difference of levels:
    so an ancestor's level counts twice, and the other not at all. Equal points share it, and the slope of D is 0 there.
    """
    of_levels = difference * difference + TINY
    turn = difference * inward
    for_ancestor = for_both + turn if OF_QUERY else for_both - turn
    return _if_larger(m, of_levels, inward, 0.0), _if_larger(m, of_levels, for_both, for_ancestor)


@triton.jit
def _lca_slopes(ahead, distance):
    """Whether the level of the lca grows with D, by 1/2, and how it grows with one that is `ahead` of the other.

    If neither point is an ancestor of the other, by 1/2; otherwise the ancestor's level counts 1 and the rest 0, and
    two equal points share it. Of two such D is not counted: the slope of a root is 0 there.
    """
    of_ancestor = (ahead > 0).to(tl.float32)
    return distance > tl.abs(ahead), tl.where(distance >= tl.abs(ahead), 0.5, of_ancestor)


@triton.jit
def _penumbral(SCORE: tl.constexpr, m, difference, both, lean, four_sq, h):
    """Four times the squared height of the lca or, where the pair has none, of the lowest light that would give one.

    With t twice the level of the lca it is t (4h - t). Beyond t = 2h it is (D - A/D)^2 + 4 y^2, where y and z are the
    heights of the two points in any order, A = y^2 - z^2, lean is D^2 - A, and four_sq is 4 y^2. Neither form cancels
    where it is used. D is the reach in both, so that they agree for the descendants of a point at the light, where
    rounding decides between them. Also returns t and 1 + A/D^2, of which slopes are made.
    """
    inverse = _inverse_reach(SCORE, m, difference)
    twice = tl.fma(reach_sq(m, difference), inverse, both)
    chord = lean * inverse
    rest = 4 * h - twice
    return _if_larger(twice, rest, chord * chord + four_sq, twice * rest), twice, 2 - chord * inverse


@triton.jit
def _penumbral_slopes(
    SCORE: tl.constexpr, SUMS: tl.constexpr, OF_QUERY: tl.constexpr, g, m, difference, both, lean, four_sq,
    level, other_level, h, gamma, inverse_h_sq, factor,
):  # fmt: skip
    four_sq, twice, tilt = _penumbral(SCORE, m, difference, both, lean, four_sq, h)
    if not SUMS and not OF_QUERY:  # y is that of the query
        tilt = 2 - tilt
    if SCORE == PENUMBRAL:
        g_sq = g * (tl.rsqrt(four_sq) * -factor)
        for_gamma = g * tl.sqrt(four_sq) * -0.5
        more = g * 0
    elif SCORE == PENUMBRAL + 1:
        g_sq = g * -gamma
        for_gamma = g * four_sq * -0.25
        more = g * 0
    else:
        inverse_root = tl.rsqrt(four_sq)
        g_sq = g * (inverse_root * inverse_root) * (gamma * -2)
        g_sq = _if_larger(four_sq, 4 * HEIGHT_SQ_FLOOR, g_sq, 0.0)
        for_gamma = g * tl.log(tl.maximum(four_sq * 0.25, HEIGHT_SQ_FLOOR) * inverse_h_sq) * -0.5
        more = g * (gamma / h)
    # Slopes of the squared height: below the light those of t (4h - t) / 4; beyond it, with y^2 = level (2h - level),
    # those of D^2/4 + (y^2 + z^2)/2 + A^2/(4 D^2).
    rest = 4 * h - twice
    rise = _if_larger(twice, rest, tilt, h - twice * 0.5)
    g_rise = g_sq * rise
    inward = g_rise * _if_larger(twice, rest, 1 - rise * 0.5, _inverse_reach(SCORE, m, difference))
    for_both = _if_larger(twice, rest, g_rise * (h - level), g_rise)
    growth = _if_larger(twice, rest, tilt * level + (2 - tilt) * other_level, twice)
    for_h = g_sq * unit(SCORE, False, h, gamma) * growth
    for_m, for_level = _through_reach(OF_QUERY, inward, for_both, m, difference)
    return for_m, for_level, for_h + more, for_gamma


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """The GPU's own instruction, where FAST: off by 2^-22, of 1 or of the result."""
    if FAST and PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def _inverse_root(x):
    """1/sqrt(x), and 0 at x = 0, where the slope of a root is 0, and where x is so small that the GPU may read 0."""
    return tl.where(x > 1.2e-38, tl.rsqrt(x), 0.0)


@triton.jit
def _angle(m):
    """Between two directions, from the square of their chord: 2 asin(chord / 2)."""
    x = tl.minimum(tl.sqrt(m) * 0.5, 1.0)
    steep = x > 0.5
    z = tl.where(steep, (1 - x) * 0.5, x * x)
    root = tl.where(steep, tl.sqrt(z), x)
    # asin(x) = x + x^3 (1/6 + ...), of least error up to 1/2; beyond, asin(x) = pi/2 - 2 asin(sqrt((1 - x)/2))
    p = 4.2163199048e-2
    p = p * z + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    half = root * z * p + root
    return tl.where(steep, 3.14159265358979 - 4 * half, 2 * half)


@triton.jit
def sinh(t):
    """By its series below 1, where the exponentials would cancel."""
    sq = t * t
    p = 1 + sq * (1 / 72)
    p = 1 + sq * p * (1 / 42)
    p = 1 + sq * p * (1 / 20)
    near = t * (1 + sq * p * (1 / 6))
    e = tl.exp(tl.minimum(tl.abs(t), 80.0))
    far = (e - 1 / e) * 0.5
    return tl.where(sq < 1, near, tl.where(t < 0, -far, far))


@triton.jit
def asinh(x):
    """log(1 + z) of z = x + x^2 / (1 + sqrt(1 + x^2)), for x >= 0; a small z by the series of log(1 + z)."""
    root = tl.where(x < 1e8, tl.sqrt(x * x + 1), x)
    z = x + x * (x / (1 + root))
    s = z / (2 + z)  # log(1 + z) = 2 atanh(s)
    sq = s * s
    p = 1 / 11 + sq * (1 / 13)
    p = 1 / 9 + sq * p
    p = 1 / 7 + sq * p
    p = 1 / 5 + sq * p
    p = 1 / 3 + sq * p
    return tl.where(z < 1, 2 * s * (1 + sq * p), tl.log(1 + z))
