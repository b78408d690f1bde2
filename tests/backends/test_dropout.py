"""Dropout: fair, reproducible, the same in every backend, and the same in backward."""

import pytest
import torch

import coneheads
from coneheads.backends.dropout import keep_scale, row_numbers
from tests.cases import BACKEND_NAMES, SCORE_NAMES

every_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)


def kept(dropout_p, seed=1, batch=4, heads=4, length=64, keys=256):
    rows = row_numbers(batch, heads, length, torch.device("cpu"))
    return keep_scale(torch.tensor(seed), rows, torch.arange(keys), dropout_p, torch.float64)


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_weights_is_p_along_every_dimension(dropout_p):
    dropped = kept(dropout_p) == 0
    for dim in range(4):
        n = dropped.numel() / dropped.shape[dim]
        share = dropped.double().mean([d for d in range(4) if d != dim])
        assert ((share - dropout_p).abs() < 5.5 * (dropout_p * (1 - dropout_p) / n) ** 0.5).all()


def test_rows_columns_and_seeds_are_uncorrelated():
    first, second = (kept(0.5, seed) - 1 for seed in (1, 2))  # -1 or 1
    n = first.numel()
    others = [second, *(first.roll(1, dim) for dim in range(4)), first.mT.reshape(first.shape)]
    for other in others:
        assert (first * other).mean().abs() < 5 / n**0.5


def test_kept_weights_are_scaled_to_keep_the_mean():
    assert kept(0.25).unique().tolist() == [0, 1 / 0.75]


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_backends_drop_the_same_weights_for_the_same_seed(name):
    query, key, value = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 9), (2, 13), (2, 13)))
    outs = []
    for backend in BACKEND_NAMES:
        torch.manual_seed(3)
        outs.append(coneheads.attention(query, key, value, None, 0.4, score=name, enable_gqa=True, backend=backend))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@every_backend
def test_dropout_is_seeded_by_torch_and_differs_from_call_to_call(backend):
    query = torch.randn(1, 2, 16, 8)
    torch.manual_seed(0)
    first, second = (coneheads.attention(query, query, query, dropout_p=0.5, backend=backend) for _ in range(2))
    torch.manual_seed(0)
    again = coneheads.attention(query, query, query, dropout_p=0.5, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@every_backend
def test_backward_replays_the_same_choices(backend):
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]

    def out(*leaves):
        torch.manual_seed(7)
        return coneheads.attention(*leaves, None, 0.5, backend=backend)

    assert torch.autograd.gradcheck(out, leaves)


@every_backend
def test_mean_over_seeds_is_attention_without_dropout(backend):
    query, key, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 3)
    mean = torch.stack(
        [coneheads.attention(query, key, value, dropout_p=0.3, backend=backend) for _ in range(2000)]
    ).mean(0)
    torch.testing.assert_close(mean, coneheads.attention(query, key, value, backend=backend), rtol=0, atol=0.08)


@every_backend
def test_lse_is_that_of_all_weights(backend):
    query = torch.randn(1, 2, 16, 8)
    _, lse = coneheads.attention(query, query, query, dropout_p=0.5, backend=backend, return_lse=True)
    _, want = coneheads.attention(query, query, query, backend=backend, return_lse=True)
    torch.testing.assert_close(lse, want)


def test_dropout_does_not_depend_on_the_size_of_tiles(monkeypatch):
    query = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    outs = []
    for tile, columns in ((1 << 18, 1024), (64, 16), (7, 3)):
        monkeypatch.setattr("coneheads.backends.pairs.TILE", tile)
        monkeypatch.setattr("coneheads.backends.pairs.COLUMNS", columns)
        torch.manual_seed(0)
        outs.append(coneheads.attention(query, query, query, dropout_p=0.5, backend="chunked"))
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(outs[2], outs[0])
