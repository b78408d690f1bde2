"""Every score of the project for one pair of feature vectors, in arbitrary precision.

The formulas are deliberately the naive ones (`h - sqrt(h^2 - y^2)`, `arccos` of a dot product, `arcosh`):
they lose digits, but of 120 there are enough left, and nobody has to trust a clever rearrangement.
"""

from collections.abc import Callable, Sequence

from mpmath import mp, mpf

# cosh(40)^2 is 1e35 and features that differ by 1e-9 square to 1e-18: fewer than 60 digits can cancel.
DIGITS = 120
PSI_LIMIT = 20  # psi clamps its last feature to [-20, 20]
EXP_LIMIT = 20  # Exp_O pulls longer vectors back to length 20
RADIUS_LIMIT = 40  # pseudopolar clamps its radius to [-40, 40]

Vector = list[mpf]


def score(name: str, q: Sequence[float], k: Sequence[float], **params) -> mpf:
    """Score of one query and one key, both feature vectors of size E, under the score called `name`."""
    # A height exp(f_d) meets 1 squared, and so hides below 2 |f_d| / ln(10) further digits.
    with mp.workdps(DIGITS + int(max(abs(q[-1]), abs(k[-1])))):
        return SCORES[name]([mpf(value) for value in q], [mpf(value) for value in k], **params)


# ---- vectors ----


def norm(vector: Vector) -> mpf:
    return mp.sqrt(mp.fsum(value**2 for value in vector))


def dot_product(u: Vector, v: Vector) -> mpf:
    return mp.fsum(a * b for a, b in zip(u, v, strict=True))


def distance_between(u: Vector, v: Vector) -> mpf:
    return norm([a - b for a, b in zip(u, v, strict=True)])


def angle_between(u: Vector, v: Vector) -> mpf:
    """arccos(u.v / (|u| |v|)); the clamp only removes the last digit's rounding."""
    cosine = dot_product(u, v) / (norm(u) * norm(v))
    return mp.acos(max(mpf(-1), min(mpf(1), cosine)))


# ---- lifts: feature vector -> (position, height) ----


def sigmoid(value: mpf) -> mpf:
    return 1 / (1 + mp.exp(-value))


def softplus(value: mpf) -> mpf:
    return mp.log(1 + mp.exp(value))


def _clamp(value: mpf, limit: int) -> mpf:
    return max(mpf(-limit), min(mpf(limit), value))


def lift_psi(f: Vector) -> tuple[Vector, mpf]:
    """y = exp(f_d), x = f[:-1] y."""
    y = mp.exp(_clamp(f[-1], PSI_LIMIT))
    return [value * y for value in f[:-1]], y


def lift_xi(f: Vector, light_height: mpf) -> tuple[Vector, mpf]:
    """y = h sigmoid(f_d), x = f[:-1] y."""
    y = light_height * sigmoid(f[-1])
    return [value * y for value in f[:-1]], y


def lift_exp(f: Vector) -> tuple[Vector, mpf]:
    """Exp_O(f), O = (0, ..., 0, 1): x = f[:-1] / (n / tanh n - f_d), y = 1 / (cosh n - f_d sinh(n) / n)."""
    n = norm(f)
    if n == 0:
        return [mpf(0)] * (len(f) - 1), mpf(1)
    if n > EXP_LIMIT:
        f, n = [value * EXP_LIMIT / n for value in f], mpf(EXP_LIMIT)
    x = [value / (n / mp.tanh(n) - f[-1]) for value in f[:-1]]
    return x, 1 / (mp.cosh(n) - f[-1] * mp.sinh(n) / n)


def _half_space_point(f: Vector, lift: str, height_scale: float, light_height: mpf | None) -> tuple[Vector, mpf]:
    f = [*f[:-1], f[-1] * mpf(height_scale)]
    if lift == "xi":
        assert light_height is not None, "xi needs a light"
        return lift_xi(f, light_height)
    x, y = {"psi": lift_psi, "exp": lift_exp}[lift](f)
    # The other lifts do not know the light, so a point above it is lowered onto it; its position stays.
    return x, y if light_height is None else min(y, light_height)


# ---- the law of MATH section 2, one function per cone ----


def level_of_lca(level_u: mpf, level_v: mpf, distance: mpf) -> mpf:
    """max(level_u, level_v, (level_u + level_v + D) / 2)."""
    return max(level_u, level_v, (level_u + level_v + distance) / 2)


def penumbral_level(y: mpf, light_height: mpf) -> mpf:
    return light_height - mp.sqrt(light_height**2 - y**2)


def penumbral_lca_level(distance: mpf, y_u: mpf, y_v: mpf, light_height: mpf) -> mpf:
    return level_of_lca(penumbral_level(y_u, light_height), penumbral_level(y_v, light_height), distance)


def lowest_light_height(distance: mpf, y_u: mpf, y_v: mpf) -> mpf:
    """Radius of the semicircle through both points.

    sqrt(D^2 / 4 + (y_u^2 + y_v^2) / 2 + (y_u^2 - y_v^2)^2 / (4 D^2))
    """
    return mp.sqrt(distance**2 / 4 + (y_u**2 + y_v**2) / 2 + (y_u**2 - y_v**2) ** 2 / (4 * distance**2))


def penumbral_lca_height(distance: mpf, y_u: mpf, y_v: mpf, light_height: mpf) -> mpf:
    """Height of the lowest common ancestor, or of the lowest light under which there is one."""
    level = penumbral_lca_level(distance, y_u, y_v, light_height)
    if level <= light_height:
        return mp.sqrt(light_height**2 - (light_height - level) ** 2)
    return lowest_light_height(distance, y_u, y_v)


def umbral_lca_height(distance: mpf, y_u: mpf, y_v: mpf, radius: mpf) -> mpf:
    return level_of_lca(y_u * mp.sinh(radius), y_v * mp.sinh(radius), distance) / mp.sinh(radius)


def penumbral_finite_level(rho: mpf, light_radius: mpf) -> mpf:
    # rho >= R always; where tanh rounds both to 1 the ratio must not exceed it.
    return -mp.acos(min(mpf(1), mp.tanh(light_radius) / mp.tanh(rho)))


def umbral_finite_level(rho: mpf, radius: mpf) -> mpf:
    return mp.asin(min(mpf(1), mp.sinh(radius) / mp.sinh(rho)))


# ---- scores ----


def _read_out(height: mpf, gamma: float, readout: str, height_of_source: mpf) -> mpf:
    gamma = mpf(gamma)
    if readout == "height":
        return -gamma * height
    if readout == "height_sq":
        return -gamma * height**2
    if readout == "distance":
        return gamma * mp.log(height_of_source / height)
    raise ValueError(f"unknown readout {readout!r}")


def penumbral(q, k, light_height=1.0, gamma=1.0, lift="xi", readout="height", height_scale=1.0) -> mpf:
    h = mpf(light_height)
    x_q, y_q = _half_space_point(q, lift, height_scale, h)
    x_k, y_k = _half_space_point(k, lift, height_scale, h)
    height = penumbral_lca_height(distance_between(x_q, x_k), y_q, y_k, h)
    return _read_out(height, gamma, readout, height_of_source=h)


def umbral(q, k, radius=0.1, gamma=1.0, lift="psi", readout="height", height_scale=1.0) -> mpf:
    x_q, y_q = _half_space_point(q, lift, height_scale, None)
    x_k, y_k = _half_space_point(k, lift, height_scale, None)
    height = umbral_lca_height(distance_between(x_q, x_k), y_q, y_k, mpf(radius))
    # The source is at infinity, so distances to it are counted from height 1.
    return _read_out(height, gamma, readout, height_of_source=mpf(1))


def penumbral_finite(q, k, light_radius=0.2, gamma=1.0) -> mpf:
    big_r = mpf(light_radius)
    levels = [penumbral_finite_level(big_r + softplus(f[-1]), big_r) for f in (q, k)]
    return -mpf(gamma) * level_of_lca(*levels, angle_between(q[:-1], k[:-1]))


def umbral_finite(q, k, radius=0.1, gamma=1.0) -> mpf:
    r = mpf(radius)
    levels = [umbral_finite_level(r + softplus(f[-1]), r) for f in (q, k)]
    return -mpf(gamma) * level_of_lca(*levels, angle_between(q[:-1], k[:-1]))


def half_space(q, k, beta=1.0, offset=0.0, lift="psi") -> mpf:
    """-beta arcosh(1 + (D^2 + (y_q - y_k)^2) / (2 y_q y_k)) - c."""
    x_q, y_q = _half_space_point(q, lift, 1.0, None)
    x_k, y_k = _half_space_point(k, lift, 1.0, None)
    squared = distance_between(x_q, x_k) ** 2 + (y_q - y_k) ** 2
    return -mpf(beta) * mp.acosh(1 + squared / (2 * y_q * y_k)) - mpf(offset)


def hyperboloid(q, k, beta=1.0, offset=0.0) -> mpf:
    """-beta arcosh(cosh a cosh b - sinh a sinh b cos(angle)) - c, a and b the clamped last features."""
    a, b = (_clamp(f[-1], RADIUS_LIMIT) for f in (q, k))
    cosine = mp.cos(angle_between(q[:-1], k[:-1]))
    cosh_distance = mp.cosh(a) * mp.cosh(b) - mp.sinh(a) * mp.sinh(b) * cosine
    return -mpf(beta) * mp.acosh(max(mpf(1), cosh_distance)) - mpf(offset)


def laplacian(q, k, gamma=1.0) -> mpf:
    return -mpf(gamma) * distance_between(q, k)


def dot(q, k, scale=None) -> mpf:
    return dot_product(q, k) * (1 / mp.sqrt(len(q)) if scale is None else mpf(scale))


SCORES: dict[str, Callable[..., mpf]] = {
    "penumbral": penumbral,
    "umbral": umbral,
    "penumbral_finite": penumbral_finite,
    "umbral_finite": umbral_finite,
    "half_space": half_space,
    "hyperboloid": hyperboloid,
    "laplacian": laplacian,
    "dot": dot,
}
