"""Instructions that read and write memory, and copies that go on by themselves."""

from __future__ import annotations

import numpy as np

from tests.backends.emulated.formats import TYPES
from tests.backends.emulated.machine import Machine
from tests.backends.emulated.program import Instruction, Memory


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
    addresses = machine.addresses(place, lanes)
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
    addresses = machine.addresses(place, lanes)
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
            machine.shared.end_copy(one["places"][done], one["programs"][done], one["warps"][done], one["data"][done])
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
            machine.of_program[lanes[some]], machine.addresses(source, lanes[some]), number
        )
        programs, warp = machine.of_program[lanes], machine.warp[lanes]
        places = machine.shared.begin_copy(programs, warp, machine.addresses(place, lanes), number)
        group = machine.committed[lanes].copy()
        one = {"lanes": lanes, "group": group, "places": places, "programs": programs, "warps": warp, "data": data}
        machine.copies.append(one)
