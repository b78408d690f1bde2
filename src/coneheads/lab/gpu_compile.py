"""Compiles the Triton kernels without a GPU, with the arguments that a call would pass, and reads what came of it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from coneheads import scores as score_classes
from coneheads.backends import ops
from coneheads.backends.inputs import Inputs, prepare
from coneheads.backends.ops import FusedInputs, Wanted
from coneheads.backends.triton import number_of, numbers_are_fixed
from coneheads.lab.gpu_instructions import loop_over_tiles, multiplies_on_tensor_cores, read_tools, spills
from coneheads.lab.progress import Progress
from coneheads.scores import Score

KERNELS = ("forward", "rows", "queries", "keys", "mask")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: one for each number of backends/triton/scores.py; both finite cones have the same kernels
SCORES: dict[str, Score] = {
    "dot": score_classes.DotProduct(),
    "laplacian": score_classes.Laplacian(),
    "penumbral": score_classes.Penumbral(),
    "penumbral_height_sq": score_classes.Penumbral(readout="height_sq"),
    "penumbral_distance": score_classes.Penumbral(readout="distance"),
    "umbral": score_classes.Umbral(),
    "umbral_height_sq": score_classes.Umbral(readout="height_sq"),
    "umbral_distance": score_classes.Umbral(readout="distance"),
    "finite_cone": score_classes.FinitePenumbral(),
    "half_space": score_classes.HalfSpaceDistance(),
    "hyperboloid": score_classes.HyperboloidDistance(),
}
#: bytes of shared memory that a program can have
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: columns of the tensor memory of sm_100, which all programs of a multiprocessor share
TENSOR_COLUMNS = 512
BATCH, HEADS, LENGTH = 2, 4, 512  # of the calls: as usual, neither 1 nor odd
# How triton calls the dtypes of tensors.
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Case(NamedTuple):
    """A kernel to compile. size: E, and Ev too. blocks: rows, columns, warps, stages, if not the kernel's default."""

    kernel: str
    score: str
    dtype: str
    size: int
    arch: int
    full: bool = False
    blocks: tuple[int, int, int, int] | None = None

    @property
    def gated(self) -> bool:
        """Whether it must run well: a plain call with the default blocks."""
        return not self.full and self.blocks is None

    def __str__(self) -> str:
        full = ", full" if self.full else ""
        tried = ", {}x{} {} warps {} stages".format(*self.blocks) if self.blocks else ""
        return f"{self.kernel}, {self.score}, {self.dtype}, E={self.size}, sm_{self.arch}{full}{tried}"


class Found(NamedTuple):
    """What became of a case.

    shared: bytes. instructions: in the loop over tiles, None if it was not recognised. columns: of tensor memory.
    rounds: whether float32 is multiplied on tensor cores, which round it to tf32.
    """

    case: Case
    blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    registers: int = 0
    spills: int = 0
    shared: int = 0
    instructions: int | None = None
    error: str | None = None
    columns: int = 0
    rounds: bool = False

    @property
    def per_pair(self) -> float | None:
        """Instructions of a thread for each of its pairs."""
        rows, columns, warps, _ = self.blocks
        return None if self.instructions is None else self.instructions / (rows * columns / (32 * warps))

    def reasons(self) -> list[str]:
        """Why it cannot run well, or at all."""
        if self.error:
            return [f"does not compile: {self.error}"]
        limit = SHARED[self.case.arch]
        return [
            *([f"{self.spills} instructions spill"] if self.spills else []),
            *([f"{self.shared} bytes of shared memory, of {limit}"] if self.shared > limit else []),
            *(
                [f"{self.columns} columns of tensor memory, of {TENSOR_COLUMNS}"]
                if self.columns > TENSOR_COLUMNS
                else []
            ),
            *(["float32 is multiplied as tf32"] if self.rounds else []),
        ]


class Recorder:
    """Stands in for a kernel, and keeps what it is called with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __getitem__(self, grid: object) -> Recorder:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named


def call_of(case: Case) -> FusedInputs:
    """A call as the backend receives it, of tensors without memory."""
    dtype = DTYPES[case.dtype]
    score = SCORES[case.score].for_size(case.size)
    tokens = torch.empty(BATCH, HEADS, LENGTH, case.size, dtype=dtype, device="meta")
    mask = tokens.new_empty(BATCH, HEADS, LENGTH, LENGTH) if case.full or case.kernel == "mask" else None
    seed = tokens.new_empty((), dtype=torch.int64) if case.full else None
    rest = (mask, case.full, 0.1 if case.full else 0.0, seed)
    points, value, bad, _ = prepare(Inputs(tokens, tokens, tokens, *rest, score))
    *_, parameters, spec = ops.call_arguments(score, points)
    mask, causal, dropout_p, seed = rest
    fixed = numbers_are_fixed(score) and not case.full  # there they are learned
    return FusedInputs(
        ops.rebuild(spec, parameters), points, value.to(dtype), bad, mask, seed, causal, dropout_p, fixed
    )


def launch_of(case: Case) -> tuple[Any, Recorder]:
    """The kernel of a case, and how launch.py starts it: what is compiled is what would run."""
    from coneheads.backends.triton import backward, forward, launch
    from coneheads.backends.triton.blocks import Blocks, default_blocks

    kernels = {"forward": forward.forward} | {name: getattr(backward, f"backward_{name}") for name in KERNELS[1:]}
    records = {name: Recorder() for name in kernels}

    def blocks(*arguments: Any) -> list[Blocks]:
        return [Blocks(*case.blocks) if case.blocks else default_blocks(*arguments)]

    call = call_of(case)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "declared_blocks", blocks))
        stack.enter_context(mock.patch.object(launch, "generation", return_value=case.arch // 10))
        stack.enter_context(mock.patch.object(launch, "forward_kernel", records["forward"]))
        for name in KERNELS[1:]:
            stack.enter_context(mock.patch.object(backward, f"backward_{name}", records[name]))
        out, lse = launch.forward(call)
        if case.kernel != "forward":
            wanted = Wanted(call.score.pair_fields if case.full else (), case.kernel == "mask")
            launch.backward(call, out, lse, out, lse, wanted)
    if not records[case.kernel].arguments:
        raise LookupError("a call of this kind does not start the kernel")
    return kernels[case.kernel], records[case.kernel]


def blocks_of(case: Case) -> list[tuple[int, int, int, int]]:
    """Its default blocks and those that are tried beside them on a GPU, of positions as wide as its size."""
    from coneheads.backends.triton.blocks import declared_blocks

    kernel = case.kernel if case.kernel == "forward" else f"backward_{case.kernel}"
    score = cast(int, number_of(SCORES[case.score]))
    declared = declared_blocks(kernel, score, case.size, DTYPES[case.dtype], case.arch // 10)
    return [(one.rows, one.columns, one.warps, one.stages) for one in declared]


def source_of(kernel: Any, record: Recorder) -> Any:
    """The kernel with the types of its arguments, and what triton would notice about them when it is called."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    given = dict(zip(kernel.arg_names, record.arguments, strict=False)) | record.named
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            tensor = isinstance(value, torch.Tensor)
            signature[parameter.name] = f"*{TYPES[value.dtype]}" if tensor else "i32" if abs(value) < 2**31 else "i64"
            if tensor or value % 16 == 0:  # torch aligns tensors
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_case(case: Case) -> Found:
    """Compiles a kernel and reads what came of it, in a process for which ``prepare_worker`` was called."""
    import triton
    from triton.backends.compiler import GPUTarget

    try:
        kernel, record = launch_of(case)
        options = {name: value for name, value in record.named.items() if name not in kernel.arg_names}
        blocks = (record.named["BM"], record.named["BN"], options["num_warps"], options["num_stages"])
        with contextlib.redirect_stdout(io.StringIO()):  # where triton prints whole programs that fail
            built = triton.compile(source_of(kernel, record), GPUTarget("cuda", case.arch, 32), options)
        usage, sass = read_tools(built.asm["cubin"])
    except Exception as error:  # compilers fail in many ways, and each is a result
        return Found(case, error=reason_of(error))
    loop = loop_over_tiles(sass)
    shared = built.metadata.shared + usage["SHARED"]  # what the program asks for, and what the system adds
    instructions = loop.instructions if loop else None
    columns = built.metadata.tmem_size or 0
    rounds = case.dtype == "float32" and multiplies_on_tensor_cores(sass)
    return Found(case, blocks, usage["REG"], spills(sass), shared, instructions, columns=columns, rounds=rounds)


def reason_of(error: BaseException) -> str:
    """In one line. Triton wraps an error once for each function, and shows code; the innermost says why, at its end."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'it says nothing'}"


def prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that asked decides
    os.environ.pop("TRITON_INTERPRET", None)  # kernels for the interpreter cannot be compiled
    torch.set_num_threads(1)


def compile_all(cases: Sequence[Case], jobs: int, progress: Progress) -> list[Found]:
    """Compiles in as many processes as ``jobs``. The results have the order of the cases."""
    found: dict[Case, Found] = {}
    # a fork of a process that has threads may hang
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare_worker)
    try:
        for future in as_completed([pool.submit(compile_case, case) for case in cases]):
            result = future.result()
            found[result.case] = result
            progress.advance()
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[case] for case in cases]
