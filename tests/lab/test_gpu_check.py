"""The gate of the Triton kernels: what it compiles, what it reads, and what it says."""

import json
from types import SimpleNamespace

import pytest
import torch

from coneheads.backends.triton import NUMBERS, number_of
from coneheads.lab import gpu_check, gpu_compile
from coneheads.lab.gpu_compile import Case, Found
from coneheads.lab.progress import Progress
from coneheads.lab.speed.screen import Screen

PLAIN = Case("forward", "dot", "float16", 64, 80)
BLOCKS = (64, 64, 4, 2)


def table(capsys, *found):
    """The exit code, and the printed lines."""
    results = {one.case: one for one in found}
    gpu_check.show(Screen(0), results)
    gpu_check.show_promises(Screen(0), gpu_check.promises(results))
    code = gpu_check.conclude(Screen(0), results)
    return code, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_every_number_of_a_score_is_compiled():
    assert sorted(number_of(score) for score in gpu_compile.SCORES.values()) == sorted(set(NUMBERS.values()))


def test_by_default_all_is_compiled_and_calls_with_everything_at_one_size(monkeypatch):
    pytest.importorskip("triton")
    asked = []
    monkeypatch.setattr(gpu_check, "unavailable", lambda: None)
    monkeypatch.setattr(gpu_check, "check", lambda cases, jobs, save: asked.extend(cases) or 0)
    assert gpu_check.main([]) == 0
    # sizes 16, 64, 64 with everything, 128; and five kernels for float32, four for the others
    plain = [case for case in asked if not case.blocks]
    assert len(plain) == len(set(plain)) == (5 + 4 + 4) * 11 * 4 * 3
    # and of dot product three more blocks each, of four kernels for float32 and three for the others
    dots = [case for case in asked if case.blocks and case.score == "dot"]
    assert len(dots) == len(set(dots)) == (4 + 3 + 3) * 3 * 3
    # and of the cones whose ratios are promised at most one: the default of dot product
    others = [case for case in asked if case.blocks and case.score != "dot"]
    assert {case.score for case in others} == {"penumbral", "umbral"}
    assert len(others) == len({case._replace(blocks=None) for case in others}) <= (4 + 3 + 3) * 2 * 3
    assert {case.size for case in asked if case.full or case.blocks} == {64}


def test_flags_choose(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_check, "unavailable", lambda: None)
    monkeypatch.setattr(gpu_check, "check", lambda cases, jobs, save: asked.extend(cases) or 3)
    flags = "--arch 90 --scores dot,umbral --dtypes bfloat16 --sizes 16 --kernels keys,mask"
    assert gpu_check.main(flags.split()) == 3
    expected = [Case(kernel, score, "bfloat16", 16, 90) for kernel in ("keys", "mask") for score in ("dot", "umbral")]
    assert asked == expected


def test_a_wrong_flag_is_told_what_there_is(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--arch", "80,75"])
    assert "there is no 75; choose from 80, 90, 100" in capsys.readouterr().err


def test_without_triton_one_sentence_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "unavailable", lambda: "it needs the package triton, which is not installed")
    assert gpu_check.main([]) == 1
    printed = capsys.readouterr()
    assert printed.err == "gpu_check cannot compile the kernels: it needs the package triton, which is not installed\n"
    assert not printed.out


def test_an_architecture_that_the_toolchain_lacks_is_named_and_left_out(monkeypatch, capsys):
    def compile_all(cases, jobs, progress):
        return [Found(c, error="no") if c.arch == 100 else Found(c, BLOCKS, 99, 0, 1024, 640) for c in cases]

    monkeypatch.setattr(gpu_check, "compile_all", compile_all)
    assert gpu_check.check([PLAIN, PLAIN._replace(arch=100)]) == 0
    out = capsys.readouterr().out
    assert "sm_100 was not checked: this triton cannot compile for it: no" in out
    assert "1 of 1 kernels" in out


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Found(PLAIN, BLOCKS, 255, 2, 1024, 640), "2 instructions spill"),
        (Found(PLAIN, BLOCKS, 99, 0, 166913, 640), "166913 bytes of shared memory, of 166912"),
        (Found(PLAIN, BLOCKS, 99, 0, 1024, 640, columns=544), "544 columns of tensor memory, of 512"),
        (Found(PLAIN, BLOCKS, 99, 0, 1024, 640, rounds=True), "float32 is multiplied as tf32"),
        (Found(PLAIN, error="PTXASError: bad"), "does not compile: PTXASError: bad"),
    ],
)
def test_gate_fails_and_names_the_kernel(found, reason, capsys):
    code, lines = table(capsys, found)
    assert code == 1
    assert f"fails: forward, dot, float16, E=64, sm_80: {reason}" in lines
    assert lines[2].endswith(reason)
    assert lines[-1].startswith("0 of 1 kernels")


def test_shared_memory_at_the_limit_fits(capsys):
    assert table(capsys, Found(PLAIN, BLOCKS, 99, 0, 163 * 1024, 640))[0] == 0
    assert table(capsys, Found(PLAIN._replace(arch=90), BLOCKS, 99, 0, 227 * 1024, 640))[0] == 0


def test_a_call_with_everything_is_marked_and_not_in_the_gate(capsys):
    code, lines = table(
        capsys, Found(PLAIN, BLOCKS, 99, 0, 1024, 640), Found(PLAIN._replace(full=True), BLOCKS, 255, 7, 1024, 900)
    )
    assert code == 0
    assert "not in the gate: forward, dot, float16, E=64, sm_80, full: 7 instructions spill" in lines
    assert lines[-1].startswith("1 of 1 kernels")


def test_ratios_count_instructions_a_pair_and_are_held_against_the_promise(capsys):
    # dot: 640, 320 and 320 instructions for the 32 pairs of a thread
    counts = {("dot", "forward"): 640, ("dot", "queries"): 320, ("dot", "keys"): 320}
    counts |= {("umbral", "forward"): 864, ("umbral", "queries"): 448, ("umbral", "keys"): 416}
    found = [
        Found(PLAIN._replace(score=score, kernel=kernel), BLOCKS, 99, 0, 1024, n)
        for (score, kernel), n in counts.items()
    ]
    code, lines = table(capsys, *found)
    assert code == 1
    assert "fails: umbral, float16, E=64, sm_80: more than 1.35 times the instructions of dot product" in lines
    assert "forward umbral 64x64 4 warps 2 stages 99 0 1.0 864 27.0 1.35" in lines
    # in all 1728 / 1280
    # rows: float32 alone has it. Blocks are those of dot product, and nothing else was tried.
    shown = "1.35 / 1.35 (1.35) 1.40 / 1.40 (1.40) 1.30 / 1.30 (1.30) 1.35 / 1.35 (1.35)"
    assert f"sm_80 float16 umbral 1.35 at most does not hold {shown}" in lines
    code, lines = table(capsys, *(one for one in found if one.case.kernel != "queries"))
    assert code == 0
    assert "sm_80 float16 umbral 1.35 at most holds 1.35 / 1.35 (1.35) 1.30 / 1.30 (1.30)" in lines


def test_ratios_are_those_of_defaults_of_the_same_blocks_and_to_the_best_blocks_of_dot_product(capsys):
    cone = PLAIN._replace(score="penumbral")
    found = [
        Found(PLAIN, BLOCKS, 99, 0, 1024, 640),
        Found(cone, (64, 128, 4, 2), 99, 0, 1024, 1920),  # 64 pairs a thread
        Found(cone._replace(blocks=BLOCKS), BLOCKS, 99, 0, 1024, 1000),
        Found(PLAIN._replace(blocks=(64, 128, 4, 2)), (64, 128, 4, 2), 200, 0, 1024, 960),
        Found(PLAIN._replace(blocks=(128, 128, 4, 2)), (128, 128, 4, 2), 255, 9, 1024, 640),  # spills: cannot be best
    ]
    code, lines = table(capsys, *found)
    assert code == 0
    assert "sm_80 float16 penumbral 1.6 at most holds 1.50 / 1.56 (2.00)" in lines
    assert "forward dot tried 64x128 4 warps 2 stages 200 0 1.0 960 15.0 0.75" in lines
    shown = "forward, dot, float16, E=64, sm_80, 128x128 4 warps 2 stages"
    assert f"not in the gate: {shown}: 9 instructions spill" in lines
    assert lines[-1].startswith("2 of 2 kernels")
    # with its own blocks a cone may look better than it is
    code, lines = table(capsys, *found[:2], found[2]._replace(instructions=1100), *found[3:])
    assert code == 1
    assert "sm_80 float16 penumbral 1.6 at most does not hold 1.50 / 1.72 (2.00)" in lines
    # and a comparison that cannot be made does not speak for it
    code, lines = table(capsys, *found[:2], Found(found[2].case, error="no"), *found[3:])
    assert code == 1
    assert "sm_80 float16 penumbral 1.6 at most does not hold 1.50 / - (2.00)" in lines


def test_other_blocks_of_dot_product_are_compiled_and_its_default_for_cones():
    pytest.importorskip("triton")
    options = SimpleNamespace(
        arch=[80], dtypes=["bfloat16"], sizes=[16, 64], kernels=["queries"], scores=["dot", "umbral"]
    )
    tried = [case for case in gpu_check.cases_of(options) if case.blocks]
    assert tried
    (umbral,) = [case for case in tried if case.score == "umbral"]
    assert umbral.blocks == gpu_compile.blocks_of(umbral._replace(score="dot", blocks=None))[0]
    tried.remove(umbral)
    assert {case[:5] for case in tried} == {("queries", "dot", "bfloat16", 64, 80)}
    assert not any(case.gated for case in [*tried, umbral])


def test_blocks_of_another_size_do_not_change_what_a_pair_costs():
    small = Found(PLAIN._replace(score="umbral"), (32, 32, 8, 1), 99, 0, 1024, 40)  # 4 pairs a thread
    dot = Found(PLAIN, BLOCKS, 99, 0, 1024, 320)  # 32 pairs a thread
    assert gpu_check.ratio_to_dot(small, {PLAIN: dot}) == 1


def test_a_step_counts_as_a_whole_only_if_all_its_kernels_were_counted(capsys):
    single = PLAIN._replace(dtype="float32")
    cases = [single._replace(kernel=kernel, score=score) for kernel in gpu_check.STEP for score in ("dot", "penumbral")]
    found = [Found(case, BLOCKS, 99, 0, 1024, 320 if case.score == "dot" else 640) for case in cases]
    *_, line, _, _ = table(capsys, *found)[1]
    assert line == "sm_80 float32 penumbral 1.6 at most does not hold" + " 2.00 / 2.00 (2.00)" * 5
    *_, line, _, _ = table(capsys, *found[:-1], found[-1]._replace(instructions=None))[1]
    assert line == "sm_80 float32 penumbral 1.6 at most does not hold" + " 2.00 / 2.00 (2.00)" * 3


def test_the_record_has_what_the_docs_quote(monkeypatch, tmp_path, capsys):
    pytest.importorskip("triton")
    cases = [PLAIN._replace(kernel=kernel, score=score) for kernel in gpu_check.STEP for score in ("dot", "umbral")]
    cases = [case for case in cases if case.kernel != gpu_check.ONLY_SINGLE]
    found = [Found(case, BLOCKS, 99, 0, 1024, 320 if case.score == "dot" else 400) for case in cases]
    found.append(Found(PLAIN._replace(full=True), BLOCKS, 255, 3, 2048, 400))
    monkeypatch.setattr(gpu_check, "compile_all", lambda *_: found)
    assert gpu_check.check([one.case for one in found], save=tmp_path / "gpu.json") == 0
    capsys.readouterr()
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["gate"] == [
        {"arch": 80, "full": False, "kernels": 6, "failed": 0, "registers": 99, "shared": 1024},
        {"arch": 80, "full": True, "kernels": 1, "failed": 1, "registers": 255, "shared": 2048},
    ]
    (promise,) = saved["promises"]
    expected = dict.fromkeys(("forward", "queries", "keys", "together"), 1.25)
    assert [promise[name] for name in ("by_default", "alike", "to_best")] == [expected] * 3


def test_a_folder_that_is_not_there_is_told_before_anything_is_compiled(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--save", str(tmp_path / "missing/gpu.json")])
    assert f"there is no folder {tmp_path / 'missing'}" in capsys.readouterr().err


def test_a_kernel_is_compiled_as_launch_starts_it():
    pytest.importorskip("triton")
    from coneheads.backends.triton import interpreted

    if interpreted():
        pytest.skip("this process interprets kernels")
    kernel, record = gpu_compile.launch_of(Case("queries", "umbral", "float16", 64, 80, full=True))
    source = gpu_compile.source_of(kernel, record)
    given = dict(zip(kernel.arg_names, record.arguments, strict=False)) | record.named
    divisible = {kernel.arg_names[i] for (i,) in source.attrs}
    assert source.signature["V"] == source.signature["MASK"] == "*fp16"
    assert source.signature["Q"] == "*fp32"  # which are multiplied as tf32
    assert source.signature["SEED"] == "*i64"
    assert source.signature["positions"] == "i32"
    assert ("positions" in divisible) == (given["positions"] % 16 == 0)
    assert {"Q", "length", "values"} <= divisible
    # A number that is 1 is compiled in: queries and keys have the same heads, and a mask's columns lie side by side.
    assert source.signature["group"] == source.signature["mask_column"] == "constexpr"
    constants = {kernel.arg_names[i]: value for (i,), value in source.constants.items()}
    expected = {"MASKED": "float", "CAUSAL": True, "DROPOUT": True, "FIRST": True, "SECOND": True, "MEASURE": "bounded"}
    assert {name: constants[name] for name in expected} == expected


def test_what_is_declared_is_what_triton_notices_about_the_arguments():
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    from coneheads.backends.triton import interpreted

    if interpreted():
        pytest.skip("this process interprets kernels")
    backend = make_backend(GPUTarget("cuda", 80, 32))
    for case in (Case("forward", "umbral", "bfloat16", 64, 80), Case("mask", "dot", "float32", 16, 80, full=True)):
        kernel, record = gpu_compile.launch_of(case)
        source = gpu_compile.source_of(kernel, record)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        arguments = [MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x for x in record.arguments]
        bound, specialization, options = bind(*arguments, **record.named)
        _, signature, constants, attributes = kernel._pack_args(backend, record.named, bound, specialization, options)
        assert source.signature == signature
        assert source.constants == constants
        assert {place: noticed for place, noticed in attributes.items() if noticed} == source.attrs


@pytest.fixture(scope="module")
def compiled():
    """Some kernels by a name, compiled in one process: to start one takes longer than to compile."""
    pytest.importorskip("triton")
    small = Case("forward", "dot", "float16", 16, 80)
    cases = {
        "dot": small,
        "cone": small._replace(score="umbral"),
        "too large": small._replace(blocks=(64, 128, 1, 1)),  # 256 scores a thread, and 255 registers
        "wrong": small._replace(blocks=(48, 64, 4, 1)),  # not a power of 2
        # What the interpreter does not notice: types of loop variables, and code after a return.
        **{kernel: Case(kernel, "penumbral", "float32", 16, 80) for kernel in gpu_compile.KERNELS},
        **{
            f"{kernel} in half": Case(kernel, "half_space", "bfloat16", 16, 80)
            for kernel in gpu_compile.KERNELS
            if kernel != "rows"
        },
    }
    found = gpu_compile.compile_all(list(cases.values()), 1, Progress(True, len(cases), "compiling"))
    return dict(zip(cases, found, strict=True))


def test_a_cone_and_dot_product_compile_for_sm_80(compiled):
    for found in (compiled["dot"], compiled["cone"]):
        assert found.error is None
        assert 0 < found.registers <= 255
        assert found.spills == 0
        assert 0 < found.shared < 163 * 1024
    assert gpu_check.ratio_to_dot(compiled["cone"], {compiled["dot"].case: compiled["dot"]}) > 1


def test_every_kernel_compiles(compiled):
    names = [name for name, found in compiled.items() if found.case.kernel in name]
    assert len(names) == 2 * len(gpu_compile.KERNELS) - 1
    for name in names:
        assert compiled[name].error is None, name
        assert compiled[name].spills == 0, name


def test_a_kernel_that_spills_is_an_offender(compiled, capsys):
    found = compiled["too large"]
    found = found._replace(case=found.case._replace(blocks=None))
    assert found.spills > 0
    code, lines = table(capsys, found)
    assert code == 1
    assert f"fails: forward, dot, float16, E=16, sm_80: {found.spills} instructions spill" in lines


def test_a_kernel_that_does_not_compile_is_a_result(compiled):
    (reason,) = compiled["wrong"].reasons()
    assert reason == "does not compile: ValueError: arange's range must be a power of 2"
