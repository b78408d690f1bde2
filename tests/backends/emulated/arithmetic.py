"""What the instructions of PTX compute.

Functions that a GPU only approximates (roots, powers, quotients) are off by anything up to what NVIDIA's manual allows,
by a hash of the argument, unless float32 has the exact result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.emulated.formats import TYPES, flushed, from_bfloat16, to_bfloat16
from tests.backends.emulated.machine import Machine
from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction

INTEGERS = {np.int16: np.int32, np.int32: np.int64, np.uint16: np.uint32, np.uint32: np.uint64}


def approximate(function: Callable[..., np.ndarray], bits: float) -> Callable[..., np.ndarray]:
    """Off by up to 2^-bits of the result."""

    def approximated(*arguments: np.ndarray) -> np.ndarray:
        exact = np.asarray(function(*(x.astype(np.float64) for x in arguments)))
        mixed = np.bitwise_xor.reduce([np.asarray(x).view(np.uint32) for x in np.broadcast_arrays(*arguments)])
        hashed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2654435761)
        share = hashed.astype(np.float64) * 2.0**-31 - 1
        off = exact * (1 + share * 2.0**-bits)
        return np.where(exact.astype(np.float32) == exact, exact, off)

    return approximated


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind == "f":
        return approximate(np.divide, 22)(x, y)
    if (y == 0).any():
        raise Fault("a division by 0")
    quotient = np.abs(x.astype(object)) // np.abs(y.astype(object)) if x.dtype == np.int64 else None
    if quotient is None:
        wide = np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64))
        return (wide * np.sign(x.astype(np.int64)) * np.sign(y.astype(np.int64))).astype(x.dtype)
    return np.array(quotient, np.int64) * np.sign(x) * np.sign(y)


def _high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return ((x.astype(np.uint64) * y.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": _quotient,
    "ex2": approximate(np.exp2, 22),
    "lg2": approximate(np.log2, 22),
    "max": np.fmax,
    "min": np.fmin,
    "mul": np.multiply,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rcp": approximate(np.reciprocal, 23),
    "rsqrt": approximate(lambda x: 1 / np.sqrt(x), 22.4),
    "sqrt": approximate(np.sqrt, 23),
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


ROUNDED = {"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt}


def of_one_type(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """A function of numbers of one type: two halves or two float32 in a register are taken one by one."""
    name, *modifiers = instruction.parts
    kind = modifiers[-1]
    target, *operands = instruction.operands
    twice = kind.endswith("x2")
    if twice:
        kind = kind.removesuffix("x2")
    function = FUNCTIONS[name]
    if modifiers[-2:-1] == ["f32"] and kind in ("f16", "bf16"):  # a half and a float32, as in sm_100
        half = machine.get(operands[0], TYPES[kind])
        half = from_bfloat16(half) if kind == "bf16" else half.astype(np.float32)
        machine.set(target, function(half, machine.get(operands[1], np.float32)), who)
        return
    if name == "mul" and "hi" in modifiers:
        assert kind == "u32"
        function = _high
    if name in ("min", "max") and "NaN" in modifiers:
        function = {"min": np.minimum, "max": np.maximum}[name]
    if name in ROUNDED and "rn" in modifiers:
        function = ROUNDED[name]
    if len(operands) == 3:  # of three numbers, as in sm_100
        machine.set(instruction.operands[0], _of_three(machine, function, operands, kind), who)
        return
    machine.set(target, _apply(machine, function, operands, kind, twice, "ftz" in modifiers), who)


def _apply(
    machine: Machine, function: Callable[..., np.ndarray], operands: list[Any], kind: str, twice: bool, ftz: bool
) -> np.ndarray:
    dtype = TYPES[kind]
    if twice:
        wide = {"f32": np.uint64, "f16": np.uint32, "bf16": np.uint32}[kind]
        given = [np.broadcast_to(machine.get(o, wide), (machine.count,)) for o in operands]
        narrow = [np.ascontiguousarray(g).view(dtype).reshape(-1, 2) for g in given]
    else:
        narrow = [machine.get(o, dtype) for o in operands]
    if kind == "bf16":
        result = to_bfloat16(function(*(from_bfloat16(n) for n in narrow)))
    else:
        if ftz:
            narrow = [flushed(n) for n in narrow]
        result = np.asarray(function(*narrow)).astype(dtype)
        if ftz:
            result = flushed(result)
    return np.ascontiguousarray(result).view(wide).reshape(-1) if twice else result


def _of_three(machine: Machine, function: Any, operands: list[Any], kind: str) -> np.ndarray:
    x, y, z = (machine.get(operand, TYPES[kind]) for operand in operands)
    return function(function(x, y), z)


def fma(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """The product is not rounded: that of two float32 is exact in float64."""
    kind = instruction.parts[-1]
    target, *operands = instruction.operands

    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return a.astype(np.float64) * b + c

    values = _apply(machine, fused, operands, kind.removesuffix("x2"), kind.endswith("x2"), ".ftz" in instruction.name)
    machine.set(target, values, who)


def multiply(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    _, *modifiers = instruction.parts
    if modifiers[-1].startswith("f") or modifiers[-1].startswith("bf") or modifiers[0] == "hi":
        of_one_type(machine, instruction, who)
        return
    target, *operands = instruction.operands
    machine.set(target, _product(machine, operands, modifiers), who)


def _product(machine: Machine, operands: list[Any], modifiers: list[str]) -> np.ndarray:
    """Of integers: as wide as they are, or twice."""
    dtype = TYPES[modifiers[-1]]
    x, y = (machine.get(operand, dtype) for operand in operands[:2])
    if modifiers[0] == "wide":
        x, y = x.astype(INTEGERS[dtype]), y.astype(INTEGERS[dtype])
    return x * y


def multiply_add(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    _, *modifiers = instruction.parts
    target, *operands = instruction.operands
    product = _product(machine, operands, modifiers)
    machine.set(target, product + machine.get(operands[2], product.dtype.type), who)


def shift(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """By more than there are bits, all are shifted out."""
    name, kind = instruction.parts
    dtype = TYPES[kind]
    target, number, by = instruction.operands
    x, n = machine.get(number, dtype), machine.get(by, np.uint32).astype(np.int64)
    bits = 8 * np.dtype(dtype).itemsize
    few = np.minimum(n, bits - 1).astype(dtype)
    if name == "shl":
        result = np.where(n < bits, x << few, dtype(0))
    else:
        result = np.where((n < bits) | (kind[0] == "s"), x >> few, dtype(0))
    machine.set(target, result.astype(dtype), who)


def extract(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """bfe: some of the bits of a number."""
    dtype = TYPES[instruction.parts[-1]]
    target, number, begin, length = instruction.operands
    x = machine.get(number, np.uint32).astype(np.int64)
    at, n = (machine.get(o, np.uint32).astype(np.int64) & 0xFF for o in (begin, length))
    found = (x >> at) & ((np.int64(1) << n) - 1)
    if dtype is np.int32:
        found = np.where((n > 0) & ((found >> np.maximum(n - 1, 0)) & 1 == 1), found - (np.int64(1) << n), found)
    machine.set(target, found.astype(dtype), who)


def permute(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """prmt: four of the eight bytes of two numbers."""
    target, low, high, selector = instruction.operands
    low_, high_ = (machine.get(o, np.uint32).astype(np.uint64) for o in (low, high))
    eight = low_ | (high_ << np.uint64(32))
    select = machine.get(selector, np.uint32)
    result = np.zeros(machine.count, np.uint32)
    for i in range(4):
        chosen = (select >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = (eight >> (8 * (chosen & 7)).astype(np.uint64)) & np.uint64(0xFF)
        byte = np.where(chosen & 8, np.where(byte & np.uint64(0x80), 0xFF, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    machine.set(target, result, who)
