"""Instructions of whole warps: numbers from other threads, and matrices of halves in shared memory."""

from __future__ import annotations

import numpy as np

from tests.backends.emulated.machine import WARP, Machine
from tests.backends.emulated.program import Instruction, Operand

LANE = np.arange(WARP)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)  # of a lane in a matrix of 8 x 8 halves: its row, and the first of its columns


def shuffle(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """The number of the thread whose place differs in some bits (bfly), or of a given one (idx)."""
    _, _, mode, _ = instruction.parts
    target, source, by, clamp, _ = instruction.operands
    assert int(machine.get(clamp, np.uint32)) == WARP - 1, "all 32 threads take part"
    machine.whole_warps(who)
    numbers = machine.get(source, np.uint32)
    lane = np.arange(machine.count) % WARP
    given = machine.get(by, np.uint32).astype(np.int64)
    other = lane ^ given if mode == "bfly" else given & (WARP - 1)
    assert mode in ("bfly", "idx")
    machine.set(target, numbers[np.arange(machine.count) - lane + other], who)


def load_matrix(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """ldmatrix: 8 x 8 halves, whose rows begin where eight of the threads say."""
    targets, place = instruction.operands
    assert isinstance(targets, list)
    warps = machine.whole_warps(who)
    for i, name in enumerate(targets):
        rows = machine.shared.read(*_places_of_rows(machine, place, warps, i), 16)
        matrix = rows.view(np.uint16).reshape(len(warps), 8, 8)
        if "trans" in instruction.parts:
            matrix = matrix.transpose(0, 2, 1)
        two = np.stack([matrix[:, ROW, PAIR], matrix[:, ROW, PAIR + 1]], -1)
        machine.set(name, of_warps(machine, warps, np.ascontiguousarray(two).view(np.uint32)[..., 0]), who)


def store_matrix(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """stmatrix: the same in the other direction."""
    place, sources = instruction.operands
    assert isinstance(sources, list)
    warps = machine.whole_warps(who)
    for i, name in enumerate(sources):
        two = np.ascontiguousarray(machine.get(name, np.uint32).reshape(-1, WARP)[warps])[..., None].view(np.uint16)
        matrix = np.empty((len(warps), 8, 8), np.uint16)
        matrix[:, ROW, PAIR], matrix[:, ROW, PAIR + 1] = two[..., 0], two[..., 1]
        if "trans" in instruction.parts:
            matrix = matrix.transpose(0, 2, 1)
        rows = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 16)
        machine.shared.write(*_places_of_rows(machine, place, warps, i), rows)


def _places_of_rows(
    machine: Machine, place: Operand, warps: np.ndarray, i: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The programs, warps and addresses of the i-th matrix of every warp, whose rows eight of its threads know."""
    threads = (warps[:, None] * WARP + 8 * i + np.arange(8)).reshape(-1)
    return machine.of_program[threads], machine.warp[threads], machine.addresses(place, threads)


def of_warps(machine: Machine, warps: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[warps, 32] as the numbers of all threads."""
    whole = np.zeros((machine.count // WARP, WARP), numbers.dtype)
    whole[warps] = numbers
    return whole.reshape(-1)


def elect(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """The first thread of a warp."""
    machine.whole_warps(who)
    number, _, predicate = str(instruction.operands[0]).partition("|")
    machine.set(number, np.zeros(machine.count, np.uint32), who)
    machine.set(predicate, np.arange(machine.count) % WARP == 0, who)


def reduce(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """redux: the least or the largest number of a warp, which is none of those that are NaN."""
    assert instruction.name in ("redux.sync.min.f32", "redux.sync.max.f32")
    machine.whole_warps(who)
    target, source, _ = instruction.operands
    numbers = machine.get(source, np.float32).reshape(-1, WARP)
    found = (np.fmin if "min" in instruction.parts else np.fmax).reduce(numbers, 1)
    machine.set(target, np.repeat(found, WARP), who)
