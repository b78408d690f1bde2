"""Telemetry: what it says of points whose relations are known, and of real models."""

import json
import math

import pytest
import torch
from torch import nn

import coneheads
from coneheads.lab import tasks
from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import SCORES
from coneheads.lab.models.encoder import Encoder
from coneheads.lab.tasks.base import Batch
from coneheads.lab.tasks.options import KinOptions
from coneheads.lab.telemetry import QUANTILES, Call, cone_points, describe, hear, listening, observe
from coneheads.nn import ConeAttention
from coneheads.scores import FinitePenumbral, FiniteUmbral, Laplacian, Penumbral, Umbral

KIN = KinOptions(branching=2, depth=4, set_size=5, examples=300)


def call_of(score, query, key, visible=None):
    """A call of one head; query and key are lists of features."""
    query, key = torch.tensor([[query]]), torch.tensor([[key]])
    shape = (1, 1, query.shape[2], key.shape[2])
    visible = torch.ones(shape, dtype=torch.bool) if visible is None else torch.tensor(visible).expand(shape)
    return Call("", query, key, visible, score)


def relations(call):
    points = cone_points(call)
    return points.have_common_ancestor()[0, 0].tolist(), points.are_related()[0, 0].tolist()


def heads_of(call):
    return describe(call)["heads"]


def test_of_two_penumbral_points_one_below_the_other_the_upper_is_an_ancestor():
    common, related = relations(call_of(Penumbral(), [[0.0, 0.0]], [[0.0, -3.0], [0.0, 0.0], [0.0, 3.0]]))
    assert common == [[True, True, True]]
    assert related == [[True, True, True]]


def test_two_far_leaves_have_no_common_penumbral_ancestor_and_always_an_umbral_one():
    # heights sigmoid(0) = 1/2 under a light at 1; positions 0 and f/2, so the shadow ends at 2 sqrt(3/4)
    reach = 2 * 2 * math.sqrt(0.75)
    near, far = [reach * 0.999, 0.0], [reach * 1.001, 0.0]
    assert relations(call_of(Penumbral(), [[0.0, 0.0]], [near, far])) == ([[True, False]], [[False, False]])
    assert relations(call_of(Umbral(), [[0.0, 0.0]], [near, far]))[0] == [[True, True]]


def test_umbral_ancestors_are_within_the_difference_of_levels():
    # heights 1 and e^-1; the horizontal distance must be at most (1 - e^-1) sinh r
    score, y = Umbral(radius=1.0), math.exp(-1.0)
    edge = (1 - y) * math.sinh(1.0) / y
    _, related = relations(call_of(score, [[0.0, 0.0]], [[edge * 0.999, -1.0], [edge * 1.001, -1.0]]))
    assert related == [[True, False]]


def test_cones_with_a_light_at_the_origin_compare_angles():
    query = [[1.0, 0.0, 0.0]]
    keys = [[2.0, 0.0, 5.0], [-1.0, 0.0, 5.0]]  # behind the query, seen from the light; and opposite
    assert relations(call_of(FinitePenumbral(), query, keys)) == ([[True, False]], [[True, False]])
    # opposite points would need an ancestor wider than a half circle; those at a right angle do not
    keys.append([0.0, 1.0, 5.0])
    assert relations(call_of(FiniteUmbral(), query, keys)) == ([[True, False, True]], [[True, False, False]])


def test_shares_count_visible_pairs_alone():
    keys = [[0.0, -3.0], [100.0, 0.0], [200.0, 0.0]]
    (head,) = heads_of(call_of(Penumbral(), [[0.0, 0.0]], keys))
    assert head["common_ancestor"] == pytest.approx(1 / 3)
    assert head["related"] == pytest.approx(1 / 3)
    (head,) = heads_of(call_of(Penumbral(), [[0.0, 0.0]], keys, visible=[True, True, False]))
    assert head["common_ancestor"] == pytest.approx(1 / 2)
    (head,) = heads_of(call_of(Penumbral(), [[0.0, 0.0]], keys, visible=[False, False, False]))
    assert (head["common_ancestor"], head["entropy"], head["key_levels"]) == (None, None, None)


def test_equal_weights_have_the_entropy_of_the_visible_keys():
    same = [[1.0, 1.0]] * 4
    (head,) = heads_of(call_of(Laplacian(), [[0.0, 0.0]] * 2, same, visible=[True, True, True, False]))
    assert head["entropy"] == pytest.approx(math.log(3))
    assert head["relative_entropy"] == pytest.approx(1)
    (sharp,) = heads_of(call_of(Laplacian(gamma=1e3), [[0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]))
    assert sharp["entropy"] == pytest.approx(0)


def test_a_query_that_sees_one_key_has_no_relative_entropy():
    (head,) = heads_of(call_of(Laplacian(), [[0.0, 0.0]], [[1.0, 0.0]]))
    assert (head["entropy"], head["relative_entropy"]) == (0, None)


def test_padding_of_self_attention_counts_neither_as_query_nor_as_key():
    tokens = [[0.0, 0.0], [0.0, -3.0], [500.0, 9.0]]
    (head,) = heads_of(call_of(Penumbral(), tokens, tokens, visible=[True, True, False]))
    assert head["common_ancestor"] == head["related"] == 1
    assert head["query_levels"] == head["key_levels"]
    (whole,) = heads_of(call_of(Penumbral(), tokens[:2], tokens[:2]))
    assert head["entropy"] == pytest.approx(whole["entropy"])


def test_levels_are_given_by_their_quantiles():
    keys = [[0.0, math.log(level / math.sinh(0.1))] for level in range(1, 102)]
    (head,) = heads_of(call_of(Umbral(radius=0.1), [[0.0, 0.0]], keys))
    assert head["key_levels"] == pytest.approx([1 + share for share in QUANTILES], rel=1e-5)


def test_parts_of_a_batch_give_what_the_whole_gives(monkeypatch):
    query, key = torch.randn(6, 2, 3, 4), torch.randn(6, 2, 5, 4)
    whole = describe(Call("", query, key, torch.ones(6, 2, 3, 5, dtype=torch.bool), Penumbral()))
    monkeypatch.setattr("coneheads.lab.telemetry.BLOCK", 2 * 2 * 3 * 5)
    parts = describe(Call("", query, key, torch.ones(6, 2, 3, 5, dtype=torch.bool), Penumbral()))
    for one, other in zip(whole["heads"], parts["heads"], strict=True):
        for name in ("entropy", "relative_entropy", "common_ancestor", "related", "query_levels", "key_levels"):
            assert one[name] == pytest.approx(other[name])


def test_numbers_that_are_not_finite_are_left_out():
    query = torch.full((1, 1, 1, 2), torch.nan)
    (head,) = heads_of(Call("", query, query, torch.ones(1, 1, 1, 1, dtype=torch.bool), Penumbral()))
    assert (head["entropy"], head["query_levels"]) == (None, None)


@pytest.mark.parametrize("score", SCORES)
def test_what_is_observed_of_a_model_can_be_written_as_json(score):
    task = tasks.make(KIN, seed=0)
    model = task.model(ModelOptions(score=score, qk_dim=4, heads=3, depth=1, learn_radius=True))
    seen = observe(model, task)
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen
    assert seen["examples"] == 256
    (layer,) = seen["layers"]
    assert layer["score"] == score
    assert len(layer["heads"]) == 3
    (maps,) = seen["example"]["maps"]
    for weights in maps:
        assert sum(weights[0]) == pytest.approx(1, abs=1e-3)
        assert len(weights[0]) == len(seen["example"]["keys"]) == 5
    for head in layer["heads"]:
        assert 0 <= head["relative_entropy"] <= 1
        cones = score in ("penumbral", "umbral", "penumbral_finite", "umbral_finite")
        assert (head["common_ancestor"] is not None) == cones
        assert (head["key_levels"] is not None) == cones
    if score == "umbral":
        assert {head["common_ancestor"] for head in layer["heads"]} == {1.0}


def test_learned_numbers_are_told_for_each_head():
    task = tasks.make(KIN, seed=0)
    model = task.model(ModelOptions(score="penumbral", qk_dim=3, heads=2, depth=1, gamma=2.0, learn_gamma=True))
    with torch.no_grad():
        next(module for module in model.modules() if isinstance(module, ConeAttention)).log_gamma[1] = math.log(7.0)
    gammas = [head["parameters"]["gamma"] for head in observe(model, task)["layers"][0]["heads"]]
    assert gammas == pytest.approx([2.0, 7.0])


def test_observing_leaves_the_model_as_it_was():
    task = tasks.make(KIN, seed=0)
    model = task.model(ModelOptions(score="umbral", qk_dim=3, depth=1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for training in (True, False):
        model.train(training)
        observe(model, task)
        assert model.training == training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_fails_is_listened_to_no_more():
    model = ConeAttention("dot", 1, 2)
    with pytest.raises(RuntimeError), listening(model):
        raise RuntimeError
    assert not model._forward_pre_hooks


def test_every_layer_of_an_encoder_is_heard_with_its_mask():
    torch.manual_seed(1)
    model = Encoder(ModelOptions(score="umbral", qk_dim=4, heads=2, width=8, depth=2), 11, 3, length=6, pooled=True)
    tokens, padding = torch.randint(11, (4, 6)), torch.arange(6).expand(4, 6) >= torch.tensor([[6], [4], [2], [1]])
    batch = Batch({"tokens": tokens, "padding": padding}, torch.zeros(4, dtype=torch.long), torch.ones(4))
    calls = hear(model, batch)
    assert [call.layer for call in calls] == ["layers.0.attention.score", "layers.1.attention.score"]
    for call in calls:
        weights = call.weights()
        assert weights.shape == (4, 2, 6, 6)
        assert (weights.masked_fill(~padding[:, None, None, :], 0) == 0).all()
        # the very weights that the layer used
        value = torch.randn(4, 2, 6, 5)
        out = coneheads.attention(call.query, call.key, value, call.visible, score=call.score)
        torch.testing.assert_close(weights @ value, out)


def test_a_model_without_attention_has_no_layers():
    assert hear(nn.Linear(2, 2), Batch({"input": torch.ones(1, 2)}, torch.zeros(1), torch.ones(1))) == []
