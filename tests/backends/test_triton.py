"""The Triton backend: its kernels in Triton's interpreter, when it serves a call, and a triton that is not there."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import coneheads
from coneheads import backends
from coneheads.backends import triton
from tests.cases import SCORE_NAMES

CASES = Path(__file__).with_name("interpreted")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
without_interpreter = pytest.mark.skipif(triton.interpreted(), reason="TRITON_INTERPRET=1: the CPU is served too")
# What runs in a process of its own, with the least number of tests that it must have.
PARTS = {"accuracy": 70, "contracts": 170, "features": 75}


@needs_triton
@pytest.mark.parametrize(("part", "least"), PARTS.items(), ids=PARTS)
def test_kernels_in_the_interpreter(part, least):
    run_cases("not slow", [part], least)


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter_at_length():
    run_cases("slow", PARTS, 40)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "part"), [(80, "accuracy"), (90, "contracts"), (100, "features")])
def test_kernels_on_the_emulated_gpu_at_length(arch, part):
    run_cases("not slow", [part], PARTS[part], EMULATED_ARCH=str(arch), TRITON_INTERPRET="0")


def run_cases(marked, parts, least, **environment):
    """Tests of the interpreter in a process of its own; so many must pass, and none fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", marked, *(str(CASES / f"{part}.py") for part in parts)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(
        command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True, timeout=1200, check=False
    )
    output = run.stdout[-10_000:] + run.stderr[-2000:]
    assert run.returncode == 0, output
    passed = re.search(r"(\d+) passed", run.stdout.splitlines()[-1])
    assert passed is not None, output
    assert int(passed[1]) >= least, output


# --- When it serves --------------------------------------------------------------------------------------------------


def inputs(size=8, value_size=8, dtype=torch.float32, device="cpu", score=None):
    query, value = (torch.empty(2, 4, 7, n, dtype=dtype, device=device) for n in (size, value_size))
    return backends.Inputs(query, query, value, None, False, 0.0, None, score or coneheads.Penumbral())


@pytest.fixture
def fake():
    """Tensors without data that know their device: there need not be a GPU."""
    with FakeTensorMode():
        yield


@without_interpreter
def test_tensors_of_the_cpu_are_refused_by_name():
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(
        ValueError, match="backend='triton' cannot serve this call: it runs on cuda and query is on cpu"
    ):
        coneheads.attention(query, query, query, backend="triton")


@without_interpreter
def test_auto_leaves_tensors_of_the_cpu_to_others():
    assert backends.choose("auto", inputs()).name in ("cpp", "chunked")


@needs_triton
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", triton.DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_auto_takes_the_kernels_for_tensors_of_a_gpu(name, dtype):
    score = coneheads.scores.resolve(name)
    for size in (2, 8, 256):
        call = inputs(size, 256, dtype, "cuda", score)
        assert backends.choose("auto", call).name == backends.choose("triton", call).name == "triton"


BEYOND = [
    ({"size": 257}, "it takes E up to 256 and here it is 257"),
    ({"value_size": 257}, "it takes Ev up to 256 and here it is 257"),
    ({"dtype": torch.float64}, "it takes float32, float16, bfloat16 and query is float64"),
]


@needs_triton
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("sizes", "reason"), BEYOND, ids=["E", "Ev", "float64"])
def test_what_the_kernels_cannot_serve_is_refused_by_name(sizes, reason):
    call = inputs(device="cuda", **sizes)
    with pytest.raises(ValueError, match=rf"backend='triton' cannot serve this call: {reason}.*'chunked', 'reference'"):
        backends.choose("triton", call)
    assert backends.choose("auto", call).name == "chunked"


class Own(coneheads.Laplacian):
    """A score that the kernels do not know: a subclass may have another formula."""


@needs_triton
@pytest.mark.usefixtures("fake")
def test_score_without_a_kernel_is_left_to_others():
    call = inputs(device="cuda", score=Own())
    with pytest.raises(ValueError, match="it has no kernel for the score Own"):
        backends.choose("triton", call)
    assert backends.choose("auto", call).name == "chunked"


# --- Blocks ----------------------------------------------------------------------------------------------------------


@needs_triton
@without_interpreter
def test_every_kernel_has_blocks_for_every_score_size_and_dtype():
    from coneheads.backends.triton import blocks, memory

    sizes = itertools.product(blocks.BLOCKS, range(11), (16, 32, 64, 128, 256), triton.DTYPES, (8, 9, 10))
    for chosen_by in sizes:
        default, *others = blocks.declared_blocks(*chosen_by)
        assert default == blocks.default_blocks(*chosen_by)
        assert len(others) == len({default, *others}) - 1
        for block in (default, *others):  # there are whole tiles in memory, of this many rows and columns
            assert memory.WHOLE.value % block.rows == memory.WHOLE.value % block.columns == 0


@needs_triton
@without_interpreter
def test_blocks_of_a_score_go_before_those_of_its_kernel():
    from coneheads.backends.triton import blocks

    for (kernel, score, dtype, width), own in blocks.BLOCKS_OF_SCORES.items():
        assert own != blocks.BLOCKS[kernel][dtype == torch.float32, width]  # else it says nothing new
        assert blocks.default_blocks(kernel, score, width, dtype) == own
    for generation, table in blocks.BLOCKS_OF_GPUS.items():
        for (kernel, score, dtype, width), own in table.items():
            assert own != blocks.default_blocks(kernel, score, width, dtype)
            assert blocks.default_blocks(kernel, score, width, dtype, generation) == own


@needs_triton
@without_interpreter
def test_what_a_kernel_writes_over_is_restored_while_blocks_are_tried():
    """A kernel runs many times then. Whatever it both loads and stores must be named."""
    from coneheads.backends.triton import backward, blocks, forward

    kernels = {name: getattr(backward, name) for name in blocks.BLOCKS if name != "forward"}
    for name, kernel in {"forward": forward.forward, **kernels}.items():
        written = set(re.findall(r"(?:tl\.store|memory\.store_rows)\(([A-Z_]+)", kernel.src))
        read = set(re.findall(r"(?:tl\.load|memory\.load_\w+|memory\.of_head)\(([A-Z_]+)", kernel.src))
        assert written, name
        assert written & read == set(blocks.CHANGED.get(name, [])), name
        tuned = blocks.tuned(kernel, (name, 2, 64, torch.float32, 8))
        assert tuned.restore_value == blocks.CHANGED.get(name, [])


@needs_triton
@pytest.mark.parametrize(("capability", "generation"), [((8, 6), 8), ((9, 0), 9), ((10, 3), 10), ((12, 0), 8)])
def test_generations_of_gpus(capability, generation, monkeypatch):
    from coneheads.backends.triton import launch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.generation.__wrapped__(torch.device("cuda", 0)) == generation
    assert launch.generation.__wrapped__(torch.device("cpu")) == 8


# --- A triton that is not there --------------------------------------------------------------------------------------

PROGRAM = """
import sys
{before}
import torch, coneheads
from coneheads.backends import triton
q = torch.randn(1, 2, 5, 8, requires_grad=True)
coneheads.attention(q, q, q).sum().backward()
assert q.grad.isfinite().all()
assert "triton" not in coneheads.available_backends()
print(triton.unavailable())
"""
HOOK = """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""


def said(before="", **environment):
    """What the program prints in another process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    run = subprocess.run(
        program, env={**inherited, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("before", "interpret"), [("sys.modules['triton'] = None", "0"), (HOOK, "1")], ids=["None in sys.modules", "hook"]
)
def test_missing_triton_changes_nothing_else_and_is_named(before, interpret):
    reason = said(before, TRITON_INTERPRET=interpret)
    assert reason == "it needs the package triton, which is not installed"


def test_broken_triton_changes_nothing_else_and_is_named(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise RuntimeError('no such driver')\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    reason = said(PYTHONPATH=paths, TRITON_INTERPRET="1")
    assert reason == "triton cannot be imported: RuntimeError: no such driver"


def test_import_of_coneheads_does_not_import_triton():
    code = "import sys, coneheads; print([name for name in sys.modules if name.split('.')[0] == 'triton'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "[]\n"
