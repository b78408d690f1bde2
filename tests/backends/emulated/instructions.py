"""The instructions of PTX that the compiler makes of the kernels, and what each of them does. There are no others."""

from __future__ import annotations

import numpy as np

from tests.backends.emulated import arithmetic, barriers, choices, tensor_cores, tensor_memory, transfers, warps
from tests.backends.emulated.machine import Action, Machine
from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction


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
    **dict.fromkeys(arithmetic.FUNCTIONS, arithmetic.of_one_type),
    "bar": barrier,
    "bfe": arithmetic.extract,
    "bra": branch,
    "cp": transfers.copy,
    "cvt": choices.convert,
    "elect": warps.elect,
    "fence": nothing,
    "fma": arithmetic.fma,
    "ld": transfers.load,
    "ldmatrix": warps.load_matrix,
    "mad": arithmetic.multiply_add,
    "mbarrier": barriers.of_barriers,
    "mma": tensor_cores.multiply_matrices,
    "mov": choices.move,
    "mul": arithmetic.multiply,
    "prmt": arithmetic.permute,
    "redux": warps.reduce,
    "ret": end,
    "selp": choices.select,
    "setp": choices.compare,
    "shfl": warps.shuffle,
    "shl": arithmetic.shift,
    "shr": arithmetic.shift,
    "st": transfers.store,
    "stmatrix": warps.store_matrix,
    "tcgen05": tensor_memory.of_tensor_cores,
    "trap": fail,
    "wgmma": tensor_cores.multiply_in_memory,
}
