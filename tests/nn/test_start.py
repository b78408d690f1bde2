"""A layer that has just been built attends neither to all keys alike nor to a single one."""

import pytest

from coneheads import Umbral
from coneheads.nn.start import TEMPERATURE, starting_score
from coneheads.scores import BY_NAME, resolve
from tests.nn.entropy import SIZES, rows, share_of_keys

LEAST, MOST = 0.45, 0.9


@pytest.fixture(scope="module")
def measured():
    return {row.score: row for row in rows()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BY_NAME)
def test_weights_start_neither_uniform_nor_one_hot(measured, name, size):
    assert LEAST < measured[name].started[size] < MOST


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["umbral", "penumbral_finite", "umbral_finite"])
def test_gamma_of_one_would_start_uniform_or_nearly_one_hot(measured, name, size):
    assert not LEAST < measured[name].plain[size] < MOST


@pytest.mark.parametrize("name", BY_NAME)
def test_a_small_qk_dim_starts_like_a_layer_of_that_size(name):
    assert abs(share_of_keys(name, 64, qk_dim=16) - share_of_keys(name, 16)) < 0.08


def test_the_dot_product_starts_as_in_pytorch():
    assert "dot" not in TEMPERATURE
    assert share_of_keys("dot", 64) == pytest.approx(0.88, abs=0.02)


def test_a_name_gets_the_temperature_and_an_object_keeps_its_own():
    assert starting_score("umbral", 64).gamma == pytest.approx(0.88 / 8)
    assert starting_score(Umbral(gamma=1.0), 64).gamma == 1.0
    assert set(TEMPERATURE) | {"dot"} == set(BY_NAME)
    assert starting_score("half_space", 7) == resolve("half_space").with_parameters({"beta": 3.0})
