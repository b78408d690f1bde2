"""Cone attention as one would write it in a few lines of ordinary PyTorch, computed in the dtype of its inputs.

It is the yardstick of contract 1: our error may be at most twice the error of this. It is dense, it knows nothing
of tiles, centring or float32 accumulation, and it uses none of the project's code.
"""

import math

import torch
from torch import Tensor


def scores(query: Tensor, key: Tensor, score) -> Tensor:
    """[..., H, L, E], [..., H, S, E] -> [..., H, L, S] for a score object, by direct differences."""
    return globals()[f"_{score.name}"](query, key, score)


def attention(query: Tensor, key: Tensor, value: Tensor, mask=None, is_causal=False, score=None) -> Tensor:
    """softmax(scores + mask) @ value; rows that are masked whole give 0."""
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    pairs = scores(query, key, score)
    if is_causal:
        mask = torch.ones(pairs.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        pairs = pairs.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else pairs + mask.to(pairs.dtype)
    masked_out = (pairs == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(pairs.masked_fill(masked_out, 0), -1).masked_fill(masked_out, 0)
    return weights @ value


def _distance(q: Tensor, k: Tensor) -> Tensor:
    d_sq = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    zero = d_sq == 0
    return d_sq.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _angle(q: Tensor, k: Tensor) -> Tensor:
    directions = [x[..., :-1] / x[..., :-1].norm(dim=-1, keepdim=True) for x in (q, k)]
    chord = _distance(*directions)
    opposite = chord >= 2
    return (2 * (chord / 2).masked_fill(opposite, 0).asin()).masked_fill(opposite, math.pi)


def _lca_level(level_q: Tensor, level_k: Tensor, distance: Tensor) -> Tensor:
    level_q, level_k = level_q[..., :, None], level_k[..., None, :]
    return torch.maximum(torch.maximum(level_q, level_k), (level_q + level_k + distance) / 2)


def _half_space(q: Tensor, k: Tensor, score) -> Tensor:
    (q_x, q_y), (k_x, k_y) = (_psi(f, 1.0) for f in (q, k))
    q_y, k_y = q_y[..., :, None], k_y[..., None, :]
    z = _distance(q_x, k_x).square() + (q_y - k_y).square()
    zero = z == 0
    chord = z.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    return -score.beta * 2 * (chord / (2 * (q_y * k_y).sqrt())).asinh() - score.offset


def _psi(f: Tensor, height_scale: float) -> tuple[Tensor, Tensor]:
    y = (f[..., -1] * height_scale).clamp(-20, 20).exp()
    return f[..., :-1] * y[..., None], y


def _penumbral(q: Tensor, k: Tensor, score) -> Tensor:
    h = score.light_height
    points = []
    for f in (q, k):
        s = (f[..., -1] * score.height_scale).sigmoid()
        y = h * s
        points.append((f[..., :-1] * y[..., None], y, y * y / (h + h * ((1 - s) * (1 + s)).sqrt())))
    (q_x, q_y, q_level), (k_x, k_y, k_level) = points
    distance = _distance(q_x, k_x)
    level = _lca_level(q_level, k_level, distance)
    near = level <= h
    inside = (level * (2 * h - level)).where(near & (level > 0), 1).sqrt().where(level > 0, 0)
    d_sq = torch.where(near, 1, distance.square())
    q_sq, k_sq = q_y.square()[..., :, None], k_y.square()[..., None, :]
    outside = (d_sq / 4 + (q_sq + k_sq) / 2 + (q_sq - k_sq).square() / (4 * d_sq)).sqrt()
    height = torch.where(near, inside, outside)
    readouts = {"height": height, "height_sq": height.square(), "distance": (height / h).log()}
    return -score.gamma * readouts[score.readout]


def _umbral(q: Tensor, k: Tensor, score) -> Tensor:
    sinh_r = math.sinh(score.radius)
    (q_x, q_y), (k_x, k_y) = (_psi(f, score.height_scale) for f in (q, k))
    height = _lca_level(q_y * sinh_r, k_y * sinh_r, _distance(q_x, k_x)) / sinh_r
    readouts = {"height": height, "height_sq": height.square(), "distance": height.log()}
    return -score.gamma * readouts[score.readout]


def _penumbral_finite(q: Tensor, k: Tensor, score) -> Tensor:
    radius = score.light_radius
    levels = [-(math.tanh(radius) / (radius + _softplus(f)).tanh()).clamp(max=1).acos() for f in (q, k)]
    return -score.gamma * _lca_level(*levels, _angle(q, k))


def _umbral_finite(q: Tensor, k: Tensor, score) -> Tensor:
    levels = [(math.sinh(score.radius) / (score.radius + _softplus(f)).sinh()).asin() for f in (q, k)]
    return -score.gamma * _lca_level(*levels, _angle(q, k))


def _softplus(f: Tensor) -> Tensor:
    return torch.nn.functional.softplus(f[..., -1])


def _hyperboloid(q: Tensor, k: Tensor, score) -> Tensor:
    a, b = q[..., -1][..., :, None], k[..., -1][..., None, :]
    directions = [x[..., :-1] / x[..., :-1].norm(dim=-1, keepdim=True) for x in (q, k)]
    half_sq = ((a - b) / 2).sinh().square() + a.sinh() * b.sinh() * _distance(*directions).square() / 4
    zero = half_sq <= 0
    half = half_sq.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    return -score.beta * 2 * half.asinh() - score.offset


def _laplacian(q: Tensor, k: Tensor, score) -> Tensor:
    return -score.gamma * _distance(q, k)


def _dot(q: Tensor, k: Tensor, score) -> Tensor:
    return q @ k.mT * (q.shape[-1] ** -0.5 if score.scale is None else score.scale)
