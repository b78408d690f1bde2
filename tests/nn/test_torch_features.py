"""The modules under what PyTorch offers: compiler, export, autocast, checkpointing, transforms, copies and devices."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

from coneheads.backends import cpp
from coneheads.integrations.conversion import convert
from coneheads.nn import ConeMultiheadAttention


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Self-attention with everything that is learned, padding and a float mask."""

    def __init__(self, score="penumbral", **options):
        super().__init__()
        options = {"num_kv_heads": 2, "qk_dim": 5, "learn_gamma": True, "learn_radius": True, **options}
        self.attention = ConeMultiheadAttention(16, 4, batch_first=True, score=score, **options)

    def forward(self, x, padding=None, bias=None):
        return self.attention(x, x, x, padding, need_weights=False, attn_mask=bias)[0]


def inputs(batch, length):
    padding = torch.arange(length).expand(batch, -1) >= torch.arange(batch)[:, None] + 3
    return torch.randn(batch, length, 16, requires_grad=True), padding, torch.randn(length, length)


def gradients(model, out, x):
    """Of a fixed weighing of the output, for the input and all parameters."""
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return torch.autograd.grad(out, [x, *model.parameters()], weight)


def assert_same_gradients(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_compiled_once_for_all_sizes_with_the_gradients_of_eager():
    model = Layer(dropout=0.3, learn_radius=False)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((6, 7), (3, 9)):
            arguments = inputs(batch, length)
            results = []
            for run in (compiled, model):
                torch.manual_seed(5)  # the same weights are dropped
                out = run(*arguments)
                results.append((out, gradients(model, out, arguments[0])))
            torch.testing.assert_close(results[0][0], results[1][0])
            assert_same_gradients(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


EXPORTED = """
import sys, torch
if sys.argv[1] == "with":
    import coneheads.nn
saved = torch.load(sys.argv[2] + ".inputs")
program = torch.export.load(sys.argv[2])
torch.testing.assert_close(program.module()(saved["x"], saved["padding"]), saved["want"])
"""


def test_exported_program_runs_at_other_sizes_and_in_a_process_that_imports_coneheads(tmp_path):
    model = Layer(learn_radius=False).eval()
    sizes = {0: Dim("batch"), 1: Dim("length")}
    x, padding, _ = inputs(2, 5)
    program = torch.export.export(model, (x.detach(), padding), dynamic_shapes=(sizes, sizes))
    x, padding, _ = inputs(4, 9)
    want = model(x, padding).detach()
    torch.testing.assert_close(program.module()(x.detach(), padding), want)

    path = tmp_path / "layer.pt2"
    torch.export.save(program, path)
    torch.save({"x": x.detach(), "padding": padding, "want": want}, f"{path}.inputs")
    runs = [
        subprocess.Popen([sys.executable, "-c", EXPORTED, how, path], stderr=subprocess.PIPE, text=True)
        for how in ("with", "without")
    ]
    errors = [run.communicate()[1] for run in runs]
    assert runs[0].returncode == 0, errors[0]
    # Without the import torch does not know the operator, names it, and says that it has to be imported.
    assert runs[1].returncode != 0
    assert "failed to resolve torch.ops.coneheads" in errors[1]
    assert "import the custom op" in errors[1]


def test_exported_program_without_kernels_says_how_to_export_one_that_needs_none(monkeypatch):
    monkeypatch.setattr(cpp, "unavailable", lambda: "there is no compiler")
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"there is no compiler.*CONEHEADS_CPP=off"):
        cpp._load_and_run(q, q, q)


def test_autocast_gives_half_precision_near_the_full_one_and_keeps_parameters_full():
    model = Layer()
    x, padding, _ = inputs(3, 8)
    exact = model(x, padding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, padding)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=0, atol=0.03)
    half, full = gradients(model, out, x), gradients(model, exact, x)
    for got, want, parameter in zip(half, full, [x, *model.parameters()], strict=True):
        assert got.dtype == parameter.dtype == torch.float32
        assert got.isfinite().all()
        assert (got - want).norm() <= 0.05 * want.norm() + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_module_in_another_dtype(dtype):
    full = Layer()
    model = copy.deepcopy(full).to(dtype)
    x, padding, _ = inputs(3, 8)
    out = model(x.to(dtype), padding)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), full(x, padding), rtol=0, atol=0.03)
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.dtype == dtype for parameter in model.parameters())


def test_checkpointing_gives_the_same_gradients_with_dropout():
    model = Layer(dropout=0.4)
    x, padding, bias = inputs(2, 7)
    torch.manual_seed(3)
    want = gradients(model, model(x, padding, bias), x)
    torch.manual_seed(3)
    out = checkpoint(model, x, padding, bias, use_reentrant=False)
    assert_same_gradients(gradients(model, out, x), want, rtol=0, atol=0)


def test_ensemble_by_vmap_over_stacked_parameters():
    models = [Layer().eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x, padding, _ = inputs(2, 6)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def call(parameters, buffers, x):
        return torch.func.functional_call(skeleton, (parameters, buffers), (x, padding))

    got = torch.vmap(call, (0, 0, None))(parameters, buffers, x)
    want = torch.stack([model(x, padding) for model in models])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradients_of_torch_func_are_those_of_autograd():
    model = Layer()
    x, padding, _ = inputs(2, 6)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x, padding)).square().sum()

    got = torch.func.grad(loss)(parameters)
    model(x, padding).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_deterministic_algorithms_are_kept_and_give_the_same_twice():
    model = Layer(dropout=0.2)
    x, padding, bias = inputs(3, 40)
    torch.use_deterministic_algorithms(True)
    try:
        twice = []
        for _ in range(2):
            torch.manual_seed(1)
            twice.append(gradients(model, model(x, padding, bias), x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_gradients(*twice, rtol=0, atol=0)


def test_inference_mode_gives_the_numbers_of_eager():
    model = Layer().eval()
    x, padding, bias = inputs(2, 6)
    with torch.inference_mode():
        got = model(x, padding, bias)
    torch.testing.assert_close(got, model(x, padding, bias))


def test_meta_device_then_empty_then_a_checkpoint():
    source = Layer()
    with torch.device("meta"):
        model = Layer()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    x, padding, bias = inputs(2, 6)
    assert model(*(t.to("meta") for t in (x, padding, bias))).shape == (2, 6, 16)
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(model(x, padding, bias), source(x, padding, bias))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_converted_encoder_give_the_same(how):
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    convert(model, "umbral", learn_gamma=True)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    x = torch.randn(2, 5, 16)
    assert torch.equal(copied.eval()(x), model.eval()(x))
    with torch.no_grad():
        copied.layers[0].self_attn.cone.log_gamma += 1
    assert not torch.equal(copied(x), model(x))
