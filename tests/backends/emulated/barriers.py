"""Barriers in shared memory, by which threads learn what the tensor cores of sm_100 have done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.backends.emulated.memory import Fault
from tests.backends.emulated.program import Instruction

if TYPE_CHECKING:
    from tests.backends.emulated.machine import Machine


Use = tuple[np.ndarray, Any]  # how many products use each place of a memory, and the places of one of them


class Barriers:
    """In shared memory; a barrier changes its phase when all that it waits for has arrived."""

    def __init__(self) -> None:
        self.phases: dict[tuple[int, int], int] = {}
        self.begun: dict[int, list[Use]] = {}  # by products since the last commit, by program
        self.committed: dict[tuple[int, int], list[Use]] = {}

    def begin(self, program: int, counts: np.ndarray, places: Any) -> None:
        """A product of a program begins to use these places, which are counted there."""
        counts[places] += 1
        self.begun.setdefault(program, []).append((counts, places))

    def commit(self, program: int, address: int) -> None:
        """The barrier will learn that all products up to here are done. (They are, but nobody knows.)"""
        key = (program, address)
        self.phases[key] += 1
        self.committed.setdefault(key, []).extend(self.begun.pop(program, []))

    def seen(self, key: tuple[int, int]) -> None:
        """What was committed to a barrier is known to be done."""
        for counts, places in self.committed.pop(key, []):
            counts[places] -= 1


def of_barriers(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    step = instruction.parts[1]
    threads = np.flatnonzero(who)
    if step == "try_wait":
        target, place, parity = instruction.operands
        parities = np.broadcast_to(machine.get(parity, np.uint32), (machine.count,))[threads]
        addresses = machine.addresses(place, threads)
        done = np.zeros(machine.count, bool)
        for program, address, wanted in set(
            zip(machine.of_program[threads].tolist(), addresses.tolist(), parities.tolist(), strict=True)
        ):
            phase = machine.barriers.phases[program, address]
            if (phase & 1) != wanted:
                mine = (machine.of_program[threads] == program) & (addresses == address) & (parities == wanted)
                done[threads[mine]] = True
                machine.barriers.seen((program, address))
        machine.set(target, done, who)
        machine.yields |= who & ~done
        return
    addresses = machine.addresses(instruction.operands[0], threads)
    for thread, address in zip(threads, addresses, strict=True):
        key = (int(machine.of_program[thread]), int(address))
        if step == "init":
            assert instruction.operands[1] == "1", "one arrives"
            machine.barriers.phases[key] = 0
        elif step == "inval":
            del machine.barriers.phases[key]
        else:
            raise Fault("unknown")
