"""Runs a kernel: all threads of all programs, instruction by instruction, each on an array of one number a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.emulated.barriers import Barriers
from tests.backends.emulated.memory import Fault, Global, Shared, TensorMemory
from tests.backends.emulated.program import Instruction, Memory, Operand, Program

WARP = 32
BITS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
Action = Callable[["Machine", Instruction, np.ndarray], None]
PARTS_WAYS = ("bra", "bar.sync", "ret")
MOST_STEPS = 2_000_000


class Machine:
    """The state of a launch. Registers are arrays [threads]; a write puts a new array there, so that none is shared.

    first: the number of the first program, if others stand before it that are not run.
    """

    def __init__(
        self, program: Program, programs: int, shared_size: int, memory: Global, arguments: list[Any], first: int = 0
    ) -> None:
        self.program, self.memory = program, memory
        self.count = programs * program.threads
        place = np.arange(self.count, dtype=np.int64)
        self.of_program = place // program.threads
        self.thread = place % program.threads
        self.warp = (self.thread // WARP).astype(np.int16)
        self.shared = Shared(programs, shared_size)
        self.programs = programs
        self.registers = {name: np.zeros(self.count, BITS[bits]) for name, bits in program.registers.items()}
        self.parameters = dict(zip((name for name, _ in program.parameters), arguments, strict=True))
        self.special = {
            "%tid.x": self.thread.astype(np.uint32),
            "%ctaid.x": (first + self.of_program).astype(np.uint32),
            "%ctaid.y": np.zeros(self.count, np.uint32),
            "%ctaid.z": np.zeros(self.count, np.uint32),
            "%nctaid.x": np.full(self.count, first + programs, np.uint32),
            "global_smem": np.zeros(self.count, np.uint64),
        }
        self.everyone = np.ones(self.count, bool)
        self.next = np.zeros(self.count, np.int64)
        self.waits = np.zeros(self.count, bool)
        self.ended = np.zeros(self.count, bool)
        self.copies: list[dict[str, np.ndarray]] = []
        self.committed = np.zeros(self.count, np.int64)
        # What products of four warps read, by these: of each group that they have committed, and then of the next one.
        self.products: dict[int, list[list[np.ndarray]]] = {}
        self.yields = np.zeros(self.count, bool)
        self.tensor_memory = TensorMemory(programs)
        self.barriers = Barriers()
        self.counter = 0

    # --- Operands ----------------------------------------------------------------------------------------------------

    def get(self, operand: Operand, dtype: type) -> np.ndarray:
        """The numbers of all threads, [threads] or one for all of them."""
        assert isinstance(operand, str), operand
        if operand.startswith("!"):
            return ~self.registers[operand[1:]]
        found = self.registers.get(operand)
        if found is None:
            found = self.special.get(operand)
        if found is None:
            return _constant(operand, np.dtype(dtype))
        if found.dtype == dtype:
            return found
        wanted = np.dtype(dtype)
        if found.dtype.itemsize == wanted.itemsize:
            return found.view(wanted)
        return found.astype(BITS[8 * wanted.itemsize]).view(wanted)

    def set(self, name: Operand, values: np.ndarray, who: np.ndarray) -> None:
        assert isinstance(name, str), name
        if name == "_":
            return
        old = self.registers[name]
        values = np.broadcast_to(np.asarray(values), (self.count,))
        if values.dtype != np.bool_ and values.dtype.itemsize != old.dtype.itemsize:
            values = values.astype(BITS[8 * values.dtype.itemsize] if values.dtype.kind == "f" else values.dtype)
            values = values.astype(old.dtype)
        values = values.view(old.dtype)
        self.registers[name] = values if who is self.everyone else np.where(who, values, old)

    def addresses(self, place: Operand, threads: np.ndarray) -> np.ndarray:
        """Where these threads find a place in memory."""
        assert isinstance(place, Memory)
        if place.base.isdigit():
            return np.full(len(threads), int(place.base) + place.offset, np.int64)
        base = self.registers.get(place.base)
        if base is None:
            base = self.special[place.base]
        return base[threads].astype(np.int64) + place.offset

    def whole_warps(self, who: np.ndarray) -> np.ndarray:
        """The numbers of the warps that carry out an instruction, each of them whole."""
        by_warp = who.reshape(-1, WARP)
        some = by_warp.any(1)
        if not by_warp[some].all():
            raise Fault("a warp comes to an instruction of whole warps in part")
        return np.flatnonzero(some)

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(self, actions: dict[str, Action]) -> None:
        """To the end of all threads. Those that are behind go first, so that they meet again where ways meet."""
        instructions = self.program.instructions
        unknown = [i for i in instructions if i.name.split(".")[0] not in actions]
        if unknown:
            raise Fault(f"an instruction is not known (line {unknown[0].line}: {unknown[0].text})")
        compiled = [(i, actions[i.name.split(".")[0]]) for i in instructions]
        targets = {
            self.program.labels[i.operands[0]]  # type: ignore[index]
            for i in instructions
            if i.name.startswith("bra")
        }
        with np.errstate(all="ignore"):
            while not self.ended.all():
                ready = ~(self.ended | self.waits)
                if not ready.any():
                    raise Fault("threads wait at barriers for others that have ended or wait elsewhere")
                if not (ready & ~self.yields).any():
                    self.yields[:] = False
                ready &= ~self.yields
                at = int(self.next[ready].min())
                who = ready & (self.next == at)
                self._run_on(at, self.everyone if who.all() else who, compiled, targets)

    def _run_on(self, at: int, who: np.ndarray, compiled: list[tuple[Instruction, Action]], targets: set[int]) -> None:
        """To where ways part or meet."""
        while True:
            instruction, action = compiled[at]
            self.counter += 1
            if self.counter > MOST_STEPS:
                raise Fault("the kernel does not end")
            guarded = who
            if instruction.guard is not None:
                name, wanted = instruction.guard
                guarded = who & (self.registers[name] if wanted else ~self.registers[name])
            parts = instruction.name.startswith(PARTS_WAYS) or at + 1 in targets
            if parts:
                self.next[who] = at + 1
            try:
                action(self, instruction, guarded)
            except (Fault, KeyError, ValueError, AssertionError) as error:
                raise Fault(f"{error} (line {instruction.line}: {instruction.text})") from error
            if parts:
                return
            at += 1

    def arrive(self, who: np.ndarray) -> None:
        """At a barrier. All threads of a program that have not ended go on together."""
        self.waits |= who
        there = (self.waits | self.ended).reshape(self.programs, -1).all(1) & self.waits.reshape(self.programs, -1).any(
            1
        )
        for program in np.flatnonzero(there):
            mine = self.of_program == program
            if len(np.unique(self.next[mine & self.waits])) > 1:
                raise Fault("threads of a program wait at different barriers")
        self.waits &= ~np.repeat(there, self.program.threads)
        self.shared.epoch[there] += 1


def _constant(text: str, dtype: np.dtype) -> np.ndarray:
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), np.uint32).view(np.float32)
    if text.startswith("0d"):
        return np.array(int(text[2:], 16), np.uint64).view(np.float64)
    number = int(text.rstrip("U"), 0)
    bits = 8 * dtype.itemsize
    return np.array(number % (1 << bits), BITS[bits] if dtype != np.bool_ else np.bool_).view(dtype)
