"""``ConeAttention``: the operator as a module, with learned parameters that stay positive."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import coneheads
from coneheads.nn import ConeAttention, ConeMultiheadAttention
from coneheads.nn.cone_attention import shape_field
from coneheads.scores import BY_NAME, resolve
from tests.cases import SCORE_NAMES

HEADS, SIZE = 4, 8


def inputs(kv_heads=HEADS, length=6, keys=7):
    return torch.randn(2, HEADS, length, SIZE), torch.randn(2, kv_heads, keys, SIZE), torch.randn(2, kv_heads, keys, 5)


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_without_learned_numbers_it_is_attention_and_has_no_state(name):
    cone = ConeAttention(name, HEADS, SIZE)
    q, k, v = inputs()
    out, weights = cone(q, k, v)
    torch.testing.assert_close(out, coneheads.attention(q, k, v, score=cone.score()))
    assert weights is None
    assert not cone.state_dict()


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_weights_and_output_are_those_of_attention(name):
    cone = ConeAttention(name, HEADS, SIZE)
    q, k, v = inputs(kv_heads=2)
    out, weights = cone(q, k, v, is_causal=True, enable_gqa=True, need_weights=True)
    score = cone.score()
    torch.testing.assert_close(weights, coneheads.attention_weights(q, k, is_causal=True, score=score, enable_gqa=True))
    torch.testing.assert_close(out, coneheads.attention(q, k, v, is_causal=True, score=score, enable_gqa=True))


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_gamma_is_learned_for_each_head_and_stays_positive(name):
    cone = ConeAttention(name, HEADS, SIZE, learn_gamma=True)
    start = getattr(ConeAttention(name, HEADS, SIZE).score(), cone.temperature)
    gamma = getattr(cone.score(), cone.temperature)
    torch.testing.assert_close(gamma, torch.full((HEADS,), float(start)))
    out, _ = cone(*inputs())
    out[:, 1].square().sum().backward()
    assert cone.log_gamma.grad[1] != 0
    assert (cone.log_gamma.grad[[0, 2, 3]] == 0).all()
    with torch.no_grad():
        cone.log_gamma -= 40
    assert (getattr(cone.score(), cone.temperature) > 0).all()


@pytest.mark.parametrize("name", [name for name in SCORE_NAMES if shape_field(resolve(name))])
def test_radius_is_learned_for_each_head(name):
    cone = ConeAttention(name, HEADS, SIZE, learn_radius=True)
    assert list(cone.state_dict()) == ["log_radius"]
    cone(*inputs())[0].square().sum().backward()
    assert cone.log_radius.grad.shape == (HEADS,)
    assert (cone.log_radius.grad != 0).all()


@pytest.mark.parametrize("name", [name for name in SCORE_NAMES if not shape_field(resolve(name))])
def test_a_score_without_radius_has_none_to_learn(name):
    with pytest.raises(ValueError, match=r"learn_radius=True.*no radius"):
        ConeAttention(name, HEADS, SIZE, learn_radius=True)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_config_and_state_dict_give_the_same_module(name, learn):
    cone = ConeAttention(name, HEADS, SIZE, learn_gamma=learn)
    if learn:
        nn.init.normal_(cone.log_gamma)
    again = ConeAttention.from_config(json.loads(json.dumps(cone.config())), HEADS, SIZE)
    again.load_state_dict(cone.state_dict())
    q, k, v = inputs()
    assert torch.equal(cone(q, k, v)[0], again(q, k, v)[0])
    assert torch.equal(cone(q, k, v)[0], copy.deepcopy(cone)(q, k, v)[0])


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_scaling_counts_relative_to_that_of_the_dot_product(name, learn):
    cone = ConeAttention(name, HEADS, SIZE, learn_gamma=learn)
    q, k, v = inputs()
    usual = 1 / math.sqrt(SIZE)
    torch.testing.assert_close(cone(q, k, v, scaling=usual)[0], cone(q, k, v)[0])
    scores = coneheads.attention_scores(q, k, score=cone.score(3 * usual))
    base = coneheads.attention_scores(q, k, score=cone.score())
    weights = cone(q, k, v, scaling=3 * usual, need_weights=True)[1]
    torch.testing.assert_close(weights, scores.softmax(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, (3 * base).softmax(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("need_weights", [False, True])
def test_softcap_bounds_the_scores_before_the_mask(need_weights):
    cone = ConeAttention("dot", HEADS, SIZE)
    q, k, v = inputs(keys=6)
    q = 10 * q
    out, weights = cone(q, k, v, is_causal=True, softcap=2.0, need_weights=need_weights)
    scores = 2 * torch.tanh(q @ k.mT / math.sqrt(SIZE) / 2)
    expected = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, expected @ v)
    assert (weights is not None) == need_weights


@pytest.mark.parametrize("how", [{}, {"need_weights": True}, {"softcap": 5.0}])
def test_a_masked_key_may_hold_nan(how):
    cone = ConeAttention("penumbral", HEADS, SIZE)
    q, k, v = inputs()
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[:, -2:] = False
    clean = cone(q, k[..., :-2, :], v[..., :-2, :], **how)[0]
    k[..., -2:, :] = torch.nan
    v[..., -2:, :] = torch.nan
    torch.testing.assert_close(cone(q, k, v, mask, **how)[0], clean)


def test_weights_are_returned_after_dropout():
    cone = ConeAttention("umbral", HEADS, SIZE)
    q, k, v = inputs()
    out, weights = cone(q, k, v, dropout_p=0.5, need_weights=True)
    assert 0.3 < (weights == 0).float().mean() < 0.7
    torch.testing.assert_close(out, weights @ v)


def test_a_tensor_in_a_score_is_refused_unless_it_is_learned():
    gamma = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(TypeError, match=r"score\.gamma must be a number in a module.*learn_gamma=True"):
        ConeAttention(coneheads.Umbral(gamma=gamma), HEADS, SIZE)
    cone = ConeAttention(coneheads.Umbral(gamma=gamma), HEADS, SIZE, learn_gamma=True)
    torch.testing.assert_close(cone.score().gamma, gamma)
    assert isinstance(cone.base.gamma, float)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"score": "penumbra"}, ValueError, "Did you mean 'penumbral'"),
        ({"learn_gamma": 1}, TypeError, "learn_gamma must be True or False"),
        ({"learn_radius": "yes"}, TypeError, "learn_radius must be True or False"),
        (
            {"score": coneheads.Umbral(gamma=torch.ones(3)), "learn_gamma": True},
            ValueError,
            r"score\.gamma must be a number or have a value for each of 4 heads",
        ),
        (
            {"score": coneheads.Umbral(gamma=torch.tensor([1.0, -1.0, 1.0, 1.0])), "learn_gamma": True},
            ValueError,
            r"score\.gamma must be positive to be learned",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, text):
    with pytest.raises(error, match=text):
        ConeAttention(**{"score": "penumbral", "heads": HEADS, "size": SIZE} | arguments)


def test_a_score_of_ones_own_has_no_name_to_save():
    class Mine(BY_NAME["umbral"]):
        name = "mine"

    with pytest.raises(ValueError, match="Mine is not one of coneheads' own"):
        ConeAttention(Mine(), HEADS, SIZE).config()


def test_repr_shows_score_and_what_is_learned():
    text = repr(ConeAttention("umbral", HEADS, SIZE, learn_gamma=True))
    assert "Umbral(radius=0.1" in text
    assert "heads=4, size=8, learned: gamma" in text


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # the refusal is ours
@pytest.mark.parametrize(
    "layer", [ConeAttention("umbral", 2, 4), ConeMultiheadAttention(8, 2)], ids=["alone", "inside"]
)
def test_torchscript_is_refused_with_a_sentence(layer):
    with pytest.raises(TypeError, match=r"cone attention cannot become TorchScript.*use torch\.compile"):
        torch.jit.script(layer)
