"""`attention_scores` in float64 against the 120-digit oracle: every score, lift, read-out and feature scale.

The measure of an error is the score itself: 1e-10 relative. What float64 cannot give is stated in the two
`*_floor` functions, and they are asked only where the strict measure fails.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import coneheads
from tests.oracle import closed_form

RELATIVE = 1e-10
EPS = torch.finfo(torch.float64).eps
FEATURE_SCALES = (1e-3, 1e-2, 0.1, 1.0, 3.0, 10.0)
SIZES = (2, 3, 9)


@dataclass(frozen=True)
class Case:
    """A score object and the same score of the oracle."""

    make: Any
    name: str
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def score(self):
        return self.make(**self.params)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.params.items())])


def _cases() -> list[Case]:
    readouts = ("height", "height_sq", "distance")
    cases = [
        Case(coneheads.Penumbral, "penumbral", {"lift": lift, "readout": readout})
        for lift in ("xi", "exp", "psi")
        for readout in readouts
    ]
    cases += [
        Case(coneheads.Umbral, "umbral", {"lift": lift, "readout": readout})
        for lift in ("psi", "exp")
        for readout in readouts
    ]
    other = {"gamma": 0.7, "height_scale": 0.25}
    cases += [
        Case(coneheads.Penumbral, "penumbral", {"light_height": 2.5, **other}),
        Case(
            coneheads.Penumbral,
            "penumbral",
            {"light_height": 0.3, "lift": "exp", "readout": "distance", **other},
        ),
        Case(coneheads.Umbral, "umbral", {"radius": 1.3, **other}),
        Case(coneheads.Umbral, "umbral", {"radius": 0.02, "lift": "exp", "readout": "distance", **other}),
        Case(coneheads.FinitePenumbral, "penumbral_finite", {}),
        Case(coneheads.FinitePenumbral, "penumbral_finite", {"light_radius": 1.4, "gamma": 3.0}),
        Case(coneheads.FiniteUmbral, "umbral_finite", {}),
        Case(coneheads.FiniteUmbral, "umbral_finite", {"radius": 0.8, "gamma": 0.5}),
        Case(coneheads.HalfSpaceDistance, "half_space", {"lift": "psi"}),
        Case(coneheads.HalfSpaceDistance, "half_space", {"lift": "exp"}),
        Case(coneheads.HalfSpaceDistance, "half_space", {"beta": 0.4, "offset": -1.5}),
        Case(coneheads.HyperboloidDistance, "hyperboloid", {}),
        Case(coneheads.HyperboloidDistance, "hyperboloid", {"beta": 2.0, "offset": 0.3}),
        Case(coneheads.Laplacian, "laplacian", {}),
        Case(coneheads.Laplacian, "laplacian", {"gamma": 4.0}),
        Case(coneheads.DotProduct, "dot", {}),
        Case(coneheads.DotProduct, "dot", {"scale": 0.6}),
    ]
    return cases


every_case = pytest.mark.parametrize("case", _cases(), ids=str)
every_size = pytest.mark.parametrize("size", SIZES)


def features(case: Case, count: int, size: int, scale: float, what: str) -> torch.Tensor:
    """Normal features of the given scale, the same in every run and different for every use."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {size} {scale} {what}".encode()))
    return scale * torch.randn(count, size, dtype=torch.float64, generator=generator)


def assert_agrees_with_the_oracle(case: Case, queries: torch.Tensor, keys: torch.Tensor, floor) -> None:
    """Every query [L, E] with every key [S, E]; `floor` is asked only where 1e-10 relative fails."""
    got = coneheads.attention_scores(queries[None], keys[None], score=case.score)[0]
    for i, q in enumerate(queries.tolist()):
        for j, k in enumerate(keys.tolist()):
            want = closed_form.score(case.name, q, k, **case.params)
            error = abs(got[i, j].item() - want)
            if error > RELATIVE * abs(want):
                allowed = floor(case, q, k)
                message = f"query {q}\nkey {k}\ngot {got[i, j].item()!r}, want {float(want)!r}"
                assert error <= allowed, f"{message}\nerror {float(error):.2e}, allowed {float(allowed):.2e}"


def rounding_floor(case: Case, q: list[float], k: list[float]) -> float:
    """An error no formula can avoid that stores its result, or a height, in float64.

    `distance` takes the logarithm of a height; where that is near 1 the score is near 0, and the rounding of
    the height, gamma * eps, is all of it. The other read-outs have no such zero. The last term is the
    rounding of the oracle itself: arccos of a cosine that should be 1.
    """
    logarithm = 4 * EPS * case.params.get("gamma", 1.0) if case.params.get("readout") == "distance" else 0.0
    return logarithm + 1e-40


def conditioning_floor(case: Case, q: list[float], k: list[float]) -> float:
    """The change of the score when every feature is rounded once, eight times over.

    Two points that nearly coincide, or share a large offset, differ by a small part of their position. A
    position x = f[:-1] y is rounded when it is stored, which is what a relative change of a feature by eps
    does, and a height y = exp(f_d) when f_d changes by eps; the difference of two positions cannot know
    better.
    """
    score = closed_form.score(case.name, q, k, **case.params)
    change = 0.0
    for which in (0, 1):
        for index in range(len(q)):
            pair = [list(q), list(k)]
            value = pair[which][index]
            is_height = index == len(q) - 1
            # In exact arithmetic, since the sum need not be a float64.
            step = EPS * max(abs(value), 1.0 if is_height else 0.0)
            pair[which][index] = closed_form.mpf(value) + step
            change += abs(closed_form.score(case.name, *pair, **case.params) - score)
    return 8 * change + rounding_floor(case, q, k)


@every_case
@every_size
def test_scores_of_random_pairs_agree_with_the_oracle(case, size):
    for scale in FEATURE_SCALES:
        queries, keys = (features(case, 3, size, scale, what) for what in ("queries", "keys"))
        assert_agrees_with_the_oracle(case, queries, keys, rounding_floor)


@every_case
@every_size
def test_score_of_a_token_with_itself_agrees_with_the_oracle(case, size):
    for scale in FEATURE_SCALES:
        token = features(case, 1, size, scale, "token")
        assert_agrees_with_the_oracle(case, token, token.clone(), rounding_floor)


@every_case
@every_size
@pytest.mark.parametrize("gap", [1e-6, 1e-9])
def test_scores_of_nearly_coincident_pairs_agree_with_the_oracle(case, size, gap):
    for scale in FEATURE_SCALES:
        query = features(case, 1, size, scale, "query")
        key = query * (1 + gap * features(case, 1, size, 1.0, "difference"))
        assert_agrees_with_the_oracle(case, query, key, conditioning_floor)


# exp is left out: there an offset is no translation. At 1000 its radius saturates, and all points that share
# the offset fall on nearly the same spot of the boundary, however the features differ.
@pytest.mark.parametrize("case", [case for case in _cases() if case.params.get("lift") != "exp"], ids=str)
@every_size
def test_an_offset_shared_by_queries_and_keys_costs_no_more_than_its_rounding(case, size):
    offset = torch.full((size,), 1000.0, dtype=torch.float64)
    if case.name not in ("laplacian", "dot"):
        offset[-1] = 0.0  # the last feature is a height, not a position
    for scale in FEATURE_SCALES:
        queries, keys = (features(case, 2, size, scale, what) + offset for what in ("queries", "keys"))
        assert_agrees_with_the_oracle(case, queries, keys, conditioning_floor)


@every_size
@pytest.mark.parametrize("case", [case for case in _cases() if case.params.get("readout") != "distance"], ids=str)
def test_saturation_of_the_lifts_is_part_of_the_function(case, size):
    """Features of scale 60: beyond |f_d| = 20 for psi, |f| = 20 for exp and the radius 40 of pseudopolar."""
    queries, keys = (features(case, 2, size, 60.0, what) for what in ("queries", "keys"))
    assert_agrees_with_the_oracle(case, queries, keys, conditioning_floor)
