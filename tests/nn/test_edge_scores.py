"""Scores on edges are those of all pairs, in their places, with their gradients."""

import pytest
import torch

from coneheads.functional import attention_scores
from coneheads.nn import ConeAttention
from coneheads.nn.edge_scores import EdgeAttention, edge_scores
from coneheads.scores import BY_NAME, resolve

HEADS, SIZE, SOURCES, TARGETS = 3, 5, 7, 4
EVERY_PAIR = torch.cartesian_prod(torch.arange(SOURCES), torch.arange(TARGETS)).T
SOME = EVERY_PAIR[:, torch.tensor([0, 3, 3, 17, 21, 9])]  # one of them twice
per_score = pytest.mark.parametrize("name", list(BY_NAME))


def nodes(dtype=torch.float64, spread=1.0):
    query, key = torch.randn(TARGETS, HEADS, SIZE), torch.randn(SOURCES, HEADS, SIZE)
    return (spread * query).to(dtype).requires_grad_(), (spread * key).to(dtype).requires_grad_()


def scores_of_pairs(score, query, key, edge_index):
    """The same from the matrix of all pairs, [M, H]."""
    matrix = attention_scores(query.transpose(0, 1), key.transpose(0, 1), score=score)  # [H, targets, sources]
    return matrix[:, edge_index[1], edge_index[0]].T


def with_values_for_each_head(score):
    """The score with a tensor [H] in each numeric field."""
    fields = score.for_size(SIZE).parameters()
    return score.with_parameters(
        {name: torch.linspace(0.5, 1.5, HEADS, dtype=torch.float64) * (value or 1) for name, value in fields.items()}
    )


@per_score
@pytest.mark.parametrize("edge_index", [EVERY_PAIR, SOME], ids=["every pair", "some, one twice"])
def test_scores_and_gradients_are_those_of_all_pairs(name, edge_index):
    query, key = nodes()
    score = with_values_for_each_head(resolve(name))
    ours, theirs = edge_scores(score, query, key, edge_index), scores_of_pairs(score, query, key, edge_index)
    assert ours.shape == (edge_index.shape[1], HEADS)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(s, (query, key), weights) for s in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@per_score
def test_derivatives_are_right_for_features_and_for_parameters_of_each_head(name):
    query, key = nodes()
    score = with_values_for_each_head(resolve(name))
    fields = {name: value.requires_grad_() for name, value in score.parameters().items()}

    def function(query, key, *values):
        return edge_scores(score.with_parameters(dict(zip(fields, values, strict=True))), query, key, SOME)

    assert torch.autograd.gradcheck(function, (query, key, *fields.values()))


@per_score
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(name, dtype):
    query, key = nodes(dtype)
    ours = edge_scores(resolve(name), query, key, SOME)
    assert ours.dtype == torch.float32
    exact = edge_scores(resolve(name), query.double(), key.double(), SOME)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    assert query.grad.dtype == dtype
    assert query.grad.isfinite().all()


def test_autocast_does_not_reach_the_distances():
    query, key = nodes(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = edge_scores(resolve("dot"), query, key, SOME)
    torch.testing.assert_close(inside, edge_scores(resolve("dot"), query, key, SOME), rtol=0, atol=0)


@per_score
@pytest.mark.parametrize("value", [0.0, 1.0, -3e4, 1e-6])
def test_a_node_that_meets_itself_has_finite_gradients(name, value):
    features = torch.full((2, HEADS, SIZE), value, dtype=torch.float32, requires_grad=True)
    loop = torch.tensor([[0, 1, 0], [0, 1, 1]])
    scores = edge_scores(resolve(name), features, features, loop)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert features.grad.isfinite().all()


def test_one_tensor_for_both_becomes_points_once(monkeypatch):
    score, (_, key) = resolve("umbral"), nodes()
    seen = []
    lift = type(score).points
    monkeypatch.setattr(
        type(score), "points", lambda self, features: seen.append(features.shape) or lift(self, features)
    )
    edge_index = torch.randint(SOURCES, (2, 50))
    edge_scores(score, key, key, edge_index)
    assert seen == [(1, HEADS, SOURCES, SIZE)]  # nodes, not edges
    edge_scores(score, key.clone(), key, edge_index)
    assert len(seen) == 3


def test_nan_of_a_node_stays_on_its_edges():
    query, key = nodes()
    with torch.no_grad():
        key[3] = torch.nan
    scores = edge_scores(resolve("penumbral"), query, key, EVERY_PAIR)
    assert (scores.isnan().all(-1) == (EVERY_PAIR[0] == 3)).all()
    scores[EVERY_PAIR[0] != 3].sum().backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


def test_no_edges_give_no_scores():
    query, key = nodes()
    scores = edge_scores(resolve("penumbral"), query, key, torch.empty(2, 0, dtype=torch.long))
    assert scores.shape == (0, HEADS)
    scores.sum().backward()
    assert not query.grad.any()


def test_the_module_is_a_cone_attention_whose_learned_numbers_get_gradients():
    cone = EdgeAttention("umbral", HEADS, SIZE, learn_gamma=True, learn_radius=True)
    assert isinstance(cone, ConeAttention)
    query, key = nodes(torch.float32)
    cone(query, key, SOME).sum().backward()
    assert cone.log_gamma.grad.shape == cone.log_radius.grad.shape == (HEADS,)
    assert (cone.log_gamma.grad != 0).all()
    same = EdgeAttention.from_config(cone.config(), HEADS, SIZE)
    assert isinstance(same, EdgeAttention)
    same.load_state_dict(cone.state_dict())
    torch.testing.assert_close(same(query, key, SOME), cone(query, key, SOME))


def test_compiles_as_one_graph_for_any_number_of_nodes_and_edges():
    cone = EdgeAttention("penumbral", HEADS, SIZE, learn_gamma=True)

    def layer(query, key, edge_index):
        return cone(query.view(-1, HEADS, SIZE), key.view(-1, HEADS, SIZE), edge_index)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for nodes, edge_index in ((SOURCES, EVERY_PAIR), (SOURCES + 4, SOME)):
        query, key = torch.randn(2, nodes, HEADS * SIZE).unbind(0)
        torch.testing.assert_close(compiled(query, key, edge_index), layer(query, key, edge_index))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # the refusal is ours
def test_torchscript_is_refused_with_a_sentence():
    with pytest.raises(TypeError, match=r"use torch\.compile"):
        torch.jit.script(torch.nn.Sequential(EdgeAttention("dot", HEADS, SIZE)))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"query": torch.randn(4, 15)}, ValueError, r"query must be a tensor \[nodes, heads, size\]; got float32"),
        ({"key": None}, ValueError, r"key must be a tensor \[nodes, heads, size\]; got NoneType"),
        ({"key": torch.randn(7, 1, 5)}, ValueError, "same number of heads"),
        ({"key": torch.randn(7, 3, 6)}, ValueError, "same last size E"),
        ({"key": torch.randn(7, 3, 5).half()}, TypeError, "same dtype"),
        ({"query": torch.randn(4, 3, 1), "key": torch.randn(7, 3, 1)}, ValueError, "E of at least 2"),
        ({"edge_index": SOME.float()}, ValueError, r"edge_index must be an int64 or int32 tensor \[2, edges\]"),
        ({"edge_index": SOME.T}, ValueError, r"edge_index must be .* got int64 \[6, 2\]"),
        ({"edge_index": [[0], [1]]}, ValueError, "edge_index must be .* got list"),
        ({"edge_index": torch.tensor([[0, 7], [0, 0]])}, IndexError, r"source outside 0\.\.6, .* from 0 to 7"),
        ({"edge_index": torch.tensor([[0, 0], [-1, 0]])}, IndexError, r"target outside 0\.\.3, .* from -1 to 0"),
        ({"score": BY_NAME["umbral"](gamma=torch.ones(2))}, ValueError, "gamma is a tensor and must have shape"),
    ],
)
def test_a_wrong_call_says_what_came_and_what_is_accepted(change, error, sentence):
    call = {
        "score": resolve("umbral"), "query": torch.randn(4, 3, 5), "key": torch.randn(7, 3, 5), "edge_index": SOME,
    }  # fmt: skip
    with pytest.raises(error, match=sentence):
        edge_scores(**call | change)
