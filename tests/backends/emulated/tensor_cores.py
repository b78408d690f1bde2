"""Products on the tensor cores: of a warp (mma) and of four warps that read shared memory (wgmma).

Numbers are multiplied exactly, and what float32 cannot hold of their sum is cut off, as GPUs seem to do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.backends.emulated.machine import WARP, Machine
from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction, Operand
from tests.backends.emulated.warps import LANE, PAIR, ROW, of_warps

FOUR = 4 * WARP  # threads of a product of four warps


class Swizzles(NamedTuple):
    """How descriptors say which bits of an address are mixed: the number of bits, by a number at a place in them."""

    at: int
    mask: int
    bits: dict[int, int]


OF_FOUR_WARPS = Swizzles(62, 3, {0: 0, 1: 3, 2: 2, 3: 1})


def halves(kind: str, registers: np.ndarray) -> np.ndarray:
    """The bits [...] as float32 [..., 2] (of uint32), [..., 1] (of uint16, or tf32, whose last 13 bits are cut off)."""
    if kind == "tf32":
        return (registers & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    two = np.ascontiguousarray(registers)[..., None].view(np.uint16)
    if kind == "bf16":
        return (two.astype(np.uint32) << 16).view(np.float32)
    return two.view(np.float16).astype(np.float32)


def registers_of(machine: Machine, warps: np.ndarray, names: Operand) -> np.ndarray:
    """uint32 [warps, registers, 32]"""
    assert isinstance(names, list)
    return np.stack([machine.get(name, np.uint32).reshape(-1, WARP)[warps] for name in names], 1)


def left_of(kind: str, registers: np.ndarray) -> np.ndarray:
    """[warps, 16, K] from four registers a thread: two rows, 8 apart, and two parts of the columns."""
    numbers = halves(kind, registers)
    wide = numbers.shape[-1]
    left = np.empty((len(numbers), 16, 8 * wide), np.float32)
    for i in range(wide):
        for j in range(4):
            left[:, ROW + 8 * (j % 2), wide * (LANE % 4) + i + 4 * wide * (j // 2)] = numbers[:, j, :, i]
    return left


def right_of(kind: str, registers: np.ndarray) -> np.ndarray:
    """[warps, K, 8] from two registers a thread."""
    numbers = halves(kind, registers)
    wide = numbers.shape[-1]
    right = np.empty((len(numbers), 8 * wide, 8), np.float32)
    for i in range(wide):
        for j in range(2):
            right[:, wide * (LANE % 4) + i + 4 * wide * j, ROW] = numbers[:, j, :, i]
    return right


def cut_off(numbers: np.ndarray) -> np.ndarray:
    """float64 as float32, towards 0."""
    near = numbers.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(numbers), np.nextafter(near, np.float32(0)), near)


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left.astype(np.float64) @ right.astype(np.float64)


def multiply_matrices(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """mma: a [16, K] times b [K, 8] plus c [16, 8]."""
    kind = instruction.parts[7]
    assert instruction.name.startswith(f"mma.sync.aligned.m16n8k{8 if kind == 'tf32' else 16}.row.col.f32.{kind}")
    target, a, b, c = instruction.operands
    warps = machine.whole_warps(who)
    left, right = left_of(kind, registers_of(machine, warps, a)), right_of(kind, registers_of(machine, warps, b))
    _add(machine, warps, target, registers_of(machine, warps, c), product(left, right), who)


def _add(
    machine: Machine, warps: np.ndarray, target: Operand, before: np.ndarray, products: np.ndarray, who: np.ndarray
) -> None:
    """products: [warps, 16, N]. A thread has two neighbours in a row, in two rows, in every eight columns."""
    assert isinstance(target, list)
    for j, name in enumerate(target):
        sums = products[:, ROW + 8 * (j % 4 // 2), 8 * (j // 4) + PAIR + j % 2] + before[:, j].view(np.float32)
        machine.set(name, of_warps(machine, warps, cut_off(sums)), who)


def matrix_in_memory(
    machine: Machine,
    programs: np.ndarray,
    descriptors: np.ndarray,
    swizzles: Swizzles,
    kind: str,
    rows: int,
    turned: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [descriptors, rows, K], and where it is. A product takes 32 bytes of each row; if it is turned, K rows.

    A matrix has parts of 8 x `width` bytes, whose distances are in its descriptor, and the addresses in them are mixed.
    """
    step = 4 if kind == "tf32" else 2
    columns = 32 // step
    start = (descriptors & np.uint64(0x3FFF)).astype(np.int64) << 4
    along, across = ((((descriptors >> np.uint64(at)) & np.uint64(0x3FFF)).astype(np.int64) << 4) for at in (16, 32))
    if ((descriptors >> np.uint64(49)) & np.uint64(7)).any():
        raise Fault("a matrix begins within a swizzled part")
    (mode,) = np.unique((descriptors >> np.uint64(swizzles.at)).astype(np.int64) & swizzles.mask)
    bits = swizzles.bits[int(mode)]
    width = 16 << bits
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    if turned:
        byte = row * step
        place = (byte // width) * along[:, None, None] + byte % width + (column // 8) * across[:, None, None]
        place = place + (column % 8) * width
    else:
        place = (row // 8) * across[:, None, None] + (row % 8) * width + column * step
        if bits == 0:  # columns of 16 bytes lie apart
            byte = column * step
            place = (
                (row // 8) * across[:, None, None] + (row % 8) * 16 + byte % 16 + (byte // 16) * along[:, None, None]
            )
    address = start[:, None, None] + place
    address ^= ((address >> 7) & ((1 << bits) - 1)) << 4
    data, places = machine.shared.read_together(np.repeat(programs, rows * columns), address.reshape(-1), step)
    numbers = halves(kind, data.view(np.uint32 if kind == "tf32" else np.uint16))
    return numbers.reshape(len(descriptors), rows, columns), places.reshape(len(descriptors), -1)


def multiply_in_memory(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """wgmma: a [64, K] times b [K, N], of four warps. b is in shared memory, a there or in registers."""
    step = instruction.parts[1]
    by_four = who.reshape(-1, FOUR)
    groups = np.flatnonzero(by_four.any(1))
    if not by_four[groups].all():
        raise Fault("four warps come to an instruction of theirs in part")
    for group in groups:
        mine = machine.products.setdefault(int(group), [[]])
        if step == "commit_group":
            mine.append([])
        while step == "wait_group" and len(mine) - 1 > int(str(instruction.operands[0])):  # the last is not committed
            for places in mine.pop(0):
                machine.shared.being_read[places] -= 1
    if step != "mma_async":
        return
    kind = instruction.parts[6]
    columns = int(instruction.parts[4].removeprefix("m64n").split("k")[0])
    target, a, b, scale, *ones = instruction.operands
    assert ones[:2] == ["1", "1"]
    turned = [bool(int(str(bit))) for bit in ones[2:]] or [False]
    programs = machine.of_program.reshape(-1, FOUR)[groups, 0]

    def in_memory(name: Operand, rows: int, turned: bool) -> np.ndarray:
        mine = machine.get(name, np.uint64).reshape(-1, FOUR)[groups]
        assert (mine == mine[:, :1]).all(), "four warps agree about a matrix"
        matrix, places = matrix_in_memory(machine, programs, mine[:, 0], OF_FOUR_WARPS, kind, rows, turned)
        for group, of_group in zip(groups, places, strict=True):
            machine.shared.being_read[of_group] += 1
            machine.products[int(group)][-1].append(of_group)
        return matrix

    right = in_memory(b, columns, turned[-1])
    warps = (groups[:, None] * 4 + np.arange(4)).reshape(-1)
    if isinstance(a, list):
        left = left_of(kind, registers_of(machine, warps, a))
    else:
        left = in_memory(a, 64, turned[0]).reshape(len(warps), 16, -1)
    products = product(left, np.repeat(right, 4, 0).transpose(0, 2, 1))
    adds = np.broadcast_to(machine.get(scale, np.bool_), (machine.count,)).reshape(-1, WARP)[warps]
    before = np.where(adds[:, None], registers_of(machine, warps, target).view(np.float32), np.float32(0))
    _add(machine, warps, target, before.view(np.uint32), products, who)
