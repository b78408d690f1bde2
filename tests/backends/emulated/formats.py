"""The types of PTX as NumPy has them, and what it lacks: bfloat16, and numbers without subnormal ones."""

from __future__ import annotations

from typing import Any

import numpy as np

TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{sign}{bits}": np.dtype(f"uint{bits}").type for sign in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "bf16": np.uint16,  # as its bits
    "f32": np.float32,
    "tf32": np.float32,
    "f64": np.float64,
}
SMALLEST = np.float32(2.0**-126)  # of normal numbers


def flushed(numbers: np.ndarray) -> np.ndarray:
    """With 0 in place of subnormal numbers, of the same sign."""
    return np.where(np.abs(numbers) < SMALLEST, np.copysign(np.float32(0), numbers), numbers)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest, to an even last one."""
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)
