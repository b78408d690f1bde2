"""``convert`` on PyTorch's own transformers: nothing bypasses the new attention, and ``revert`` leaves no trace."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import coneheads
from coneheads.integrations import torch_nn
from coneheads.nn import ConeMultiheadAttention
from tests.cases import needs_compiler
from tests.integrations.torch_nn_models import MODELS, WIDTH, decoder_layer, encoder_layer

PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
# PyTorch's, when an unconverted encoder takes its own way
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
ENCODERS = ["nn.TransformerEncoderLayer", "nn.TransformerEncoderLayer(norm_first)", "nn.TransformerEncoder"]


def run(model):
    """The output for the inputs that convert probes with."""
    out = model(**torch_nn.inputs_for(model))
    return out[0] if isinstance(out, tuple) else out


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}


def count_calls(model, monkeypatch):
    """The calls of each layer's attention from now on. Not by hooks: PyTorch's fast path gives way to a hook."""
    calls = {}
    for name, layer in layers_of(model).items():

        def counted(*args, name=name, forward=layer.cone.forward, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer.cone, "forward", counted)
    return calls


def attributes(model):
    """All that a module holds beside its submodules, by name."""
    return {
        name: {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters")}
        for name, module in model.named_modules()
    }


@NESTED
@pytest.mark.parametrize("name", MODELS)
def test_convert_keeps_all_weights_and_revert_leaves_no_trace(name):
    model = MODELS[name]().eval()
    parameters, before, kinds = dict(model.named_parameters()), attributes(model), [type(m) for m in model.modules()]
    with torch.no_grad():
        want = run(model)
    done = coneheads.convert(model, "umbral")
    assert done.probed
    assert {layer.name for layer in done.swapped} == set(layers_of(model))
    assert not done.skipped
    assert all(type(layer) is ConeMultiheadAttention for layer in layers_of(model).values())
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys()
    assert all(now[key] is parameter for key, parameter in parameters.items())
    assert not torch.allclose(run(model), want, atol=1e-3)
    assert set(coneheads.revert(model)) == set(layers_of(model))
    assert [type(module) for module in model.modules()] == kinds
    assert attributes(model) == before
    with torch.no_grad():
        assert torch.equal(run(model), want)


@NESTED
@pytest.mark.parametrize("name", MODELS)
def test_a_model_converted_to_the_dot_product_computes_the_same(name):
    model = MODELS[name]().eval()
    with torch.no_grad():
        want = run(model)
        coneheads.convert(model, "dot")
        got = run(model)
    if name == "nn.TransformerEncoder":
        # PyTorch's nested tensors come back with zeros where the input was padded; ours are computed.
        want, got = want[:, :2], got[:, :2]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_calls_its_attention_in_every_mode(name, training, gradients, monkeypatch):
    model = MODELS[name]()
    coneheads.convert(model)
    model.train(training)
    calls = count_calls(model, monkeypatch)
    with gradients():
        run(model)
    assert calls == dict.fromkeys(layers_of(model), 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_eval_gives_what_training_gives(name, padded):
    model = MODELS[name]()
    coneheads.convert(model, "umbral")
    x, given = torch.randn(2, 5, WIDTH), {"src_key_padding_mask": PADDED} if padded else {}
    trained = model(x, **given)
    model.eval()
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(model(x, **given), trained)


@NESTED
@pytest.mark.parametrize("name", ENCODERS)
def test_padding_and_causal_masks_mean_what_they_meant(name):
    model = MODELS[name]().eval()
    x, mask = torch.randn(2, 5, WIDTH), nn.Transformer.generate_square_subsequent_mask(5)
    hint = {"mask" if name == "nn.TransformerEncoder" else "src_mask": mask, "is_causal": True}
    with torch.no_grad():
        want, want_causal = model(x, src_key_padding_mask=PADDED), model(x, **hint)
        coneheads.convert(model, "dot")
        got, got_causal = model(x, src_key_padding_mask=PADDED), model(x, **hint)
    torch.testing.assert_close(got[~PADDED], want[~PADDED], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_causal, want_causal, rtol=1e-4, atol=1e-5)


def test_a_causal_decoder_does_not_see_the_future():
    model = MODELS["nn.Transformer"]().eval()
    coneheads.convert(model, "umbral")
    source, target = torch.randn(2, 6, WIDTH), torch.randn(2, 5, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    before = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    target[:, 3:] += 1
    after = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:], atol=1e-2)


@pytest.mark.parametrize("where", ["layers.1.*", lambda name: name.startswith("layers.1")])
def test_where_one_layer_is_converted_the_encoder_makes_no_nested_tensor(where):
    model = nn.TransformerEncoder(encoder_layer(), 2).eval()
    done = coneheads.convert(model, where=where)
    assert [layer.name for layer in done.swapped] == ["layers.1.self_attn"]
    assert [layer.name for layer in done.skipped] == ["layers.0.self_attn"]
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    with torch.no_grad():
        assert model(torch.randn(2, 5, WIDTH), src_key_padding_mask=PADDED).isfinite().all()


def test_the_encoder_takes_nested_tensors_again_when_its_last_layer_is_restored():
    model = nn.TransformerEncoder(encoder_layer(), 2)
    coneheads.convert(model)
    assert not model.use_nested_tensor
    assert torch_nn.restore(model, {"layers.0.self_attn"}) == ["layers.0.self_attn"]
    assert not model.use_nested_tensor
    assert torch_nn.restore(model) == ["layers.1.self_attn"]
    assert model.use_nested_tensor
    assert torch_nn.NESTED_BEFORE not in vars(model)


@NESTED
def test_a_layer_converted_behind_the_encoders_back_is_no_silent_error():
    model = nn.TransformerEncoder(encoder_layer(), 1).eval()
    coneheads.convert(model.layers[0])
    with torch.no_grad(), pytest.raises(TypeError, match="use_nested_tensor = False"):
        model(torch.randn(2, 5, WIDTH), src_key_padding_mask=PADDED)


def test_an_encoder_built_with_our_layer_calls_it(monkeypatch):
    layer = encoder_layer()
    layer.self_attn = ConeMultiheadAttention(WIDTH, 4, batch_first=True, qk_dim=2)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        model = nn.TransformerEncoder(layer, 2).eval()
    calls = count_calls(model, monkeypatch)
    with torch.no_grad():
        model(torch.randn(2, 5, WIDTH), src_key_padding_mask=PADDED)
    assert calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}


@pytest.mark.parametrize("name", ["nn.TransformerEncoder", "nn.Transformer"])
def test_copies_and_pickles_stay_converted_and_revert_alone(name):
    model = MODELS[name]().eval()
    coneheads.convert(model, learn_gamma=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        want = run(model)
        for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(run(again), want)
            coneheads.revert(again)
            assert not torch.allclose(run(again)[:, :2], want[:, :2], atol=1e-3)
        assert torch.equal(run(model), want)


def test_gamma_is_learned_for_each_head_and_saved():
    model = nn.TransformerEncoder(encoder_layer(), 2)
    coneheads.convert(model, "umbral", learn_gamma=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, WIDTH)
    model(x)[..., 0].square().sum().backward()
    gammas = [layer.cone.log_gamma for layer in layers_of(model).values()]
    before = [gamma.detach().clone() for gamma in gammas]
    assert all(gamma.grad.shape == (4,) and (gamma.grad != 0).all() for gamma in gammas)
    optimizer.step()
    assert all((gamma != old).all() for gamma, old in zip(gammas, before, strict=True))
    again = nn.TransformerEncoder(encoder_layer(), 2)
    coneheads.convert(again, "umbral", learn_gamma=True)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_the_cone_is_of_the_dtype_and_mode_of_its_layer():
    model = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, dtype=torch.float64).eval()
    coneheads.convert(model, learn_gamma=True)
    assert model.self_attn.cone.log_gamma.dtype == torch.float64
    assert not any(module.training for module in model.modules())


class Derived(nn.MultiheadAttention):
    """A layer of somebody else's."""


def why_not(layer):
    (found,) = torch_nn.find(layer, None)
    return found.why_not


def test_layers_that_cannot_be_converted_say_why():
    assert "Derived is derived from nn.MultiheadAttention" in why_not(Derived(WIDTH, 4))
    assert "heads have 1 feature" in why_not(nn.MultiheadAttention(4, 4))
    assert "was built with the score 'umbral'" in why_not(ConeMultiheadAttention(WIDTH, 4, score="umbral"))
    hooked = nn.MultiheadAttention(WIDTH, 4)
    hooked.forward = hooked.forward
    assert "forward was replaced" in why_not(hooked)
    layer = nn.MultiheadAttention(WIDTH, 4)
    assert why_not(layer) == ""
    coneheads.convert(layer)
    assert "it has the score 'penumbral' already: call revert first" in why_not(layer)
    with pytest.raises(ValueError, match="call revert first"):
        coneheads.convert(layer, "umbral")


def test_revert_leaves_a_layer_that_was_built_with_cones():
    model = nn.ModuleList([ConeMultiheadAttention(WIDTH, 4), nn.MultiheadAttention(WIDTH, 4)])
    done = coneheads.convert(model, "umbral")
    assert [layer.name for layer in done.skipped] == ["0"]
    assert coneheads.revert(model) == ["1"]
    assert type(model[0]) is ConeMultiheadAttention


def test_inputs_are_known_for_models_of_torch_alone():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = encoder_layer()

    class Changed(nn.TransformerEncoderLayer):
        pass

    assert torch_nn.inputs_for(Wrapped()) is None
    assert torch_nn.inputs_for(Changed(WIDTH, 4)) is None
    assert torch_nn.inputs_for(nn.Linear(3, 3)) is None
    assert torch_nn.inputs_for(encoder_layer(device="meta")) is None
    assert torch_nn.inputs_for(nn.Transformer(WIDTH, 4, custom_encoder=encoder_layer())) is None
    assert all(torch_nn.inputs_for(make()) for make in MODELS.values())


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
def test_a_converted_encoder_layer_compiles_as_one_graph():
    model = encoder_layer().eval()
    coneheads.convert(model, "umbral", learn_gamma=True)
    x = torch.randn(2, 5, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, src_key_padding_mask=PADDED), model(x, src_key_padding_mask=PADDED))


@pytest.mark.parametrize(("name", "training"), [("nn.TransformerEncoder", False), ("nn.TransformerDecoderLayer", True)])
def test_a_converted_model_is_traced_as_one_graph(name, training):
    model = MODELS[name]()
    coneheads.convert(model)
    model.train(training)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(compiled(**torch_nn.inputs_for(model)), run(model))


def test_decoder_layers_convert_both_of_their_attentions():
    layer = decoder_layer()
    assert [found.name for found in coneheads.convert(layer).swapped] == ["self_attn", "multihead_attn"]
