"""Scores in Triton: what a pair of points is worth, and the derivatives of that. The mathematics is in docs/math.md.

A score is two functions, chosen by the number SCORE when a kernel is compiled: ``value`` of tiles of pairs, and
``slopes``, a gradient times the derivatives of the score. Both see m, the measure of a pair (its squared distance or
product), level and aux of both points, and the constants of the head:

    score          a           b        c          factor                        aux
    dot            scale                           scale log2 e
    laplacian      gamma                           gamma log2 e
    penumbral      h           gamma    1/h^2      gamma log2 e / 2
      height_sq                                    gamma log2 e / 4
      distance                                     gamma / 2
    umbral         1/sinh r    gamma    1/tanh r   gamma log2 e / (2 sinh r)
      height_sq                                    gamma log2 e / (4 sinh^2 r)
      distance                                     gamma
    finite cones   gamma                           gamma log2 e / 2
    half_space     beta        offset              2 beta log2 e                 1/sqrt(height)
    hyperboloid    beta        offset              2 beta log2 e                 sinh(radius)

``value`` is in base 2, for ``exp2``, and leaves out what all keys add to a query alike: the offsets, and for the umbral
cone -gamma level / sinh r. The log-sum-exp gets it afterwards. A factor is made in float64, since what it is off by
counts as often as it is multiplied by a large score. What is not in the GPU's instructions is computed from what is:
the functions at the end keep the digits of small arguments, which a difference of fast exponentials or a fast logarithm
would lose.
"""

import triton
import triton.language as tl

DOT = tl.constexpr(0)
LAPLACIAN = tl.constexpr(1)
PENUMBRAL = tl.constexpr(2)  # reads the height; + 1: its square, + 2: the distance
UMBRAL = tl.constexpr(5)  # likewise
FINITE_CONE = tl.constexpr(8)
HALF_SPACE = tl.constexpr(9)
HYPERBOLOID = tl.constexpr(10)

HEIGHT_SQ_FLOOR = tl.constexpr(1.8048513878454153e-35)  # e^-80: "distance" reads lower squared heights as this
DIVISOR = tl.constexpr(1e-30)  # divisors stay above it; it only ever meets a factor 0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def value(SCORE: tl.constexpr, m, q_level, k_level, q_aux, k_aux, a, c, factor):
    """The scores of a tile of pairs, in base 2."""
    if SCORE == DOT:
        return m * factor
    elif SCORE == LAPLACIAN:
        return tl.sqrt(m) * -factor
    elif SCORE < UMBRAL:
        four_height_sq = _penumbral_height_sq(m, q_level, k_level, a)
        if SCORE == PENUMBRAL:
            return tl.sqrt(four_height_sq) * -factor
        elif SCORE == PENUMBRAL + 1:
            return four_height_sq * -factor
        else:
            return tl.log2(tl.maximum(four_height_sq * 0.25, HEIGHT_SQ_FLOOR) * c) * -factor
    elif SCORE == UMBRAL:
        difference = q_level - k_level
        return (tl.maximum(tl.abs(difference), tl.sqrt(m)) - difference) * -factor
    elif SCORE < FINITE_CONE:
        twice = _twice_lca_level(q_level, k_level, tl.sqrt(m))
        if SCORE == UMBRAL + 1:
            return twice * (twice * -factor)
        else:
            return tl.log2(twice * (a * 0.5)) * -factor
    elif SCORE == FINITE_CONE:
        return _twice_lca_level(q_level, k_level, _angle(m)) * -factor
    elif SCORE == HALF_SPACE:
        rise = q_level - k_level
        return asinh(tl.sqrt(rise * rise + m) * (q_aux * k_aux * 0.5)) * -factor
    else:
        radial = sinh((q_level - k_level) * 0.5)
        return asinh(tl.sqrt(radial * radial + q_aux * k_aux * (m * 0.25))) * -factor


@triton.jit
def slopes(SCORE: tl.constexpr, g, m, q_level, k_level, q_aux, k_aux, a, b, c):
    """g times the derivatives of the score for m, both levels, and its two parameters, in the order of `pair_fields`.

    Those parameters are not always a and b: of the umbral cone they are radius and gamma.
    """
    if SCORE == DOT:
        return g * a, g, g, g * m, g
    elif SCORE == LAPLACIAN:
        return g * _inverse_root(m) * (a * -0.5), g, g, -(g * tl.sqrt(m)), g
    elif SCORE < UMBRAL:
        return _penumbral_slopes(SCORE, g, m, q_level, k_level, a, b, c)
    elif SCORE < FINITE_CONE:
        d = tl.sqrt(m)
        height = _twice_lca_level(q_level, k_level, d) * (a * 0.5)
        apart, q_share = _lca_slopes(q_level, k_level, d)
        if SCORE == UMBRAL:
            g_level = g * (a * -b)
            for_gamma = -(g * height)
        elif SCORE == UMBRAL + 1:
            g_level = g * height * (a * b * -2)
            for_gamma = -(g * height * height)
        else:
            g_level = g / height * (a * -b)
            for_gamma = -(g * tl.log(height))
        for_q = g_level * q_share
        for_m = tl.where(apart, g_level * tl.rsqrt(m), 0.0) * 0.25
        return for_m, for_q, g_level - for_q, g_level * height * (-c / a), for_gamma
    elif SCORE == FINITE_CONE:
        angle = _angle(m)
        apart, q_share = _lca_slopes(q_level, k_level, angle)
        g_level = g * -a
        for_q = g_level * q_share
        for_m = tl.where(apart, g_level * _inverse_root(m * tl.maximum(4.0 - m, 0.0)), 0.0) * 0.5
        return for_m, for_q, g_level - for_q, g * _twice_lca_level(q_level, k_level, angle) * -0.5, g
    elif SCORE == HALF_SPACE:
        rise = q_level - k_level
        chord_sq = rise * rise + m
        inverse = _inverse_root(chord_sq)
        outer = tl.rsqrt(chord_sq + q_level * k_level * 4)
        for_m = g * inverse * outer * -a
        stretch = g * (chord_sq * inverse) * outer * a
        turn = rise * for_m * 2
        d = asinh(tl.sqrt(chord_sq) * (q_aux * k_aux * 0.5))
        return for_m, turn + stretch * (q_aux * q_aux), stretch * (k_aux * k_aux) - turn, g * d * -2, -g
    else:
        radial = sinh((q_level - k_level) * 0.5)
        sq = radial * radial + q_aux * k_aux * (m * 0.25)
        g_sq = g * _inverse_root(sq) * tl.rsqrt(sq + 1) * -a
        turn = radial * tl.sqrt(radial * radial + 1)
        for_q = g_sq * (turn + tl.sqrt(q_aux * q_aux + 1) * k_aux * (m * 0.25))
        for_k = g_sq * (tl.sqrt(k_aux * k_aux + 1) * q_aux * (m * 0.25) - turn)
        return g_sq * (q_aux * k_aux) * 0.25, for_q, for_k, g * asinh(tl.sqrt(sq)) * -2, -g


@triton.jit
def _twice_lca_level(q_level, k_level, distance):
    """Twice max(q, k, (q + k + D) / 2), since max(q, k) = (q + k + |q - k|) / 2."""
    return (q_level + k_level) + tl.maximum(tl.abs(q_level - k_level), distance)


@triton.jit
def _lca_slopes(q_level, k_level, distance):
    """Whether the level of the lca grows with D, by 1/2, and how it grows with q's; with k's it is 1 - the latter.

    If neither point is an ancestor of the other, 1/2 each; otherwise the ancestor's level counts 1 and the rest 0, and
    two equal points share it. Of two such D is not counted: the slope of a root is 0 there.
    """
    difference = q_level - k_level
    of_ancestor = (difference > 0).to(tl.float32)
    q_share = tl.where(distance >= tl.abs(difference), 0.5, of_ancestor)
    return distance > tl.abs(difference), q_share


@triton.jit
def _penumbral_height_sq(m, q_level, k_level, h):
    """Four times that of the lca, or, where the pair has none, of the lowest light under which it would have one.

    With L the level of the lca, s = 2h - q - k and e = max(L - h, 0), which is 0 where there is an lca, it is
    L' (2h - L') + e (e + s) (1 - (q - k)^2 / D^2), L' = min(L, h): neither a branch nor a cancellation.
    """
    inverse = tl.rsqrt(tl.maximum(m, DIVISOR))
    difference = q_level - k_level
    both = q_level + k_level
    twice = both + tl.maximum(tl.abs(difference), m * inverse)
    below = tl.minimum(twice, 2 * h)
    excess = twice - below
    slant = difference * inverse
    return below * (4 * h - below) + excess * (excess + (4 * h - 2 * both)) * (1 - slant * slant)


@triton.jit
def _penumbral_slopes(SCORE: tl.constexpr, g, m, q_level, k_level, h, gamma, inverse_h_sq):
    # First the squared height and its slopes for m, both levels and h, in the two cases.
    inverse = tl.rsqrt(tl.maximum(m, DIVISOR))
    distance = m * inverse
    both = q_level + k_level
    difference = q_level - k_level
    twice = both + tl.maximum(tl.abs(difference), distance)
    beyond = twice > 2 * h
    apart, q_share = _lca_slopes(q_level, k_level, distance)
    rise = 2 * h - twice
    # Beyond: height^2 = D^2/4 + (y_q^2 + y_k^2)/2 + (y_q^2 - y_k^2)^2 / (4 D^2), and y^2 = level (2h - level).
    ratio = difference * (2 * h - both) * (inverse * inverse)
    for_m = tl.where(beyond, 1 - ratio * ratio, tl.where(apart, rise * inverse, 0.0)) * 0.25
    for_q = tl.where(beyond, (1 + ratio) * (h - q_level), rise * q_share)
    for_k = tl.where(beyond, (1 - ratio) * (h - k_level), rise - rise * q_share)
    for_h = tl.where(beyond, (1 + ratio) * q_level + (1 - ratio) * k_level, twice)
    four_sq = _penumbral_height_sq(m, q_level, k_level, h)
    if SCORE == PENUMBRAL:
        g_sq = g * _inverse_root(four_sq) * -gamma
        for_gamma = g * tl.sqrt(four_sq) * -0.5
        more = g * 0
    elif SCORE == PENUMBRAL + 1:
        g_sq = g * -gamma
        for_gamma = g * four_sq * -0.25
        more = g * 0
    else:
        g_sq = tl.where(four_sq > 4 * HEIGHT_SQ_FLOOR, g / four_sq * (gamma * -2), 0.0)
        for_gamma = g * tl.log(tl.maximum(four_sq * 0.25, HEIGHT_SQ_FLOOR) * inverse_h_sq) * -0.5
        more = g * (gamma / h)
    return g_sq * for_m, g_sq * for_q, g_sq * for_k, g_sq * for_h + more, for_gamma


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
