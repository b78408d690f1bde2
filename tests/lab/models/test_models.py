"""The lab's models: how attention starts, that its parameters learn, masks, shapes."""

import dataclasses

import pytest
import torch

import coneheads
from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import SCORES, WrongUse
from coneheads.lab.models.attention import Attention, QueryKey, scored
from coneheads.lab.models.encoder import Encoder
from coneheads.lab.models.start import PAPER, Start, resolve

SMALL = ModelOptions(qk_dim=4, heads=2, width=16, depth=2, feedforward=32)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


def test_the_papers_start_is_the_papers_settings():
    assert resolve(small(start="paper")) == PAPER
    score = scored("penumbral", 2, 4, PAPER).score()
    assert score == coneheads.Penumbral()
    assert scored("umbral", 2, 4, PAPER).score() == coneheads.Umbral()
    assert scored("dot", 2, 4, PAPER).score() == coneheads.DotProduct(scale=0.5)
    assert list(scored("penumbral", 2, 4, PAPER).parameters()) == []


def test_a_number_given_by_a_flag_overrides_the_start():
    found = resolve(small(start="paper", gamma=3.0, readout="distance", qk_norm=True, height_start=-1.0))
    assert found == dataclasses.replace(PAPER, gamma=3.0, readout="distance", qk_norm=True, height_start=-1.0)


@pytest.mark.parametrize("name", SCORES)
def test_gamma_starts_at_its_value_and_has_a_gradient_for_every_head(name):
    learned = scored(name, 2, 4, Start(gamma=3.0, learn_gamma=True, learn_radius=True))
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind(0)
    out, _ = learned(query, key, value)
    with torch.no_grad():
        plain, _ = scored(name, 2, 4, Start(gamma=3.0))(query, key, value)
    assert torch.allclose(out, plain, atol=1e-5)
    out.square().sum().backward()
    for parameter in learned.parameters():
        assert parameter.shape == (2,)
        assert (parameter.grad != 0).all()


def test_radius_is_learned_by_the_scores_that_have_one():
    start = Start(learn_radius=True)
    assert {name: len(list(scored(name, 2, 4, start).parameters())) for name in SCORES} == {
        "penumbral": 1, "umbral": 1, "umbral_finite": 1, "penumbral_finite": 1, "laplacian": 0, "half_space": 0,
        "hyperboloid": 0, "dot": 0,
    }  # fmt: skip


def test_queries_and_keys_start_as_large_as_asked():
    torch.manual_seed(0)
    options = ModelOptions(
        score="umbral", qk_dim=8, heads=4, width=256, qk_scale=0.5, height_spread=0.2, height_start=-2.0, gamma=1.0
    )
    x = torch.randn(64, 50, 256)
    for features in QueryKey(options, 256)(x, x):
        assert features.shape == (64, 4, 50, 8)
        assert features[..., :-1].std().item() == pytest.approx(0.5, rel=0.05)
        assert features[..., -1].std().item() == pytest.approx(0.1, rel=0.15)
        assert features[..., -1].mean().item() == pytest.approx(-2.0, abs=0.05)


def test_scores_without_a_height_have_no_special_feature():
    torch.manual_seed(0)
    options = ModelOptions(score="dot", qk_dim=8, heads=4, width=256, qk_scale=0.5, height_spread=0.0, height_start=9.0)
    features, _ = QueryKey(options, 256)(*torch.randn(2, 64, 50, 256).unbind(0))
    assert features[..., -1].std().item() == pytest.approx(0.5, rel=0.1)
    assert features[..., -1].mean().item() == pytest.approx(0, abs=0.05)


def test_normalised_queries_and_keys_have_the_size_of_their_scale():
    options = small(qk_norm=True)
    query, key = QueryKey(options, 16)(*(100 * torch.randn(2, 3, 5, 16)).unbind(0))
    for features in (query, key):
        assert torch.allclose(features.square().mean(-1), torch.ones(()), atol=1e-3)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("pooled", [True, False])
def test_padding_has_no_influence(score, pooled):
    torch.manual_seed(0)
    model = Encoder(small(score=score), vocabulary=7, classes=3, length=9, pooled=pooled).eval()
    tokens = torch.randint(7, (2, 6))
    padded = torch.cat([tokens, torch.randint(7, (2, 3))], 1)
    padding = torch.arange(9).expand(2, 9) >= 6
    plain, other = model(tokens), model(padded, padding)
    assert plain.shape == ((2, 3) if pooled else (2, 6, 3))
    assert torch.allclose(plain, other if pooled else other[:, :6], atol=1e-5)


def test_values_keep_their_size_when_query_and_key_shrink():
    large, tiny = Attention(small(qk_dim=8)), Attention(small(qk_dim=2))
    assert large.value.weight.shape == tiny.value.weight.shape
    assert large(torch.randn(1, 5, 16)).shape == tiny(torch.randn(1, 5, 16)).shape == (1, 5, 16)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(WrongUse, match=r"--model\.width"):
        Encoder(small(width=15), vocabulary=7, classes=3, length=9, pooled=True)


def test_dropout_is_off_in_evaluation():
    model = Encoder(small(dropout=0.5), vocabulary=7, classes=3, length=9, pooled=True)
    tokens = torch.randint(7, (2, 6))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
