"""``convert`` and ``revert`` on models of torch_geometric."""

import io

import pytest
import torch
from torch import nn

from coneheads.integrations.conversion import convert, revert
from coneheads.nn.edge_scores import EdgeAttention
from coneheads.scores import Penumbral, Umbral

pyg = pytest.importorskip("torch_geometric.nn")

from coneheads.integrations.pyg import REFUSED as REASONS  # noqa: E402
from coneheads.integrations.pyg import ConeGATConv, ConeTransformerConv  # noqa: E402
from tests.integrations.pyg_models import CHANNELS, MODELS, NODES, REFUSED, graph, layer  # noqa: E402

both = pytest.mark.parametrize("kind", [ConeGATConv, ConeTransformerConv])


@pytest.mark.parametrize("name", MODELS)
def test_convert_keeps_the_weights_and_revert_makes_the_model_as_it_was(name):
    model, inputs = MODELS[name]().eval(), graph()
    before, names, parameters = model(*inputs), list(model.state_dict()), dict(model.named_parameters())
    random = torch.get_rng_state()
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    done = convert(model, "umbral", learn_gamma=True, probe=inputs)
    assert len(done) > 0
    assert done.probed
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.allclose(model(*inputs), before)
    for found in done.swapped:
        model.get_submodule(found.name).cone.get_parameter("log_gamma")
    model(*inputs).sum().backward()
    assert not [n for n in model.state_dict() if n not in names and not n.endswith("cone.log_gamma")]
    assert sorted(revert(model)) == sorted(found.name for found in done.swapped)
    assert torch.equal(model(*inputs), before)
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[n] for n, parameter in model.named_parameters())
    assert {name: list(vars(module)) for name, module in model.named_modules()} == attributes


def test_converted_layers_are_those_that_one_can_build():
    model, (x, edge_index) = MODELS["GATConv"](), graph()
    convert(model, "umbral", learn_gamma=True)
    built = layer(ConeGATConv, score="umbral", learn_gamma=True)
    built.load_state_dict(model.convs[0].state_dict())
    assert torch.equal(built(x, edge_index), model.convs[0](x, edge_index))


def test_a_converted_transformer_with_the_dot_product_is_the_old_one():
    model, inputs = MODELS["TransformerConv"](), graph()
    before, names = model(*inputs), list(model.state_dict())
    convert(model, "dot", probe=inputs)
    torch.testing.assert_close(model(*inputs), before)
    assert list(model.state_dict()) == names  # nothing is learned


def test_every_parameter_of_a_converted_gat_gets_a_gradient():
    model, inputs = MODELS["GATConv"](), graph()
    convert(model, learn_gamma=True, learn_radius=True)
    model(*inputs).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not [name for name in model.state_dict() if "att_" in name]


def test_the_old_score_follows_a_model_that_moved():
    model, (x, edge_index) = MODELS["GATConv"](), graph()
    before = model(x, edge_index)
    convert(model)
    revert(model.double())
    assert model.convs[0].att_src.dtype == torch.float64
    torch.testing.assert_close(model(x.double(), edge_index).float(), before)


def test_a_converted_model_comes_back_from_a_pickle_and_can_still_be_reverted():
    model, inputs = MODELS["GATConv"](), graph()
    before = model(*inputs)
    convert(model, Penumbral(gamma=3.0), learn_radius=True)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert torch.equal(loaded(*inputs), model(*inputs))
    revert(loaded)
    assert torch.equal(loaded(*inputs), before)


@pytest.mark.parametrize("explain", [False, True])
@both
def test_a_layer_whose_explain_was_set_is_converted_all_the_same(kind, explain):
    """PyG then binds the old class's propagate to the layer, where it would outlive a change of class."""
    conv, (x, edge_index) = layer(kind.__mro__[2]), graph()
    conv._edge_mask, conv._apply_sigmoid = torch.ones(edge_index.shape[1]), False
    conv._loop_mask = torch.ones(edge_index.shape[1], dtype=torch.bool)
    conv.explain = explain
    before = conv(x, edge_index)
    convert(conv, Umbral(), probe=(x, edge_index))
    assert conv.explain is explain
    built = layer(kind, score=Umbral())
    built.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x, edge_index), built(x, edge_index))
    built.explain = False
    built._edge_mask, built._apply_sigmoid, built._loop_mask = conv._edge_mask, False, conv._loop_mask
    built.explain = True  # also in a layer that was never converted, after one of its base was made
    torch.testing.assert_close(conv(x, edge_index), built(x, edge_index))
    revert(conv)
    assert torch.equal(conv(x, edge_index), before)


def test_layers_between_types_of_nodes_are_found():
    edges = {("a", "to", "b"): pyg.GATConv((-1, -1), 4, add_self_loops=False), ("b", "of", "a"): pyg.SAGEConv(-1, 4)}
    model = pyg.HeteroConv(edges)
    x = {"a": torch.randn(3, 5), "b": torch.randn(2, 7)}
    index = {("a", "to", "b"): torch.tensor([[0, 1], [0, 1]]), ("b", "of", "a"): torch.tensor([[0, 1], [0, 1]])}
    assert len(convert(model, probe=(x, index))) == 1


def test_where_names_the_layers():
    model, inputs = MODELS["GATConv"](), graph()
    done = convert(model, where="convs.1", probe=inputs)
    assert [found.name for found in done.swapped] == ["convs.1"]
    assert type(model.convs[0]) is pyg.GATConv
    with pytest.raises(ValueError, match="has cone attention already"):
        convert(model.convs[1])


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=REASONS[name]):
        convert(REFUSED[name]())


def test_layers_that_do_not_attend_are_not_spoken_of():
    for conv in (pyg.GCNConv(4, 4), pyg.GeneralConv(4, 4, attention=False), pyg.HypergraphConv(4, 4)):
        with pytest.raises(ValueError, match="has no attention layer"):
            convert(conv)


def test_a_subclass_and_a_head_of_one_feature_are_refused():
    class Mine(pyg.GATConv):
        pass

    with pytest.raises(ValueError, match="it is a subclass, which may have changed the score"):
        convert(Mine(4, 4))
    with pytest.raises(ValueError, match="out_channels=1"):
        convert(pyg.TransformerConv(4, 1))


def test_a_failing_probe_leaves_the_model_as_it_was():
    model, (x, edge_index) = MODELS["GATConv"](), graph()
    before = model(x, edge_index)
    with pytest.raises(RuntimeError, match="probe forward of the converted model failed"):
        convert(model, probe=(x, edge_index + NODES))
    assert torch.equal(model(x, edge_index), before)
    assert not [module for module in model.modules() if isinstance(module, EdgeAttention)]


def test_attention_of_torch_inside_a_layer_of_pyg_is_found_by_its_own_file():
    conv = pyg.GPSConv(CHANNELS, pyg.GATConv(CHANNELS, CHANNELS), heads=2)
    done = convert(nn.ModuleList([conv]))
    assert {type(found.module).__name__ for found in done.swapped} >= {"ConeGATConv"}
    assert any(found.name.endswith("attn") for found in done.found)
