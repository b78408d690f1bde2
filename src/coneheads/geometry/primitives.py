"""Safe building blocks: finite values and gradients where the plain formula has none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scalar = float | Tensor
"""A parameter such as a light height: a number, or a tensor that broadcasts."""

DIRECTION_FLOOR = 1e-12
"""`unit` divides by at least this, so that its gradient stays finite as the vector goes to 0."""

# Below this squared argument the quotient sinh(n)/n loses digits in its derivative; the series does not.
_SERIES_LIMIT_SQ = 0.01

# The same for asinh(a)/a.
_SERIES_LIMIT_ASINH = 0.01

# From here asinh(x) = log(2x) to the last bit of float64.
_LARGE_ASINH = 1e8


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root with value 0 and gradient 0 at x <= 0.

    The plain root has an infinite slope at 0, and 0 * inf = NaN in the chain rule of a norm.

    Args:
        x: any shape.

    Example:
        >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
        >>> safe_sqrt(x).sum().backward()
        >>> x.grad
        tensor([0.0000, 0.2500])
    """
    if not torch.is_grad_enabled():
        return x.clamp_min(0).sqrt()
    # "x <= 0" and not "x > 0" chooses the constant, so that NaN goes through the root and stays visible.
    at_zero = x <= 0
    root = torch.where(at_zero, 1, x).sqrt()
    return torch.where(at_zero, 0, root)


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, the same number for the same x wherever it lies in a tensor.

    On a CPU, `torch.sigmoid` rounds the last elements of a tensor in another way than the others. Equal points must
    have equal levels: if one is an ancestor of the other by a rounding, the gradient of their lca goes to one alone.

    Example:
        >>> sigmoid(torch.tensor([-1e4, 0.0, 1e4]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    below, above = x.clamp_max(0).exp(), (-x.clamp_min(0)).exp()
    return torch.where(x >= 0, 1 / (1 + above), below / (1 + below))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`, likewise.

    Example:
        >>> softplus(torch.tensor([-1e4, 0.0, 1e4]))
        tensor([0.0000e+00, 6.9315e-01, 1.0000e+04])
    """
    below, above = x.clamp_max(0).exp(), (-x.clamp_min(0)).exp()
    return torch.where(x >= 0, x + above.log1p(), below.log1p())


def safe_norm(x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """Euclidean norm along `dim`, with gradient 0 at the zero vector.

    Args:
        x: any shape; entries up to about 1e18 in float32, whose squares are representable.

    Example:
        >>> safe_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])
    """
    return safe_sqrt((x * x).sum(dim, keepdim))


def unit(x: Tensor) -> Tensor:
    """Direction of a vector, `x / max(|x|, DIRECTION_FLOOR)` along the last dimension; 0 for x = 0.

    Args:
        x: [..., d].

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    # Scaled to norm 1 by a constant first: the backward pass then divides by a small |x| once, not twice,
    # which would overflow float32. The direction does not depend on the constant, nor do its derivatives.
    norm = safe_norm(x.detach(), keepdim=True)
    x = x / norm.clamp_min(DIRECTION_FLOOR)
    return x / torch.where(norm > DIRECTION_FLOOR, safe_norm(x, keepdim=True), 1)


def safe_asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine whose gradient survives large arguments.

    `torch.asinh` is right in value, but its derivative 1/sqrt(x^2 + 1) becomes 0 once x^2 overflows (1.8e19
    in float32), which would cut off the gradient of a distance. Beyond 1e8 this is `sign(x) log(2 |x|)`.

    Args:
        x: any shape.

    Example:
        >>> x = torch.tensor([0.0, 1e20], requires_grad=True)
        >>> safe_asinh(x).sum().backward()
        >>> x.grad
        tensor([1.0000e+00, 1.0000e-20])
    """
    large = x.abs() > _LARGE_ASINH
    small_value = torch.asinh(torch.where(large, 0, x))
    large_value = torch.where(large, x.abs(), 1).log() + math.log(2.0)
    return torch.where(large, x.sign() * large_value, small_value)


def angle_from_chord_sq(c_sq: Tensor) -> Tensor:
    """Angle between two unit vectors from the square of their distance, `2 asin(sqrt(c_sq) / 2)`.

    Never arccos of a dot product, which loses half the digits. `c_sq` is clamped to [0, 4]; the gradient is 0
    at both ends. It is computed as `2 atan2(sqrt(c_sq), sqrt(4 - c_sq))`: the slope of asin overflows one
    step before 1.

    Args:
        c_sq: any shape, squared distance of unit vectors.

    Example:
        >>> angle_from_chord_sq(torch.tensor([0.0, 2.0, 4.0]))
        tensor([0.0000, 1.5708, 3.1416])
    """
    c_sq = c_sq.clamp(0, 4)
    return 2 * torch.atan2(safe_sqrt(c_sq), safe_sqrt(4 - c_sq))


def sinhc(n_sq: Tensor) -> Tensor:
    """`sinh(n) / n` as a smooth function of n^2, 1 at n = 0.

    Args:
        n_sq: any shape, >= 0; n up to about 80 in float32, where sinh overflows.

    Example:
        >>> sinhc(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 1.1752])
    """
    near = n_sq < _SERIES_LIMIT_SQ
    q = torch.where(near, n_sq, 0)
    series = 1 + q / 6 * (1 + q / 20 * (1 + q / 42 * (1 + q / 72)))
    n = torch.where(near, 1, n_sq).sqrt()
    growth = torch.expm1(n)  # not torch.sinh, for the reason of `sigmoid`
    return torch.where(near, series, (growth + growth / (growth + 1)) / (2 * n))


def asinhc(a: Tensor) -> Tensor:
    """`asinh(a) / a`, 1 at a = 0.

    Args:
        a: any shape, >= 0.

    Example:
        >>> asinhc(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.8814])
    """
    near = a < _SERIES_LIMIT_ASINH
    q = torch.where(near, a, 0).square()
    series = 1 - q / 6 * (1 - q * 9 / 20 * (1 - q * 25 / 42 * (1 - q * 49 / 72)))
    a = torch.where(near, 1, a)
    return torch.where(near, series, safe_asinh(a) / a)


def ball_gap(x: Tensor) -> Tensor:
    """`1 - |x|^2` of points of a ball model, at least the machine epsilon: rounding may reach the sphere.

    Args:
        x: [..., d], |x| < 1.

    Example:
        >>> ball_gap(torch.tensor([[0.0, 0.5], [0.6, 0.8]]))
        tensor([7.5000e-01, 1.1921e-07])
    """
    return (1 - x.square().sum(-1)).clamp_min(torch.finfo(x.dtype).eps)


def sinh(value: Scalar) -> Scalar:
    """Hyperbolic sine of a parameter that is a number or a tensor.

    Example:
        >>> round(sinh(1.0), 4)
        1.1752
    """
    return torch.sinh(value) if isinstance(value, Tensor) else math.sinh(value)


def positive_asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine of x >= 0, `log1p(x + x^2 / (1 + sqrt(1 + x^2)))`.

    Several times faster than `torch.asinh`. The argument saturates at 1e18, whose square fits float32: for
    pair scores, which need no more.

    Args:
        x: any shape, >= 0.

    Example:
        >>> positive_asinh(torch.tensor([0.0, 1.0, 1e-6]))
        tensor([0.0000e+00, 8.8137e-01, 1.0000e-06])
    """
    x = x.clamp_max(1e18)
    x_sq = x * x
    return torch.log1p(x + x_sq / (1 + (1 + x_sq).sqrt()))
