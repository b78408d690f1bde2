"""Calls of the Triton backend whose kernels are compiled for a GPU and run on the emulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from coneheads import backends
from coneheads.backends.triton import backward, launch
from coneheads.lab.gpu_compile import KERNELS, source_of
from tests.backends.emulated.instructions import ACTIONS
from tests.backends.emulated.machine import Machine
from tests.backends.emulated.memory import Global
from tests.backends.emulated.program import Program, read

Change = Callable[[str], str]


class Emulated:
    """Stands in for a kernel: compiles it as a GPU's call would, and runs what came of it.

    change: what is done to its PTX before, for tests that break it. ran: the programs that were run.
    """

    def __init__(self, kernel: Any, arch: int, change: Change = str) -> None:
        self.kernel, self.arch, self.change = kernel, arch, change
        self.ran: list[Program] = []

    def __getitem__(self, grid: Any) -> Any:
        def start(*arguments: Any, **named: Any) -> None:
            self._start(grid, arguments, named)

        return start

    def instructions(self) -> set[str]:
        """The names of all that were run."""
        return {instruction.name for program in self.ran for instruction in program.instructions}

    def _start(self, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        options = {name: value for name, value in named.items() if name not in self.kernel.arg_names}
        source = source_of(self.kernel, SimpleNamespace(arguments=arguments, named=named))
        built = triton.compile(source, GPUTarget("cuda", self.arch, 32), options)
        program = read(self.change(built.asm["ptx"]))
        (programs,) = grid(named)
        given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        values = [given[name] for name, kind in source.signature.items() if kind != "constexpr"]
        memory = Global([value for value in values if isinstance(value, torch.Tensor)])
        passed = [memory.address(value) if isinstance(value, torch.Tensor) else value for value in values]
        passed += [0] * (len(program.parameters) - len(passed))  # scratch memory, which no kernel asks for
        words = [_word(value, kind) for value, (_, kind) in zip(passed, program.parameters, strict=True)]
        machine = Machine(program, programs, built.metadata.shared, memory, words)
        machine.run(ACTIONS)
        memory.write_back()
        self.ran.append(program)


def _word(value: Any, kind: str) -> Any:
    """The bits of an argument."""
    if kind == "f32":
        return np.float32(value).view(np.uint32)
    return np.array(int(value) % (1 << 64), np.uint64)


@contextlib.contextmanager
def on(arch: int, change: Change = str, block: int = 0) -> Iterator[dict[str, Emulated]]:
    """Kernels of calls within are emulated; tensors are those of the CPU.

    block: which of those that are tried on such a GPU, the default first.
    """
    served = tuple(
        replace(one, devices=("cpu",), available=lambda: True) if one.name == "triton" else one
        for one in backends.BACKENDS
    )
    kernels = {"forward": Emulated(launch.forward_kernel, arch, change)}
    kernels |= {name: Emulated(getattr(backward, f"backward_{name}"), arch, change) for name in KERNELS[1:]}
    declared = launch.declared_blocks
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backends, "BACKENDS", served))
        stack.enter_context(mock.patch.object(launch, "declared_blocks", lambda *by: [declared(*by)[: block + 1][-1]]))
        stack.enter_context(mock.patch.object(launch, "generation", return_value=arch // 10))
        stack.enter_context(mock.patch.object(launch, "forward_kernel", kernels["forward"]))
        for name in KERNELS[1:]:
            stack.enter_context(mock.patch.object(backward, f"backward_{name}", kernels[name]))
        yield kernels
