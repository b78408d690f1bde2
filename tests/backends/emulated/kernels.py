"""Calls of the Triton backend whose kernels are compiled for a GPU and run on the emulated one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
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


class Before(NamedTuple):
    """What a call of one head, without a mask, has before its own heads or the rows of its queries: nothing of it is
    read, and it is not in memory, but places and the numbers of programs are counted from its beginning. Programs that
    own columns pass over all rows: they have none before them."""

    heads: int = 0
    rows: int = 0

    def bytes_of(self, name: str, tensor: torch.Tensor) -> int:
        """Of the argument of this name. GRAD_PARAMETERS is not written where nobody asks for them."""
        if tensor.dim() < 3 or name in ("MASK", "SEED", "GRAD_PARAMETERS"):
            return 0
        of_queries = name.startswith(("Q", "OUT", "TO", "GRAD_OUT", "LSE", "REST", "SHIFT", "GRAD_Q"))
        return self.heads * tensor.nbytes + (self.rows * tensor.nbytes // tensor.shape[2] if of_queries else 0)

    def programs(self, grid: Any, named: dict[str, Any]) -> int:
        (programs,) = grid(named)
        return self.heads * programs + (self.rows // named["BM"] if self.rows else 0)


class Emulated:
    """Stands in for a kernel: compiles it as a GPU's call would, and runs what came of it.

    change: what is done to its PTX before, for tests that break it. before: what its tensors do not show. ran: the
    programs that were run.
    """

    def __init__(self, kernel: Any, arch: int, change: Change = str, before: Before = Before()) -> None:  # noqa: B008
        self.kernel, self.arch, self.change, self.before = kernel, arch, change, before
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
        given["length"] = given.get("length", 0) + self.before.rows
        values = {name: given[name] for name, kind in source.signature.items() if kind != "constexpr"}
        memory = Global([value for value in values.values() if isinstance(value, torch.Tensor)])
        passed = [
            memory.address(value) - self.before.bytes_of(name, value) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        ]
        passed += [0] * (len(program.parameters) - len(passed))  # scratch memory, which no kernel asks for
        words = [_word(value, kind) for value, (_, kind) in zip(passed, program.parameters, strict=True)]
        first = self.before.programs(grid, named)
        machine = Machine(program, programs, built.metadata.shared, memory, words, first)
        machine.run(ACTIONS)
        memory.write_back()
        self.ran.append(program)


def _word(value: Any, kind: str) -> Any:
    """The bits of an argument."""
    if kind == "f32":
        return np.float32(value).view(np.uint32)
    return np.array(int(value) % (1 << 64), np.uint64)


@contextlib.contextmanager
def on(
    arch: int,
    change: Change = str,
    block: int = 0,
    before: Before = Before(),  # noqa: B008
) -> Iterator[dict[str, Emulated]]:
    """Kernels of calls within are emulated; tensors are those of the CPU.

    block: which of those that are tried on such a GPU, the default first.
    """
    served = tuple(
        replace(one, devices=("cpu",), available=lambda: True) if one.name == "triton" else one
        for one in backends.BACKENDS
    )
    kernels = {"forward": Emulated(launch.forward_kernel, arch, change, before)}
    for name in KERNELS[1:]:
        those = before if name in ("rows", "queries") else before._replace(rows=0)
        kernels[name] = Emulated(getattr(backward, f"backward_{name}"), arch, change, those)
    declared = launch.declared_blocks
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backends, "BACKENDS", served))
        stack.enter_context(mock.patch.object(launch, "declared_blocks", lambda *by: [declared(*by)[: block + 1][-1]]))
        stack.enter_context(mock.patch.object(launch, "generation", return_value=arch // 10))
        stack.enter_context(mock.patch.object(launch, "forward_kernel", kernels["forward"]))
        for name in KERNELS[1:]:
            stack.enter_context(mock.patch.object(backward, f"backward_{name}", kernels[name]))
        yield kernels
