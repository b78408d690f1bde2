"""What tokens bring to the sums of the Triton kernels: multiplied in float64, parts and sides give what they should."""

import pytest
import torch

pytest.importorskip("triton")
sums = pytest.importorskip("coneheads.backends.triton.sums")
scores = pytest.importorskip("coneheads.backends.triton.scores")

HEIGHTS = [1.0, 0.7, 3.1]


def products(own, other, number):
    """[..., own, other]: the sum of one number over all pairs of two kinds of tokens."""
    side = own[1].double().unflatten(-1, (-1, sums.SLOTS))[..., number, :]
    return side @ other[0].double().mT


def penumbral_tokens(light_height, count=150):
    """Squared norms and levels, among these of leaves and of points at the light."""
    h = torch.full((1, 2, 1), light_height, dtype=torch.float64)
    height = h * torch.rand(1, 2, count, dtype=torch.float64)
    height[..., :10], height[..., 10:20] = h, h * 1e-8
    level = (height.square() / (h + (h.square() - height.square()).sqrt())).float()
    return torch.randn(1, 2, count).square() * 40, sums.with_16_bits(level, h), h


@pytest.mark.parametrize("light_height", HEIGHTS)
def test_sums_of_penumbral_cones(light_height):
    torch.manual_seed(0)
    own_norm, own_level, h = penumbral_tokens(light_height)
    other_norm, other_level, _ = penumbral_tokens(light_height, 130)
    own = sums.of_penumbral(own_norm, own_level, h)
    other = sums.of_penumbral(other_norm, other_level, h)
    a, b = own_level.double()[..., :, None], other_level.double()[..., None, :]
    norm = own_norm.double()[..., :, None] + other_norm.double()[..., None, :]
    h = h[..., None]
    t, u = h - a, h - b
    assert (t >= 0).all()
    assert (u >= 0).all()
    wanted = {  # with what they may be off
        "norms": (norm, 1e-6 * norm),
        "difference": (a - b, 1e-15),
        "both": (a + b, 1e-15),
        "apart": (t.square() - u.square(), 2**-22 * torch.maximum(t, u).square()),
    }
    assert own[1].shape[-1] == len(wanted) * sums.SLOTS
    for number, (name, (want, error)) in enumerate(wanted.items()):
        got = products(own, other, number)[..., :150, :130]
        assert ((got - want).abs() <= error).all(), f"{name}: off by up to {(got - want).abs().max():.2e}"
    # Rounding must not find a descendant of a point at the light beyond it.
    both, difference = (products(own, other, number)[..., :150, :130].float() for number in (2, 1))
    twice = both + difference.abs()
    assert (twice <= (4 * h).float() * (1 + scores.MARGIN.value) - twice).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_levels(sign):
    torch.manual_seed(0)
    norms, levels = torch.randn(2, 3, 140).square() * 1e6, torch.randn(2, 3, 140).exp()
    own, other = (sums.of_levels(norms[i], levels[i], s, far=False) for i, s in ((0, sign), (1, -sign)))
    n, level = (t.double() for t in (norms, levels))
    for number, want in enumerate(
        [
            n[0][..., :, None] + n[1][..., None, :],
            sign * (level[0][..., :, None] - level[1][..., None, :]),
            level[0][..., :, None] + level[1][..., None, :],
        ]
    ):
        got = products(own, other, number)[..., :140, :140]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_split_numbers_stay_finite_and_add_up():
    numbers = torch.tensor([3.3e38, 1.2345678, 1e-30, 0.0, -7.7777777])
    parts = sums._split(numbers, 3).double()
    assert parts.isfinite().all()
    torch.testing.assert_close(parts.sum(-1), numbers.double(), rtol=2**-23, atol=0)


@pytest.mark.parametrize("cone", ["penumbral", "umbral"])
def test_what_fills_up_a_tile_is_far_from_every_token_and_from_itself(cone):
    norms, level = torch.tensor([[0.0, 1e36]]), torch.tensor([[0.25, 0.5]])
    if cone == "penumbral":
        tokens = [sums.of_penumbral(norms, level, torch.ones(1, 1, dtype=torch.float64)) for _ in range(2)]
    else:
        tokens = [sums.of_levels(norms, level, sign, far=True) for sign in (1, -1)]
    for own, other in (tokens, tokens[::-1]):
        squared = products(own, other, 0)
        assert squared.shape == (1, sums.WHOLE, sums.WHOLE)
        assert (squared[:, :2, 2:] >= sums.FAR).all()
        assert (squared[:, 2:, :] >= sums.FAR).all()
        assert (squared <= 1.1 * sums.FAR).all()
        for number in range(1, own[1].shape[-1] // sums.SLOTS):  # nothing else of it counts
            assert (products(own, other, number)[:, :, 2:].abs() <= 0).all()


def test_levels_have_16_bits_and_are_not_above_the_light():
    h = torch.tensor([8.656], dtype=torch.float64)  # not a number of 16 bits
    level = torch.cat([torch.rand(1000) * 8, h.float() - 1e-6, h.float()])
    rounded = sums.with_16_bits(level, h)
    assert (rounded.view(torch.int32) & 0xFF == 0).all()
    assert (rounded <= h).all()
    torch.testing.assert_close(rounded, level, rtol=2**-15, atol=0)
