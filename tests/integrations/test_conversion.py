"""``convert`` and ``revert`` themselves: what they choose, what they refuse, and that a failure changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import coneheads
from coneheads.integrations import torch_nn
from coneheads.nn import ConeAttention


class TwoTowers(nn.Module):
    """Two encoders, of which one is never called if ``only_first``."""

    def __init__(self, only_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.second = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.only_first = only_first

    def forward(self, x, scale=1.0):
        x = self.first(x) * scale
        return x if self.only_first else self.second(x)


def cones(model):
    return {name for name, module in model.named_modules() if isinstance(module, ConeAttention)}


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def test_the_report_says_what_was_found_swapped_and_left():
    model = TwoTowers()
    done = coneheads.convert(model, "umbral", where="first.*")
    assert len(done) == 2
    assert [layer.name for layer in done.swapped] == ["first.layers.0.self_attn", "first.layers.1.self_attn"]
    assert [(layer.name, layer.why_not) for layer in done.skipped] == [
        ("second.layers.0.self_attn", "where= does not name it")
    ]
    assert done.score.name == "umbral"
    assert not done.probed
    text = str(done)
    assert "2 of 3 attention layers have the score 'umbral'" in text
    assert "first.layers.1.self_attn: torch.nn.modules.activation.MultiheadAttention" in text
    assert "second.layers.0.self_attn: left as it is, where= does not name it" in text
    assert cones(model) == {"first.layers.0.self_attn.cone", "first.layers.1.self_attn.cone"}


def test_where_may_be_a_function_of_the_name():
    assert len(coneheads.convert(TwoTowers(), where=lambda name: name.startswith("second"))) == 1


def test_a_second_score_can_be_given_to_the_rest():
    model = TwoTowers()
    coneheads.convert(model, "umbral", where="first.*")
    rest = coneheads.convert(model, "laplacian", where="second.*")
    assert len(rest) == 1
    assert model.first.layers[0].self_attn.cone.base.name == "umbral"
    assert model.second.layers[0].self_attn.cone.base.name == "laplacian"
    assert len(coneheads.revert(model)) == 3


def test_a_failed_second_conversion_leaves_the_first_as_it_was():
    model = TwoTowers(only_first=True)
    coneheads.convert(model, "umbral", where="first.*")
    before = model(X)
    with pytest.raises(RuntimeError, match=r"second\.layers\.0\.self_attn"):
        coneheads.convert(model, "laplacian", where="second.*", probe=X)
    assert cones(model) == {"first.layers.0.self_attn.cone", "first.layers.1.self_attn.cone"}
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("probe", [X, (X, 2.0), {"x": X, "scale": 2.0}], ids=["tensor", "tuple", "dict"])
def test_a_probe_shows_each_layer_called(probe):
    model = TwoTowers()
    model.first.eval()
    state = torch.get_rng_state()
    assert coneheads.convert(model, probe=probe).probed
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.first.training
    assert model.second.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_that_is_never_called_is_an_error_and_the_model_stays():
    model = TwoTowers(only_first=True)
    before = model(X)
    with pytest.raises(RuntimeError, match=r"did not call the new attention in 'second\.layers\.0\.self_attn'"):
        coneheads.convert(model, probe=X)
    assert cones(model) == set()
    assert torch.equal(model(X), before)


def test_a_probe_that_does_not_fit_is_an_error_and_the_model_stays():
    model = TwoTowers()
    with pytest.raises(RuntimeError, match="probe forward of the converted model failed"):
        coneheads.convert(model, probe=torch.randn(2, 5, 7))
    assert cones(model) == set()


def test_a_model_without_attention_is_an_error():
    with pytest.raises(ValueError, match="Linear has no attention layer of a library that convert knows"):
        coneheads.convert(nn.Linear(2, 2))


def test_a_pattern_that_matches_nothing_names_the_layers_there_are():
    with pytest.raises(
        ValueError, match=r"where='third\.\*' matches no attention layer .*'first\.layers\.0\.self_attn'"
    ):
        coneheads.convert(TwoTowers(), where="third.*")


def test_converting_twice_is_an_error_that_names_revert():
    model = TwoTowers()
    coneheads.convert(model, "umbral")
    with pytest.raises(ValueError, match="revert"):
        coneheads.convert(model, "penumbral")
    assert model.first.layers[0].self_attn.cone.base.name == "umbral"


def test_revert_gives_the_old_outputs_bit_for_bit():
    model = TwoTowers()
    before, state = model(X), copy.deepcopy(model.state_dict())
    coneheads.convert(model, "umbral", learn_gamma=True)
    assert not torch.allclose(model(X), before)
    assert coneheads.revert(model) == [
        "first.layers.0.self_attn",
        "first.layers.1.self_attn",
        "second.layers.0.self_attn",
    ]
    assert torch.equal(model(X), before)
    assert model.state_dict().keys() == state.keys()
    with pytest.raises(ValueError, match="nothing to revert"):
        coneheads.revert(model)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "bert"}, TypeError, "model must be a torch.nn.Module; got str 'bert'"),
        ({"score": "penumbra"}, ValueError, "Did you mean 'penumbral'"),
        ({"score": coneheads.Umbral}, TypeError, r"write Umbral\(\)"),
        ({"where": 3}, TypeError, "where must be a pattern or a function; got int 3"),
        ({"learn_gamma": "yes"}, TypeError, "learn_gamma must be True or False"),
        ({"score": "dot", "learn_radius": True}, ValueError, "has no radius and no light to learn"),
    ],
)
def test_bad_arguments_get_a_sentence_and_change_nothing(arguments, error, text):
    model = TwoTowers()
    with pytest.raises(error, match=text):
        coneheads.convert(**({"model": model} | arguments))
    assert cones(model) == set()


def test_a_compiled_model_is_refused():
    with pytest.raises(TypeError, match="convert it first, then call"):
        coneheads.convert(torch.compile(TwoTowers(), backend="eager"))


def test_a_model_that_is_distributed_already_is_refused():
    """What is learned would be no parameter of the wrapper: each process would go its own way."""
    wrapped = TwoTowers()
    wrapped.first.__class__ = type("FSDPEncoder", (FSDPModule, nn.TransformerEncoder), {})  # as fully_shard does it
    for change in (coneheads.convert, coneheads.revert):
        with pytest.raises(TypeError, match=r"model has a FSDPEncoder.*convert first, then wrap"):
            change(wrapped)
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(parallel)
    with pytest.raises(TypeError, match="model has a DistributedDataParallel"):
        coneheads.convert(nn.Sequential(parallel, TwoTowers()))


def test_a_converted_model_can_be_compiled():
    model = TwoTowers()
    coneheads.convert(model, "penumbral")
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(X), model(X), atol=1e-5)


def test_only_layers_that_were_asked_for_are_touched_when_swapping_fails(monkeypatch):
    model = TwoTowers()
    real = torch_nn.swap

    def swap_then_fail(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_nn, "swap", swap_then_fail)
    with pytest.raises(KeyboardInterrupt):
        coneheads.convert(model, "umbral")
    assert cones(model) == set()
