"""Random points and features for the geometry tests."""

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale


def uniform(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator(seed), dtype=torch.float64)


def half_space_points(count: int, d: int = 3, seed: int = 0) -> Tensor:
    """[count, d], heights between about 1/10 and 10."""
    return torch.cat([normal(count, d - 1, seed=seed), normal(count, 1, seed=seed + 1000).exp()], dim=-1)


def hyperboloid_points(rho: Tensor, d: int = 3, seed: int = 0) -> Tensor:
    """[count, d+1] at the distances rho [count] from the origin, in random directions."""
    direction = torch.nn.functional.normalize(normal(len(rho), d, seed=seed), dim=-1)
    return torch.cat([direction * rho.sinh().unsqueeze(-1), rho.cosh().unsqueeze(-1)], dim=-1)


def rotation(d: int, seed: int = 0) -> Tensor:
    """Random orthogonal matrix [d, d]."""
    return torch.linalg.qr(normal(d, d, seed=seed))[0]


def lorentz_boost(d: int, rapidity: float, seed: int = 0) -> Tensor:
    """Isometry of the hyperboloid [d+1, d+1]: a boost along the first axis between two rotations."""
    boost = torch.eye(d + 1, dtype=torch.float64)
    c, s = torch.tensor(rapidity).double().cosh(), torch.tensor(rapidity).double().sinh()
    boost[0, 0] = boost[d, d] = c
    boost[0, d] = boost[d, 0] = s
    turns = []
    for k in (0, 1):
        turn = torch.eye(d + 1, dtype=torch.float64)
        turn[:d, :d] = rotation(d, seed=seed + k)
        turns.append(turn)
    return turns[0] @ boost @ turns[1]


def extreme_features(count: int = 50, size: int = 5, seed: int = 0) -> Tensor:
    """Float32 feature vectors [count, size] at unit scale, with the special directions among them."""
    f = torch.randn(count, size, generator=generator(seed))
    f[0] = 0
    f[1, :-1], f[1, -1] = 0, 1  # straight up
    f[2, :-1], f[2, -1] = 0, -1  # straight down
    f[3, -1] = 0  # horizontal
    f[4, 1:] = 0
    f[5, :-1], f[5, -1] = 1e-20, 1
    f[6, :-1], f[6, -1] = 1e-16, 1
    f[7, :-1], f[7, -1] = 1e-45, -1
    return f


def all_finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)
