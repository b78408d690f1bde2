"""Cones on the edges of torch_geometric: the layers themselves."""

import copy
import io
import runpy
from pathlib import Path

import pytest
import torch

from coneheads.functional import attention
from coneheads.integrations.conversion import convert

pyg = pytest.importorskip("torch_geometric.nn")
from torch_geometric import EdgeIndex, typing  # noqa: E402
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer  # noqa: E402
from torch_geometric.utils import add_self_loops  # noqa: E402

from coneheads.integrations.pyg import ConeGATConv, ConeTransformerConv  # noqa: E402
from tests.integrations.pyg_models import CHANNELS, HEADS, MODELS, NODES, SIZE, graph, layer  # noqa: E402

# torch says both once in a process, of its own sparse matrices
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]
EXAMPLE = Path(__file__).parents[2] / "examples/graph.py"
FEATURES = 3
both = pytest.mark.parametrize("kind", [ConeGATConv, ConeTransformerConv])
some_scores = pytest.mark.parametrize("score", ["penumbral", "umbral", "dot"])
NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def sparse(edge_index, layout, values=None):
    """The transposed adjacency matrix, and the order of its entries among the edges."""
    order = (edge_index[1] * NODES + edge_index[0]).argsort()
    values = torch.ones(len(order)) if values is None else values[order]
    matrix = torch.sparse_coo_tensor(edge_index[:, order].flip(0), values, (NODES, NODES, *values.shape[1:]))
    matrix = matrix.coalesce()
    return (matrix if layout == torch.sparse_coo else matrix.to_sparse_csr()), order


def dense(conv, query, key, value, edge_index):
    """[N, H, E] each -> attention over the matrix of all pairs with the edges as its mask, [N_target, H, E]."""
    mask = torch.zeros(len(query), len(key), dtype=torch.bool)
    mask[edge_index[1], edge_index[0]] = True
    out = attention(*(t.transpose(0, 1) for t in (query, key, value)), mask, score=conv.cone.score())
    return out.transpose(0, 1)


# the numbers


@some_scores
@pytest.mark.parametrize("concat", [True, False])
def test_gat_is_dense_attention_with_the_edges_as_a_mask(score, concat):
    conv, (x, edge_index) = layer(ConeGATConv, score=score, concat=concat, residual=True), graph()
    features = conv.lin(x).view(NODES, HEADS, SIZE)
    expected = dense(conv, features, features, features, add_self_loops(edge_index, num_nodes=NODES)[0])
    expected = expected.flatten(1) if concat else expected.mean(1)
    torch.testing.assert_close(conv(x, edge_index), expected + conv.res(x) + conv.bias)


@some_scores
def test_transformer_is_dense_attention_with_the_edges_as_a_mask(score):
    conv, (x, edge_index) = layer(ConeTransformerConv, score=score), graph()
    features = (lin(x).view(NODES, HEADS, SIZE) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    expected = dense(conv, *features, edge_index).flatten(1) + conv.lin_skip(x)
    torch.testing.assert_close(conv(x, edge_index), expected)


OPTIONS = {
    "default": {},
    "heads averaged": {"concat": False},
    "gate": {"beta": True},
    "gate, heads averaged": {"beta": True, "concat": False},
    "no root, no bias": {"root_weight": False, "bias": False},
    "edge features": {"edge_dim": FEATURES},
    "mean of messages": {"aggr": "mean"},
    "reversed": {"flow": "target_to_source"},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_dot_product_makes_a_transformer_conv_again(options):
    theirs, ours = layer(pyg.TransformerConv, **options), layer(ConeTransformerConv, score="dot", **options)
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = graph()
    edges = torch.randn(edge_index.shape[1], FEATURES) if "edge_dim" in options else None
    results = []
    for conv in (theirs, ours):
        torch.manual_seed(1)  # of the dropout
        out, (_, weights) = conv(x, edge_index, edges, return_attention_weights=True)
        grads = torch.autograd.grad(out.square().sum(), list(conv.parameters()), allow_unused=True)
        results.append((out, weights, *(g for g in grads if g is not None)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_gat_adds_the_term_of_edge_features_to_the_score():
    conv, (x, edge_index) = layer(ConeGATConv, edge_dim=FEATURES, add_self_loops=False), graph()
    edges = torch.randn(edge_index.shape[1], FEATURES)
    seen = []
    conv.cone.register_forward_hook(lambda module, inputs, scores: seen.append(scores))
    _, (_, weights) = conv(x, edge_index, edges, return_attention_weights=True)
    term = (conv.lin_edge(edges).view(-1, HEADS, SIZE) * conv.att_edge).sum(-1)
    shares = (seen[0] + term).exp()
    total = torch.zeros(NODES, HEADS).index_add(0, edge_index[1], shares)
    torch.testing.assert_close(weights, shares / total[edge_index[1]])
    assert not torch.allclose(weights, conv(x, edge_index, return_attention_weights=True)[1][1])


@pytest.mark.parametrize("fill_value", [2.0, "mean", "max"])
def test_gat_gives_self_loops_the_features_that_fill_value_says(fill_value):
    settings = {"edge_dim": FEATURES, "fill_value": fill_value}
    conv, (x, edge_index) = layer(ConeGATConv, **settings), graph()
    edges = torch.randn(edge_index.shape[1], FEATURES)
    looped, filled = add_self_loops(edge_index, edges, fill_value=fill_value, num_nodes=NODES)
    without = layer(ConeGATConv, **settings, add_self_loops=False)
    without.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x, edge_index, edges), without(x, looped, filled))


@both
def test_an_edge_that_stands_twice_counts_twice_and_a_self_loop_as_any_edge(kind):
    settings = {"add_self_loops": False} if kind is ConeGATConv else {}
    conv, x = layer(kind, **settings), torch.randn(3, CHANNELS)
    weights = []
    for edges in ([[0, 1], [2, 2]], [[0, 1, 1], [2, 2, 2]], [[0, 1, 2], [2, 2, 2]]):
        weights.append(conv(x, torch.tensor(edges), return_attention_weights=True)[1][1])
    once, twice, loop = weights
    torch.testing.assert_close(twice[1], twice[2])
    torch.testing.assert_close(twice[1] / twice[0], once[1] / once[0])
    torch.testing.assert_close(loop[1] / loop[0], once[1] / once[0])
    assert (loop[2] > 0).all()


@both
def test_other_numbers_of_the_nodes_give_the_same_nodes(kind):
    conv, (x, edge_index) = layer(kind), graph()
    order = torch.randperm(NODES)  # the new node i is the old order[i]
    torch.testing.assert_close(conv(x[order], order.argsort()[edge_index]), conv(x, edge_index)[order])


@both
def test_bipartite_graphs_have_their_own_features_at_each_end(kind):
    conv = layer(kind, (CHANNELS, 5), SIZE, learn_gamma=True)
    x, edge_index = (torch.randn(NODES, CHANNELS), torch.randn(4, 5)), torch.tensor([[0, 7, 7, 3], [0, 0, 1, 2]])
    out, (edges, weights) = conv(x, edge_index, return_attention_weights=True)
    assert out.shape == (4, HEADS * SIZE)
    total = torch.zeros(4, HEADS).index_add(0, edges[1], weights)
    has_edges = torch.zeros(4, dtype=torch.bool).index_fill(0, edges[1], True)
    torch.testing.assert_close(total, has_edges[:, None].expand(4, HEADS).float())
    out.sum().backward()
    assert conv.cone.log_gamma.grad.isfinite().all()


def test_bipartite_gat_with_one_projection_for_both_ends():
    conv = layer(ConeGATConv, add_self_loops=False)
    x, edge_index = graph()
    torch.testing.assert_close(conv((x, x.clone()), edge_index), conv(x, edge_index))
    torch.testing.assert_close(conv((x, x[:4]), NO_EDGES, size=(NODES, 4)), conv.bias.expand(4, -1))


@both
def test_a_node_without_edges_gets_no_message(kind):
    settings = {"add_self_loops": False} if kind is ConeGATConv else {"root_weight": False}
    conv, (x, edge_index) = layer(kind, bias=False, **settings), graph()
    assert not conv(x, edge_index)[7].any()
    empty = conv(x, NO_EDGES)
    assert empty.shape == (NODES, HEADS * SIZE)
    assert not empty.any()


@both
def test_equal_nodes_and_zeros_give_finite_gradients(kind):
    conv, (_, edge_index) = layer(kind, score="umbral", learn_gamma=True, learn_radius=True), graph()
    for x in (torch.zeros(NODES, CHANNELS), torch.ones(NODES, CHANNELS)):
        conv(x.requires_grad_(), edge_index).sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in conv.parameters())


@both
def test_each_head_learns_its_own_temperature(kind):
    conv, (x, edge_index) = layer(kind, learn_gamma=True), graph()
    conv(x, edge_index).square().sum().backward()
    assert conv.cone.log_gamma.grad.shape == (HEADS,)
    assert (conv.cone.log_gamma.grad != 0).all()
    assert "cone.log_gamma" in conv.state_dict()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_keep_their_dtype(kind, dtype):
    conv, (x, edge_index) = layer(kind, learn_gamma=True), graph()
    expected = conv(x, edge_index)
    out, (_, weights) = conv.to(dtype)(x.to(dtype), edge_index, return_attention_weights=True)
    assert out.dtype == weights.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert conv.cone.log_gamma.grad.isfinite().all()


@both
def test_autocast_gives_nearly_the_same(kind):
    conv, (x, edge_index) = layer(kind), graph()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = conv(x, edge_index)
    torch.testing.assert_close(inside.float(), conv(x, edge_index), rtol=0.05, atol=0.05)


@both
def test_dropout_drops_weights_in_training_alone(kind):
    conv, (x, edge_index) = layer(kind, dropout=0.5), graph()
    assert not torch.equal(conv(x, edge_index), conv(x, edge_index))
    conv.eval()
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index), rtol=0, atol=0)


# the forms of a graph


@both
@pytest.mark.parametrize("order", [None, "row", "col"])
def test_an_edge_index_object_is_a_graph_too(kind, order):
    conv, (x, edge_index) = layer(kind), graph()
    object_ = EdgeIndex(edge_index, sparse_size=(NODES, NODES))
    object_ = object_ if order is None else object_.sort_by(order).values
    out, (edges, weights) = conv(x, object_, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, edge_index))
    assert weights.shape == (edges.shape[1], HEADS)


@both
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_is_a_graph_too_and_comes_back_as_from_the_base(kind, layout):
    conv, base = layer(kind), layer(kind.__mro__[2])
    x, edge_index = graph()
    adjacency, order = sparse(edge_index, layout)
    out, (matrix, weights) = conv(x, adjacency, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, edge_index))
    theirs, their_weights = base(x, adjacency, return_attention_weights=True)[1]
    assert (matrix.layout, matrix.shape, weights.shape) == (theirs.layout, theirs.shape, their_weights.shape)
    if kind is ConeTransformerConv:
        torch.testing.assert_close(weights, conv(x, edge_index, return_attention_weights=True)[1][1][order])
    else:
        torch.testing.assert_close(matrix.to_sparse_coo().coalesce().values().sum(), torch.tensor(float(NODES * HEADS)))


def test_values_of_a_sparse_matrix_are_edge_features():
    conv, (x, edge_index) = layer(ConeTransformerConv, edge_dim=FEATURES), graph()
    edges = torch.randn(edge_index.shape[1], FEATURES)
    adjacency, _ = sparse(edge_index, torch.sparse_coo, edges)
    torch.testing.assert_close(conv(x, adjacency), conv(x, edge_index, edges))


@pytest.mark.skipif(not typing.WITH_TORCH_SPARSE, reason="needs torch_sparse")
@both
def test_a_sparse_tensor_of_torch_sparse_is_a_graph_too(kind):
    conv, (x, edge_index) = layer(kind), graph()
    adjacency = typing.SparseTensor.from_edge_index(edge_index, sparse_sizes=(NODES, NODES)).t()
    out, matrix = conv(x, adjacency, return_attention_weights=True)
    torch.testing.assert_close(out, conv(x, edge_index))
    assert isinstance(matrix, typing.SparseTensor)


@both
def test_a_reversed_graph_with_reversed_flow_is_the_same(kind):
    conv, back = layer(kind), layer(kind, flow="target_to_source")
    back.load_state_dict(conv.state_dict())
    x, edge_index = graph()
    torch.testing.assert_close(back(x, edge_index.flip(0)), conv(x, edge_index))


@both
def test_reversed_flow_leaves_the_ends_of_a_bipartite_graph_where_pyg_has_them(kind):
    """x_j comes from the first of the pair and x_i from the second, by the other row of edge_index."""
    options = {"add_self_loops": False} if kind is ConeGATConv else {}
    conv, back = (
        layer(kind, (CHANNELS, 5), SIZE, flow=flow, **options) for flow in ("source_to_target", "target_to_source")
    )
    back.load_state_dict(conv.state_dict())
    x, edge_index = (torch.randn(6, CHANNELS), torch.randn(4, 5)), torch.tensor([[0, 1, 5, 2], [3, 3, 1, 0]])
    _, (_, want) = conv(x, edge_index, return_attention_weights=True)
    _, (_, got) = back(x, edge_index.flip(0), return_attention_weights=True)
    torch.testing.assert_close(got, want)


# what PyG and torch do with layers


@both
def test_a_layer_of_unknown_input_size_learns_it_from_the_first_graph(kind):
    conv, (x, edge_index) = layer(kind, -1, SIZE), graph()
    assert conv(x, edge_index).shape == (NODES, HEADS * SIZE)


@both
def test_weights_come_back_from_a_state_dict_and_from_a_pickle(kind):
    settings = {"score": "umbral", "learn_gamma": True, "learn_radius": True}
    conv, (x, edge_index) = layer(kind, **settings), graph()
    with torch.no_grad():
        conv.cone.log_gamma.add_(torch.randn(HEADS))
    other = layer(kind, **settings)
    other.load_state_dict(conv.state_dict())
    stream = io.BytesIO()
    torch.save(conv, stream)
    stream.seek(0)
    for same in (other, torch.load(stream, weights_only=False), copy.deepcopy(conv)):
        assert torch.equal(same(x, edge_index), conv(x, edge_index))


def test_a_checkpoint_of_gat_conv_is_refused_for_the_score_that_it_holds():
    conv = layer(ConeGATConv)
    assert not [name for name, _ in conv.named_parameters() if name in ("att_src", "att_dst")]
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"att_src\", \"att_dst\""):
        conv.load_state_dict(layer(pyg.GATConv).state_dict())
    conv.reset_parameters()


@both
def test_hooks_of_pyg_hear_the_weights(kind):
    conv, (x, edge_index) = layer(kind), graph()
    heard = []
    conv.register_propagate_forward_hook(lambda module, inputs, out: heard.append("propagate"))
    conv.register_message_forward_hook(lambda module, inputs, out: heard.append("message"))
    if kind is ConeGATConv:
        conv.register_edge_update_forward_hook(lambda module, inputs, out: heard.append(tuple(out.shape)))
    conv(x, edge_index)
    updates = [(edge_index.shape[1] + NODES, HEADS)] if kind is ConeGATConv else []
    assert heard == [*updates, "message", "propagate"]


@both
@pytest.mark.parametrize("algorithm", ["attention", "mask"])
def test_explainers_of_pyg_explain_cones(kind, algorithm):
    model, (x, edge_index) = MODELS[kind.__mro__[2].__name__](), graph()
    convert(model)
    before = model.eval()(x, edge_index)
    explain = AttentionExplainer() if algorithm == "attention" else GNNExplainer(epochs=2)
    how = {"mode": "regression", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(model, explain, explanation_type="model", edge_mask_type="object", model_config=how)
    assert explainer(x, edge_index, index=0).edge_mask.shape == (edge_index.shape[1],)
    torch.testing.assert_close(model(x, edge_index), before)


@both
def test_layers_compile_as_one_graph_and_give_the_same(kind):
    conv, (x, edge_index) = layer(kind, learn_gamma=True), graph()
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, edge_index), conv(x, edge_index))


@both
def test_torchscript_is_refused_with_a_sentence(kind):
    with pytest.raises(TypeError, match=r"use torch\.compile"):
        torch.jit.script(layer(kind))


# what is not honoured


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda x, e: ConeGATConv(CHANNELS, 1), ValueError, "out_channels must be at least 2.* got 1"),
        (lambda x, e: ConeTransformerConv(CHANNELS, 1), ValueError, "out_channels must be at least 2.* got 1"),
        (lambda x, e: ConeGATConv(CHANNELS, 4, negative_slope=0.1), ValueError, "negative_slope=0.1 has no use"),
        (lambda x, e: ConeGATConv(CHANNELS, 4, score="cone"), ValueError, "score must be one of"),
        (lambda x, e: ConeGATConv(CHANNELS, 4, scale=1), TypeError, "scale"),
        (lambda x, e: layer(ConeGATConv)((x, None), e), ValueError, r"source and of target; got \[8, 12\] and None"),
        (lambda x, e: layer(ConeGATConv)(x[None], e), ValueError, r"x must be \[nodes, channels\].* got \[1, 8, 12\]"),
        (lambda x, e: layer(ConeGATConv)(x, e, torch.ones(24, 3)), ValueError, "edge_attr .* without edge_dim"),
        (
            lambda x, e: layer(ConeTransformerConv, edge_dim=3)(x, e),
            ValueError,
            "edge_attr must be given .* edge_dim=3",
        ),
        (lambda x, e: layer(ConeGATConv)(x, e + 2), IndexError, r"outside 0\.\.7"),
        (lambda x, e: layer(ConeTransformerConv)(x, e + 2), IndexError, "larger than 7"),
        (lambda x, e: layer(ConeTransformerConv)(x, e - 1), IndexError, "negative indices"),
        (lambda x, e: layer(ConeGATConv, add_self_loops=False)(x, e.float()), ValueError, "integer type"),
        (lambda x, e: layer(ConeTransformerConv)(x, e.T), ValueError, "size '2' in the first dimension"),
    ],
)
def test_what_is_not_honoured_raises(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(*graph())


def test_the_example_trains_both_in_seconds(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["GAT", "penumbral", "umbral"]
    assert all(float(line[1]) > 30 for line in lines)  # chance is 11 %
