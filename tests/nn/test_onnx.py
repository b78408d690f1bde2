"""ONNX: modules and converted models export with dynamic sizes, and onnxruntime gives PyTorch's numbers."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import coneheads
from coneheads.backends.inputs import in_onnx_export
from coneheads.integrations.conversion import convert
from coneheads.nn import ConeAttention, ConeMultiheadAttention
from tests.cases import BACKEND_NAMES, SCORE_NAMES

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = [
    # torch's exporter deep-copies its own deprecated classes
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}  # batch and length
SIZES = ((2, 7), (1, 1), (3, 33))


class SelfAttention(nn.Module):
    """One layer called as models call it, weights returned."""

    def __init__(self, layer, *, causal=False):
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, x):
        mask = None
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layer(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=not self.causal)


def encoder(score, **options):
    layer = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=16, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    convert(model, score, **options)
    return model.eval()


def exported(model, example, path, **shapes):
    """The graph in onnxruntime, as a function of tensors; and the model in ONNX's own form."""
    program = torch.onnx.export(model, kwargs=example, dynamo=True, dynamic_shapes=shapes or None, verbose=False)
    program.save(path)
    session = onnxruntime.InferenceSession(path)

    def run(**inputs):
        got = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return [torch.from_numpy(array) for array in got]

    return run, program.model_proto


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_converted_encoder_gives_the_same_in_onnxruntime_at_other_sizes(tmp_path):
    model = encoder("penumbral", learn_gamma=True)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.cone.log_gamma += torch.tensor([0.5, 1.5])
    example = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    shapes = dict.fromkeys(example, DYNAMIC)
    run, graph = exported(model, example, tmp_path / "encoder.onnx", **shapes)
    held = [torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in graph.graph.initializer]
    for layer in model.layers:  # as a constant of the graph, whatever the optimizer of the exporter made of it
        gamma = layer.self_attn.cone.log_gamma.detach().exp()
        assert any(t.numel() == 2 and torch.allclose(t.flatten().abs().to(gamma), gamma) for t in held)
    assert {node.domain for node in graph.graph.node} == {""}  # ONNX's own operators alone
    for batch, length in SIZES:
        src = torch.randn(batch, length, 16)
        for padding in (torch.zeros(batch, length, dtype=torch.bool), torch.arange(length).expand(batch, -1) > 4):
            with torch.inference_mode():
                want = model(src, src_key_padding_mask=padding)
            assert_same(run(src=src, src_key_padding_mask=padding)[0], want)


def test_near_and_equal_tokens_are_right_to_the_rounding_of_their_features(tmp_path):
    """Scores of pairs that nearly coincide are what a distance from a product in float32 would get wrong."""

    class Scores(nn.Module):
        def forward(self, x):
            return coneheads.attention_scores(x, x, score="laplacian")

    run, _ = exported(Scores().eval(), {"x": torch.randn(3, 6, 8)}, tmp_path / "scores.onnx")
    x = 100 + torch.randn(3, 6, 8)
    x[:, 1] = x[:, 0]
    x[:, 2] = x[:, 0] * (1 + 1e-6)
    want = coneheads.attention_scores(x.double(), x.double(), score="laplacian").float()
    (got,) = run(x=x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7 * x.norm(dim=-1).max().item())


def test_an_explicit_fused_backend_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr("coneheads.backends.in_onnx_export", lambda: True)
    q = torch.randn(1, 2, 3, 4)
    for backend in set(BACKEND_NAMES) - {"reference"}:
        with pytest.raises(ValueError, match=r"torch\.onnx\.export.*Those that can: 'reference'"):
            coneheads.attention(q, q, q, enable_gqa=True, backend=backend)
    # and "auto" takes the one that can
    exact = coneheads.attention(q, q, q, enable_gqa=True, backend="reference")
    assert torch.equal(coneheads.attention(q, q, q, enable_gqa=True), exact)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_without_onnx_keeps_the_fused_operator(strict):
    model = SelfAttention(ConeMultiheadAttention(16, 2, batch_first=True), causal=True)
    program = torch.export.export(model.eval(), (torch.randn(2, 5, 16),), strict=strict)
    assert any("coneheads" in str(node.target) for node in program.graph.nodes)
    assert not in_onnx_export()


def test_strict_export_sees_that_onnx_is_the_goal(monkeypatch):
    """torch.onnx.export falls back to strict export, in which torch's own flag for ONNX reads False."""
    monkeypatch.setattr("torch.onnx.is_in_onnx_export", lambda: True)
    program = torch.export.export(ConeAttentionAlone().eval(), (torch.randn(2, 2, 5, 8),), strict=True)
    assert not any("coneheads" in str(node.target) for node in program.graph.nodes)


class ConeAttentionAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.cone = ConeAttention("umbral", heads=2, size=8)

    def forward(self, x):
        return self.cone(x, x, x)[0]


@pytest.mark.slow
def test_converted_encoder_exports_causal_and_without_padding(tmp_path):
    model = encoder("umbral")

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = model

        def forward(self, src):
            mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1])
            return self.encoder(src, mask=mask, is_causal=True)

    for wrapped, name in ((Causal(), "causal"), (model, "plain")):
        run, _ = exported(wrapped.eval(), {"src": torch.randn(2, 5, 16)}, tmp_path / f"{name}.onnx", src=DYNAMIC)
        for batch, length in SIZES:
            src = torch.randn(batch, length, 16)
            assert_same(run(src=src)[0], wrapped(src).detach())


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", SCORE_NAMES)
def test_every_score_exports(score, causal, tmp_path):
    layer = ConeMultiheadAttention(16, 4, batch_first=True, score=score, num_kv_heads=2, qk_dim=5, learn_gamma=True)
    model = SelfAttention(layer, causal=causal).eval()
    run, _ = exported(model, {"x": torch.randn(2, 5, 16)}, tmp_path / "layer.onnx", x=DYNAMIC)
    for batch, length in SIZES:
        x = torch.randn(batch, length, 16)
        want = [tensor.detach() for tensor in model(x) if tensor is not None]
        for a, b in zip(run(x=x), want, strict=True):
            assert_same(a, b)
