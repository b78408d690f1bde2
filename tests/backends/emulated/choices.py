"""Instructions that compare, choose, convert and move numbers."""

from __future__ import annotations

import numpy as np

from tests.backends.emulated.formats import TYPES, from_bfloat16, to_bfloat16
from tests.backends.emulated.machine import Machine
from tests.backends.emulated.program import Instruction

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


WITH_ANOTHER = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """With NaN, comparisons are false, those that end in u true. A third operand is a predicate to combine with."""
    _, name, *more, kind = instruction.parts
    target, *operands = instruction.operands
    x, y = (machine.get(operand, TYPES[kind]) for operand in operands[:2])
    if kind == "bf16":
        x, y = from_bfloat16(x), from_bfloat16(y)
    if name in COMPARISONS:
        result = COMPARISONS[name](x, y)
        if x.dtype.kind == "f" and name == "ne":
            result &= ~(np.isnan(x) | np.isnan(y))
    else:
        result = COMPARISONS[name.removesuffix("u")](x, y) | np.isnan(x) | np.isnan(y)
    if len(operands) == 3:
        result = WITH_ANOTHER[more[0]](result, machine.get(operands[2], np.bool_))
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
