"""What the instructions of PTX do, but those of whole warps, which are in warps.py.

Functions that a GPU only approximates (roots, powers, quotients) are as far off as NVIDIA's manual allows, up or down by
a coin that depends on the argument, unless float32 has the exact result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.emulated import tensor_cores, tensor_memory, warps
from tests.backends.emulated.machine import Action, Machine
from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction, Memory

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
INTEGERS = {np.int16: np.int32, np.int32: np.int64, np.uint16: np.uint32, np.uint32: np.uint64}


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


# --- Arithmetic ------------------------------------------------------------------------------------------------------


def approximate(function: Callable[..., np.ndarray], bits: float) -> Callable[..., np.ndarray]:
    """Off by 2^-bits of the result."""

    def approximated(*arguments: np.ndarray) -> np.ndarray:
        exact = np.asarray(function(*(x.astype(np.float64) for x in arguments)))
        coin = np.bitwise_xor.reduce([np.asarray(x).view(np.uint32) for x in np.broadcast_arrays(*arguments)])
        up = (coin * np.uint32(2654435761)) >> np.uint32(31)
        off = exact * (1 + (2.0 * up - 1) * 2.0**-bits)
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


def arithmetic(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """A function of numbers of one type: two halves or two float32 in a register are taken one by one."""
    name, *modifiers = instruction.parts
    kind = modifiers[-1]
    target, *operands = instruction.operands
    twice = kind.endswith("x2")
    if twice:
        kind = kind.removesuffix("x2")
    function = FUNCTIONS[name]
    if modifiers[-2:] == ["f32", "bf16"]:  # a bfloat16 and a float32
        x, y = from_bfloat16(machine.get(operands[0], np.uint16)), machine.get(operands[1], np.float32)
        machine.set(target, function(x, y), who)
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
        arithmetic(machine, instruction, who)
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


# --- Choices and conversions -----------------------------------------------------------------------------------------

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def compare(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """With NaN, comparisons are false, those that end in u true."""
    _, name, *_, kind = instruction.parts
    target, *operands = instruction.operands
    x, y = (machine.get(operand, TYPES[kind]) for operand in operands)
    if kind == "bf16":
        x, y = from_bfloat16(x), from_bfloat16(y)
    if name in COMPARISONS:
        result = COMPARISONS[name](x, y)
        if x.dtype.kind == "f" and name == "ne":
            result &= ~(np.isnan(x) | np.isnan(y))
    else:
        result = COMPARISONS[name.removesuffix("u")](x, y) | np.isnan(x) | np.isnan(y)
    machine.set(target, result, who)


def select(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    target, yes, no, predicate = instruction.operands
    dtype = TYPES[instruction.parts[-1]]
    chosen = np.where(machine.get(predicate, np.bool_), machine.get(yes, dtype), machine.get(no, dtype))
    machine.set(target, chosen.astype(dtype), who)


def convert(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    _, *_, to, source = instruction.parts
    target, *operands = instruction.operands
    numbers = [machine.get(operand, TYPES[source]) for operand in operands]
    if source == "bf16":
        numbers = [from_bfloat16(n) for n in numbers]
    kind = to.removesuffix("x2")
    if kind == "tf32":  # to the nearest, ties away from 0
        bits = numbers[0].view(np.uint32)
        result = np.where(np.isfinite(numbers[0]), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
        machine.set(target, result, who)
        return
    parts = [to_bfloat16(n) if kind == "bf16" else n.astype(TYPES[kind]) for n in numbers]
    if to.endswith("x2"):
        high, low = (np.broadcast_to(p, (machine.count,)).view(np.uint16).astype(np.uint32) for p in parts)
        machine.set(target, (high << np.uint32(16)) | low, who)
    else:
        machine.set(target, parts[0], who)


def move(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """A register, several into one, or one into several: the first has the lowest bits."""
    target, source = instruction.operands
    kind = instruction.parts[-1]
    dtype = TYPES[kind]
    if isinstance(source, list):
        part = machine.registers[source[0]].dtype.type if source[0] in machine.registers else None
        part = part or np.dtype(f"uint{8 * np.dtype(dtype).itemsize // len(source)}").type
        parts = [np.broadcast_to(machine.get(name, part), (machine.count,)) for name in source]
        machine.set(target, np.stack(parts, -1).view(np.dtype(dtype)).reshape(-1), who)
    elif isinstance(target, list):
        part = np.dtype(f"uint{8 * np.dtype(dtype).itemsize // len(target)}").type
        whole = np.ascontiguousarray(np.broadcast_to(machine.get(source, dtype), (machine.count,)))
        for name, values in zip(target, whole.view(part).reshape(machine.count, -1).T, strict=True):
            machine.set(name, np.ascontiguousarray(values), who)
    else:
        machine.set(target, machine.get(source, dtype), who)


# --- Memory ----------------------------------------------------------------------------------------------------------


def _addresses(machine: Machine, place: Any, lanes: np.ndarray) -> np.ndarray:
    assert isinstance(place, Memory)
    if place.base.isdigit():
        return np.full(len(lanes), int(place.base) + place.offset, np.int64)
    base = machine.registers.get(place.base)
    if base is None:
        base = machine.special[place.base]
    return base[lanes].astype(np.int64) + place.offset


def load(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    target, place = instruction.operands
    space, kind = instruction.parts[1], instruction.parts[-1]
    dtype = TYPES[kind]
    assert isinstance(place, Memory)
    if space == "param":
        value = machine.parameters[place.base]
        machine.set(target, np.array(value).astype(dtype), who)
        return
    names = target if isinstance(target, list) else [target]
    assert len(names) == int(next((p[1:] for p in instruction.parts if p in ("v2", "v4")), "1"))
    size = np.dtype(dtype).itemsize
    lanes = np.flatnonzero(who)
    addresses = _addresses(machine, place, lanes)
    if space == "global":
        data = machine.memory.read(machine.of_program[lanes], addresses, size * len(names))
    else:
        data = machine.shared.read(machine.of_program[lanes], machine.warp[lanes], addresses, size * len(names))
    values = data.view(dtype).reshape(len(lanes), len(names))
    for i, name in enumerate(names):
        whole = np.zeros(machine.count, dtype)
        whole[lanes] = values[:, i]
        machine.set(name, whole, who)


def store(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    place, source = instruction.operands
    space, kind = instruction.parts[1], instruction.parts[-1]
    names = source if isinstance(source, list) else [source]
    assert len(names) == int(next((p[1:] for p in instruction.parts if p in ("v2", "v4")), "1"))
    lanes = np.flatnonzero(who)
    addresses = _addresses(machine, place, lanes)
    values = np.stack([np.broadcast_to(machine.get(n, TYPES[kind]), (machine.count,))[lanes] for n in names], -1)
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(lanes), values.itemsize * len(names))
    if space == "global":
        machine.memory.write(machine.of_program[lanes], addresses, data)
    else:
        machine.shared.write(machine.of_program[lanes], machine.warp[lanes], addresses, data)


def copy(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """cp.async: from global to shared memory. It is done when the thread has waited for the group of the copy."""
    step = instruction.parts[2]
    if step == "commit_group":
        machine.committed[who] += 1
    elif step == "wait_group":
        under_way = machine.get(instruction.operands[0], np.uint32).astype(np.int64)
        still = []
        for one in machine.copies:
            done = who[one["lanes"]] & (one["group"] < machine.committed[one["lanes"]] - under_way)
            machine.shared.end_copy(
                one["places"][done], one["programs"][done], one["warps"][done], one["data"][done]
            )
            if not done.all():
                still.append({name: values[~done] for name, values in one.items()})
        machine.copies = still
    else:
        place, source, size, *given = instruction.operands
        lanes = np.flatnonzero(who)
        number = int(machine.get(size, np.uint32))
        data = np.zeros((len(lanes), number), np.uint8)
        if given:
            read = np.broadcast_to(machine.get(given[0], np.uint32), (machine.count,))[lanes]
        else:
            read = np.full(len(lanes), number)
        assert ((read == 0) | (read == number)).all(), "a copy reads all or nothing here"
        some = read > 0
        data[some] = machine.memory.read(
            machine.of_program[lanes[some]], _addresses(machine, source, lanes[some]), number
        )
        programs, warp = machine.of_program[lanes], machine.warp[lanes]
        places = machine.shared.begin_copy(programs, warp, _addresses(machine, place, lanes), number)
        group = machine.committed[lanes].copy()
        one = {"lanes": lanes, "group": group, "places": places, "programs": programs, "warps": warp, "data": data}
        machine.copies.append(one)


# --- Ways ------------------------------------------------------------------------------------------------------------


def branch(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    machine.next[who] = machine.program.labels[instruction.operands[0]]  # type: ignore[index]


def barrier(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    if instruction.parts[1] == "warp":
        machine.whole_warps(who)
        return
    assert instruction.operands == ["0"]
    machine.arrive(who)


def end(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    machine.ended |= who


def fail(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    if who.any():
        raise Fault("the kernel stops itself")


def nothing(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """Between memories that are one here."""


ACTIONS: dict[str, Action] = {
    **dict.fromkeys(FUNCTIONS, arithmetic),
    "bar": barrier,
    "bfe": extract,
    "bra": branch,
    "cp": copy,
    "cvt": convert,
    "elect": warps.elect,
    "fence": nothing,
    "fma": fma,
    "ld": load,
    "ldmatrix": warps.load_matrix,
    "mad": multiply_add,
    "mbarrier": tensor_memory.of_barriers,
    "mma": tensor_cores.multiply_matrices,
    "mov": move,
    "mul": multiply,
    "prmt": permute,
    "redux": warps.reduce,
    "ret": end,
    "selp": select,
    "setp": compare,
    "shfl": warps.shuffle,
    "shl": shift,
    "shr": shift,
    "st": store,
    "stmatrix": warps.store_matrix,
    "tcgen05": tensor_memory.of_tensor_cores,
    "trap": fail,
    "wgmma": tensor_cores.multiply_in_memory,
}
