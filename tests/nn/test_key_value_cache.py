"""Decoding with ``ConeMultiheadAttention`` and its ``KeyValueCache``: step by step it is what it is at once."""

import pytest
import torch

from coneheads.nn import ConeMultiheadAttention, KeyValueCache

WIDTH, HEADS = 16, 4
CONES = ("penumbral", "umbral")


def decoder_of(score, kv_heads=None, **arguments):
    """A layer whose weights are large, so that a key too many or too few shows.

    In float64: umbral scores reach 1e9 here, and the last digits of a float32 projection decide between two keys.
    """
    sizes = {"num_kv_heads": kv_heads, "batch_first": True, "dtype": torch.float64}
    layer = ConeMultiheadAttention(32, 4, score=score, **sizes, **arguments)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "proj_weight" in name or "bias_" in name:
                parameter.mul_(8)
    return layer.eval()


def tokens(batch, length):
    return torch.randn(batch, length, 32, dtype=torch.float64)


def in_steps(layer, x, sizes, padding=None, **arguments):
    cache, outputs, seen = KeyValueCache(), [], 0
    for part in x.split(sizes, 1):
        seen += part.shape[1]
        now = None if padding is None else padding[:, :seen]
        out, _ = layer(part, part, part, now, cache=cache, is_causal=True, need_weights=False, **arguments)
        outputs.append(out)
        assert cache.length == seen
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "extra keys"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("score", CONES)
def test_cached_chunked_and_full_outputs_agree(score, kv_heads, padded, extra):
    layer, x = decoder_of(score, kv_heads, **extra), tokens(2, 12)
    padding = None
    if padded:
        padding = torch.zeros(2, 12, dtype=torch.bool)
        padding[0, :3] = True
    causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        full = layer(x, x, x, padding, attn_mask=causal, need_weights=False)[0]
        for sizes in ([1] * 12, [12], [5, 4, 3], [6, 1, 1, 1, 1, 1, 1]):
            torch.testing.assert_close(in_steps(layer, x, sizes, padding), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", CONES)
def test_cached_and_full_outputs_agree_in_float32(score):
    layer, x = ConeMultiheadAttention(32, 4, batch_first=True, score=score), torch.randn(2, 12, 32)
    causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
    with torch.no_grad():
        full = layer(x, x, x, attn_mask=causal, need_weights=False)[0]
        torch.testing.assert_close(in_steps(layer, x, [5, 4, 1, 1, 1]), full, rtol=1e-5, atol=1e-5)


def test_left_padding_changes_nothing():
    layer, x = decoder_of("umbral"), tokens(1, 6)
    padded, padding = torch.cat([tokens(1, 2), x], 1), torch.zeros(1, 8, dtype=torch.bool)
    padding[:, :2] = True
    with torch.no_grad():
        torch.testing.assert_close(in_steps(layer, padded, [4, 1, 3], padding)[:, 2:], in_steps(layer, x, [6]))


def test_a_later_token_has_no_influence():
    layer, x = decoder_of("penumbral"), tokens(2, 8)
    other = x.clone()
    other[:, 5:] = tokens(2, 3)
    with torch.no_grad():
        a, b = (in_steps(layer, one, [3, 5]) for one in (x, other))
    # To rounding: positions are relative to a mean that later queries share.
    torch.testing.assert_close(a[:, :5], b[:, :5], atol=1e-5, rtol=1e-5)
    assert not torch.equal(a[:, 5:], b[:, 5:])


def test_masks_and_weights_count_the_cached_keys():
    layer, x, cache = decoder_of("umbral"), tokens(2, 7), KeyValueCache()
    mask = torch.rand(7, 7) < 0.3
    mask[:, 0] = False
    full, weights = layer(x, x, x, attn_mask=mask | torch.ones(7, 7).triu(1).bool())
    layer(x[:, :4], x[:, :4], x[:, :4], cache=cache)
    last = x[:, 4:]
    causal = torch.ones(7, 7).triu(1).bool()
    out, got = layer(last, last, last, attn_mask=(mask | causal)[4:], cache=cache)
    torch.testing.assert_close(got, weights[:, 4:])
    torch.testing.assert_close(out, full[:, 4:])


@pytest.mark.parametrize("length_first", [False, True])
def test_inputs_without_a_batch_and_length_first_are_cached_too(length_first):
    layer = ConeMultiheadAttention(WIDTH, HEADS)
    x = torch.randn(6, 2, WIDTH) if length_first else torch.randn(6, WIDTH)
    causal = torch.ones(6, 6).triu(1).bool()
    full, cache = layer(x, x, x, attn_mask=causal)[0], KeyValueCache()
    parts = [layer(part, part, part, is_causal=True, cache=cache)[0] for part in x.split([2, 1, 3])]
    torch.testing.assert_close(torch.cat(parts), full)


def test_gradients_go_through_a_cache():
    layer, x = decoder_of("umbral"), tokens(2, 6)
    causal = torch.ones(6, 6).triu(1).bool()
    full = torch.autograd.grad(layer(x, x, x, attn_mask=causal)[0].sum(), layer.in_proj_weight)[0]
    stepped = torch.autograd.grad(in_steps(layer, x, [2, 1, 3]).sum(), layer.in_proj_weight)[0]
    torch.testing.assert_close(stepped, full, rtol=1e-3, atol=1e-3)


def test_a_cache_goes_from_inference_mode_to_no_grad_to_gradients():
    layer, x, cache, outputs = decoder_of("umbral"), tokens(2, 6), KeyValueCache(), []
    # Two steps in inference mode leave room for the third, which may not write into it.
    modes = (torch.inference_mode(), torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.no_grad())
    for mode, part in zip(modes, x.split([2, 1, 1, 1, 1], 1), strict=True):
        with mode:
            outputs.append(layer(part, part, part, is_causal=True, cache=cache)[0].detach().clone())
    causal = torch.ones(6, 6).triu(1).bool()
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x, x, x, attn_mask=causal)[0])


def test_room_is_doubled_so_that_few_steps_copy():
    cache, row, rooms = KeyValueCache(), torch.randn(1, 2, 1, 4), set()
    with torch.no_grad():
        for _ in range(200):
            cache.append(row, row)
            rooms.add(cache._keys.data_ptr())
            assert cache._keys.shape[-2] <= 2 * cache.length
    assert cache.length == 200
    assert len(rooms) <= 10


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("score", CONES)
def test_beams_are_reordered(score, kv_heads):
    layer, x = decoder_of(score, kv_heads), tokens(3, 6)
    order, cache = torch.tensor([2, 0, 0, 1]), KeyValueCache()
    first, last = x[:, :4], tokens(4, 2)
    with torch.no_grad():
        layer(first, first, first, is_causal=True, cache=cache)
        cache.reorder(order)
        out = layer(last, last, last, is_causal=True, cache=cache)[0]
        whole = torch.cat([first[order], last], 1)
        full = layer(whole, whole, whole, attn_mask=torch.ones(6, 6).triu(1).bool())[0]
    torch.testing.assert_close(out, full[:, 4:], rtol=1e-5, atol=1e-5)


def test_clear_starts_anew():
    layer, x, cache = decoder_of("penumbral"), tokens(2, 6), KeyValueCache()
    before = layer(x, x, x, is_causal=True, cache=cache)[0]
    cache.clear()
    assert cache.length == 0
    assert torch.equal(layer(x, x, x, is_causal=True, cache=cache)[0], before)


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_a_failed_call_left_empty_belongs_to_nobody(static):
    first, second, cache = decoder_of("umbral"), decoder_of("umbral"), KeyValueCache(static=static)
    x = tokens(2, 4)
    with pytest.raises(ValueError, match="the same length"):
        first(x, x, tokens(2, 5), cache=cache)
    second(x, x, x, cache=cache)
    with pytest.raises(ValueError, match="the keys of another layer"):
        first(x, x, x, cache=cache)


def test_a_static_cache_projects_the_memory_once():
    layer, memory, cache = (
        decoder_of("umbral", 2, add_zero_attn=True),
        tokens(2, 9),
        KeyValueCache(static=True),
    )
    queries = tokens(2, 4)
    want = layer(queries, memory, memory)[0]
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 7:] = True
    parts = [layer(query, memory, memory, cache=cache)[0] for query in queries.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    with torch.no_grad():
        layer.k_proj_weight.zero_()  # what is in the cache is not projected again
    torch.testing.assert_close(layer(queries, None, None, cache=cache)[0], want)
    masked = layer(queries, None, None, padding, cache=cache)[0]
    assert not torch.allclose(masked[1], want[1])
    cache.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(layer(queries.flip(0), None, None, cache=cache)[0], want.flip(0))
    assert repr(cache) == "KeyValueCache(length=9, batch=2, static)"


@pytest.mark.parametrize("indices", [[0, 1], torch.tensor([0.0]), torch.tensor([[0]])])
def test_reorder_takes_row_numbers(indices):
    with pytest.raises(TypeError, match=r"indices must be a tensor \[batch\]"):
        KeyValueCache().reorder(indices)
