"""Tensor cores as in sm_100: one thread starts a product, whose sums are in a memory of their own."""

from __future__ import annotations

import numpy as np

from tests.backends.emulated.machine import WARP, Machine
from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction, Memory, Operand
from tests.backends.emulated.tensor_cores import Swizzles, cut_off, halves, matrix_in_memory, product

OF_ONE_THREAD = Swizzles(61, 7, {0: 0, 2: 3, 4: 2, 6: 1})
SUMS_IN_FLOAT32 = 1
KINDS = {("kind::f16", 0): "f16", ("kind::f16", 1): "bf16", ("kind::tf32", 2): "tf32"}
Places = tuple[int, np.ndarray, np.ndarray]  # a program, rows and columns


def of_tensor_cores(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    step = instruction.parts[1]
    if step == "alloc":
        place, columns = instruction.operands
        for warp in machine.whole_warps(who):
            thread = np.array([warp * WARP])
            program = machine.of_program[thread]
            first = machine.tensor_memory.allocate(program[0], int(str(columns)))
            word = np.array([[first]], np.uint32).view(np.uint8)
            machine.shared.write(program, machine.warp[thread], machine.addresses(place, thread), word)
    elif step == "mma":
        for thread in np.flatnonzero(who):
            _multiply(machine, instruction, int(thread))
    elif step == "commit":
        threads = np.flatnonzero(who)
        addresses = machine.addresses(instruction.operands[0], threads)
        for program, address in zip(machine.of_program[threads], addresses, strict=True):
            machine.barriers.commit(int(program), int(address))
    elif step in ("ld", "st"):
        _move(machine, instruction, who)
    elif step not in ("dealloc", "relinquish_alloc_permit", "wait::ld", "wait::st"):
        raise Fault("unknown")


def _multiply(machine: Machine, instruction: Instruction, thread: int) -> None:
    """a [M, K] times b [K, N]: b is in shared memory, a there or in tensor memory."""
    target, a, b, about, adds = instruction.operands
    word = int(np.broadcast_to(machine.get(about, np.uint32), (machine.count,))[thread])
    kind = KINDS[instruction.parts[3], (word >> 7) & 7]
    assert (word >> 10) & 7 == (word >> 7) & 7, "a and b have one dtype"
    assert (word >> 4) & 3 == SUMS_IN_FLOAT32, "sums are float32"
    assert not word & 0b1001111, "nothing is sparse or cut off"
    assert not (word >> 13) & 3, "nothing is negated"
    columns, rows = 8 * ((word >> 17) & 63), 16 * ((word >> 24) & 31)
    program = machine.of_program[thread : thread + 1]

    def in_memory(name: Operand, count: int, turned: bool) -> np.ndarray:
        descriptor = machine.get(name, np.uint64)[thread : thread + 1]
        matrix, places = matrix_in_memory(machine, program, descriptor, OF_ONE_THREAD, kind, count, turned)
        machine.barriers.begin(int(program[0]), machine.shared.being_read, places[0])
        return matrix[0]

    right = in_memory(b, columns, bool((word >> 16) & 1))
    memory = machine.tensor_memory
    if isinstance(a, Memory):
        places = _places(machine, a, thread, rows, right.shape[1] * (4 if kind == "tf32" else 2) // 4)
        left = halves(kind, memory.words[places]).reshape(rows, -1)
        machine.barriers.begin(int(program[0]), memory.being_read, places)
    else:
        left = in_memory(a, rows, bool((word >> 15) & 1))
    places = _places(machine, target, thread, rows, columns)
    sums = product(left, right.T)
    if np.broadcast_to(machine.get(adds, np.bool_), (machine.count,))[thread]:
        sums = sums + memory.words[places].view(np.float32)
    memory.words[places] = cut_off(sums).view(np.uint32)
    machine.barriers.begin(int(program[0]), memory.being_written, places)


def _places(machine: Machine, place: Operand, thread: int, rows: int, columns: int) -> Places:
    """Of a matrix: 128 rows, or 64, of which every warp has 16 of its 32."""
    (address,) = machine.addresses(place, np.array([thread])).tolist()
    row, column = np.arange(rows)[:, None] + (address >> 16), np.arange(columns)[None] + (address & 0xFFFF)
    if rows == 64:
        assert address >> 16 in (0, 16)
        row = (address >> 16) + WARP * (np.arange(rows) // 16)[:, None] + (np.arange(rows) % 16)[:, None]
    else:
        assert rows == 128
        assert address >> 16 == 0
    program = int(machine.of_program[thread])
    machine.tensor_memory.check(np.array(program), row, column)
    return program, row, column


def _move(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """Rows of a warp to its registers, or back: 32 of them, or 16 twice."""
    loads = instruction.parts[1] == "ld"
    place = instruction.operands[0 if not loads else 1]
    registers = instruction.operands[0 if loads else -1]
    assert isinstance(registers, list)
    shape, count = instruction.parts[4], int(instruction.parts[5][1:])
    assert len(registers) == count
    warps = machine.whole_warps(who)
    threads = (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
    address = machine.addresses(place, threads)
    row, column = address >> 16, address & 0xFFFF
    lane = threads % WARP
    if shape == "32x32b":
        row = row + lane
    else:
        assert shape == "16x32bx2"
        half = int(str(instruction.operands[2 if loads else 1]))
        row, column = row + lane % 16, column + (lane // 16) * half
    programs, memory = machine.of_program[threads], machine.tensor_memory
    if (row // WARP != machine.warp[threads] % 4).any():
        raise Fault("a warp reads rows of another")
    for i, name in enumerate(registers):
        places = (programs, row, column + i)
        memory.check(*places)
        if memory.being_written[places].any() or (not loads and memory.being_read[places].any()):
            raise Fault("tensor memory is used while a product is under way there")
        if loads:
            whole = np.zeros(machine.count, np.uint32)
            whole[threads] = memory.words[places]
            machine.set(name, whole, who)
        else:
            memory.words[places] = np.broadcast_to(machine.get(name, np.uint32), (machine.count,))[threads]
