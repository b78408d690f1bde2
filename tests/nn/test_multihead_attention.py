"""``ConeMultiheadAttention`` is ``nn.MultiheadAttention`` with another score, smaller sizes and a cache."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import coneheads
from coneheads.nn import ConeMultiheadAttention, KeyValueCache
from tests.cases import SCORE_NAMES

WIDTH, HEADS, BATCH, LENGTH, KEYS = 16, 4, 2, 5, 7
SHAPES = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim": {"kdim": 10},
    "kdim, vdim": {"kdim": 10, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True},
}
MASKS = {
    "none": (None, None),
    "pairs": ("bool 2", None),
    "pairs of every head": ("bool 3", None),
    "added": ("float 2", None),
    "added to every head": ("float 3", None),
    "padding": (None, "bool"),
    "padding added": (None, "float"),
    "both": ("bool 2", "bool"),
    "both added": ("float 3", "float"),
}
CONES = ("penumbral", "umbral")


def pair(**arguments):
    """An ``nn.MultiheadAttention`` and ours with the dot product and its weights, biases not zero."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **arguments)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = ConeMultiheadAttention(WIDTH, HEADS, **arguments, score="dot")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def sequences(layer, how, *, selfish=False):
    """query, key and value for this layer: batch first, not, or without a batch."""

    def one(length, size):
        shape = {"batch first": (BATCH, length, size), "length first": (length, BATCH, size), "one": (length, size)}
        return torch.randn(shape[how], requires_grad=True)

    if selfish:
        x = one(KEYS, WIDTH)
        return x, x, x
    return one(LENGTH, WIDTH), one(KEYS, layer.kdim), one(KEYS, layer.vdim)


def masks(kind, how, length):
    pairs, padding = MASKS[kind]
    batch = 1 if how == "one" else BATCH
    result = {}
    if pairs:
        shape = (length, KEYS) if pairs.endswith("2") else (batch * HEADS, length, KEYS)
        mask = torch.rand(shape) < 0.4
        mask[..., 2] = False  # no row without a key: PyTorch gives NaN there
        result["attn_mask"] = mask if pairs.startswith("bool") else torch.randn(shape).masked_fill(mask, -torch.inf)
    if padding:
        mask = torch.zeros(batch, KEYS, dtype=torch.bool)
        mask[0, -2:] = True
        mask = mask if padding == "bool" else torch.randn(mask.shape).masked_fill(mask, -torch.inf)
        result["key_padding_mask"] = mask[0] if how == "one" else mask
    return result


def check_same(theirs, ours, inputs, **arguments):
    """Output, weights and all gradients agree."""
    (want, want_weights), (got, got_weights) = theirs(*inputs, **arguments), ours(*inputs, **arguments)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert (got_weights is None) == (want_weights is None)
    if want_weights is not None:
        torch.testing.assert_close(got_weights, want_weights, rtol=1e-4, atol=1e-5)
    probe = torch.randn_like(want)
    leaves = list(dict.fromkeys(inputs))
    wanted = torch.autograd.grad((want * probe).sum(), [*leaves, *theirs.parameters()])
    gotten = torch.autograd.grad((got * probe).sum(), [*leaves, *ours.parameters()])
    for a, b in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["batch first", "length first", "one"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dot_product_reproduces_multihead_attention(shape, kind, how):
    theirs, ours = pair(**SHAPES[shape], batch_first=how == "batch first")
    inputs = sequences(theirs, how)
    for need_weights, average in ((True, True), (True, False), (False, True)):
        arguments = {"need_weights": need_weights, "average_attn_weights": average}
        check_same(theirs, ours, inputs, **arguments, **masks(kind, how, LENGTH))


@pytest.mark.parametrize("how", ["batch first", "length first", "one"])
@pytest.mark.parametrize("kind", MASKS)
def test_dot_product_reproduces_self_attention_with_one_projection(kind, how):
    theirs, ours = pair(batch_first=how == "batch first")
    inputs = sequences(theirs, how, selfish=True)
    check_same(theirs, ours, inputs, **masks(kind, how, KEYS))
    theirs.eval(), ours.eval()
    given = masks(kind, how, KEYS)
    with torch.no_grad():
        # PyTorch's fast path, which takes boolean masks
        want, got = theirs(*inputs, **given, need_weights=False)[0], ours(*inputs, **given, need_weights=False)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_causal_hint_with_the_causal_mask_is_that_of_multihead_attention(dtype, need_weights, padded):
    theirs, ours = pair(batch_first=True)
    inputs = sequences(theirs, "batch first", selfish=True)
    mask = nn.Transformer.generate_square_subsequent_mask(KEYS)
    given = {"attn_mask": mask if dtype != torch.bool else mask == -torch.inf}
    if padded:
        padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
        padding[:, -1] = True
        given["key_padding_mask"] = padding if dtype == torch.bool else padding.float() * -5
    check_same(theirs, ours, inputs, **given, need_weights=need_weights, is_causal=True)


def test_the_causal_hint_hides_no_extra_key():
    """nn.MultiheadAttention shows them if it returns weights, and hides them if not."""
    layer = ConeMultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True)
    x, mask = torch.randn(KEYS, BATCH, WIDTH), nn.Transformer.generate_square_subsequent_mask(KEYS)
    with_weights, without = (
        layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=need) for need in (True, False)
    )
    assert (with_weights[1][:, :, -2:] > 0).all()
    torch.testing.assert_close(with_weights[0], without[0])


def test_a_wrong_causal_hint_changes_nothing():
    layer = ConeMultiheadAttention(WIDTH, HEADS)
    x = torch.randn(KEYS, BATCH, WIDTH)
    mask = torch.rand(KEYS, KEYS) < 0.3
    mask[:, 0] = False
    hinted, plain = (layer(x, x, x, attn_mask=mask, is_causal=hint, need_weights=False)[0] for hint in (True, False))
    assert torch.equal(hinted, plain)


def test_masks_of_two_kinds_are_joined():
    layer = ConeMultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, KEYS, WIDTH)
    pairs, padding = torch.randn(KEYS, KEYS), torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[:, 3] = True
    joined = layer(x, x, x, padding, attn_mask=pairs)[0]
    as_float = torch.zeros(BATCH, KEYS).masked_fill(padding, -torch.inf)
    torch.testing.assert_close(joined, layer(x, x, x, as_float, attn_mask=pairs)[0])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("score", ["dot", *CONES])
def test_a_row_without_keys_gives_the_bias_of_out_proj(score, added, need_weights):
    layer = ConeMultiheadAttention(WIDTH, HEADS, score=score)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(KEYS, WIDTH, requires_grad=True)
    mask = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    mask[2] = True
    mask = torch.zeros(KEYS, KEYS).masked_fill(mask, -torch.inf) if added else mask
    out, weights = layer(x, x, x, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(out[2], layer.out_proj.bias)
    if need_weights:
        assert (weights[2] == 0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_padded_token_may_hold_nan(need_weights):
    layer = ConeMultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, padding = torch.randn(BATCH, KEYS, WIDTH), torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[:, -2:] = True
    clean = layer(x[:, :-2], x[:, :-2], x[:, :-2], need_weights=need_weights)[0]
    x[:, -2:] = torch.nan
    got = layer(x[:, :-2], x, x, padding, need_weights=need_weights)[0]
    torch.testing.assert_close(got, clean)


def test_dropout_is_on_the_weights_in_training_alone():
    layer = ConeMultiheadAttention(32, 2, dropout=0.5)
    x = torch.randn(40, 3, 32)
    weights = layer(x, x, x, average_attn_weights=False)[1]
    assert 0.4 < (weights == 0).float().mean() < 0.6
    layer.eval()
    assert (layer(x, x, x, average_attn_weights=False)[1] > 0).all()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_initialisation_and_state_dict_are_those_of_multihead_attention(shape):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **SHAPES[shape])
    torch.manual_seed(3)
    ours = ConeMultiheadAttention(WIDTH, HEADS, **SHAPES[shape])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    torch.manual_seed(4)
    theirs._reset_parameters()
    torch.manual_seed(4)
    ours._reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("extra", [{}, {"qk_dim": 3, "add_bias_kv": True}])
def test_weights_are_not_drawn_anew_while_a_loader_has_replaced_torchs_functions(extra, monkeypatch):
    """As transformers does it in from_pretrained, where it calls _reset_parameters after the weights have come."""
    layer = ConeMultiheadAttention(WIDTH, HEADS, **extra)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    for name in ("uniform_", "xavier_uniform_", "xavier_normal_", "zeros_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_: tensor)
    layer._reset_parameters()
    assert all(map(torch.equal, layer.parameters(), before))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("qk_dim", [2, 3, 4, 9])
@pytest.mark.parametrize("score", ["dot", "umbral"])
def test_smaller_queries_and_shared_heads_are_the_operator_on_the_projections(score, qk_dim, kv_heads):
    layer = ConeMultiheadAttention(WIDTH, HEADS, batch_first=True, qk_dim=qk_dim, num_kv_heads=kv_heads, score=score)
    nn.init.normal_(layer.in_proj_bias)
    x = torch.randn(BATCH, KEYS, WIDTH)
    if (qk_dim, kv_heads) == (4, 4):
        weights = layer.in_proj_weight.split([16, 16, 16])
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        assert [len(weight) for weight in weights] == [4 * qk_dim, kv_heads * qk_dim, kv_heads * 4]
    biases = layer.in_proj_bias.split([len(weight) for weight in weights])
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for weight, bias, heads in zip(weights, biases, (4, kv_heads, kv_heads), strict=True)
    )
    expected = coneheads.attention(q, k, v, score=layer.cone.score(), enable_gqa=True)
    expected = layer.out_proj(expected.transpose(1, 2).flatten(2))
    for need_weights in (False, True):
        torch.testing.assert_close(layer(x, x, x, need_weights=need_weights)[0], expected)


def test_a_checkpoint_of_other_sizes_is_refused_by_torch():
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    with pytest.raises(RuntimeError, match=r'Missing key.*"q_proj_weight"'):
        ConeMultiheadAttention(WIDTH, HEADS, qk_dim=2).load_state_dict(theirs.state_dict())
    theirs = nn.MultiheadAttention(WIDTH, HEADS, kdim=5)
    with pytest.raises(RuntimeError, match="size mismatch for k_proj_weight"):
        ConeMultiheadAttention(WIDTH, HEADS, kdim=5, num_kv_heads=2).load_state_dict(theirs.state_dict())


def test_a_small_qk_dim_shrinks_queries_and_keys_alone():
    def count(**sizes):
        return sum(parameter.numel() for parameter in ConeMultiheadAttention(512, 4, **sizes).parameters())

    # 2 * (512 * 512 + 512) of queries and keys become 2 * (64 * 512 + 64)
    assert count() - count(qk_dim=16) == 2 * (512 - 64) * 513


@pytest.mark.parametrize("extra", [{}, {"qk_dim": 3}, {"num_kv_heads": 2, "add_bias_kv": True, "kdim": 6}])
def test_copies_and_pickles_compute_the_same(extra):
    layer = ConeMultiheadAttention(WIDTH, HEADS, **extra, score="umbral", learn_gamma=True)
    inputs = sequences(layer, "length first")
    want = layer(*inputs)[0]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(again(*inputs)[0], want)
        assert not again._qkv_same_embed_dim


def test_a_state_of_old_without_the_attribute_loads():
    layer = ConeMultiheadAttention(WIDTH, HEADS)
    state = {name: value for name, value in layer.__getstate__().items() if name != "_qkv_same_embed_dim"}
    again = ConeMultiheadAttention.__new__(ConeMultiheadAttention)
    again.__setstate__(state)
    x = torch.randn(KEYS, WIDTH)
    assert torch.equal(again(x, x, x)[0], layer(x, x, x)[0])


def test_learned_numbers_arrive_in_the_state_dict_and_get_gradients():
    layer = ConeMultiheadAttention(WIDTH, HEADS, score="umbral", learn_gamma=True, learn_radius=True)
    assert {"cone.log_gamma", "cone.log_radius"} < set(layer.state_dict())
    x = torch.randn(KEYS, BATCH, WIDTH)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert (layer.cone.log_gamma.grad != 0).all()
    assert (layer.cone.log_radius.grad != 0).all()


def test_repr_names_what_is_not_the_default():
    text = repr(ConeMultiheadAttention(WIDTH, HEADS, dropout=0.1, qk_dim=2, batch_first=True))
    assert "embed_dim=16, num_heads=4, qk_dim=2, dropout=0.1, batch_first=True\n" in text
    assert "kdim" not in text
    assert "Penumbral(" in text


def test_compiles_as_one_graph():
    layer = ConeMultiheadAttention(WIDTH, HEADS, batch_first=True, score="umbral", qk_dim=6, num_kv_heads=2)
    x, mask = torch.randn(BATCH, KEYS, WIDTH), nn.Transformer.generate_square_subsequent_mask(KEYS)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    arguments = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    torch.testing.assert_close(compiled(x, x, x, **arguments)[0], layer(x, x, x, **arguments)[0])


def call(layer=None, *, change=None, **arguments):
    layer = layer or ConeMultiheadAttention(WIDTH, HEADS, batch_first=True)
    given = {name: torch.randn(2, 5, WIDTH) for name in ("query", "key", "value")} | (change or {})
    return layer(**given, **arguments)


def filled(static=False):
    layer, cache = ConeMultiheadAttention(WIDTH, HEADS, batch_first=True), KeyValueCache(static=static)
    call(layer, cache=cache)
    return {"layer": layer, "cache": cache}


WRONG_CALLS = {
    "is_causal without a mask": (lambda: {"is_causal": True}, ValueError, "is_causal=True is a hint about attn_mask"),
    "is_causal of a static cache": (lambda: filled(True) | {"is_causal": True}, ValueError, "needs one; got None"),
    "int mask": (lambda: {"attn_mask": torch.ones(5, 5).int()}, TypeError, "attn_mask must be a boolean"),
    "mask shape": (
        lambda: {"attn_mask": torch.ones(5, 4)},
        ValueError,
        r"attn_mask must have the shape \[L, S\] = \[5, 5\]",
    ),
    "mask of heads": (
        lambda: {"attn_mask": torch.ones(4, 5, 5)},
        ValueError,
        r"= \[8, 5, 5\]; got float32 \[4, 5, 5\]",
    ),
    "padding kind": (lambda: {"key_padding_mask": [1]}, TypeError, "key_padding_mask must be a boolean"),
    "padding shape": (
        lambda: {"key_padding_mask": torch.zeros(5).bool()},
        ValueError,
        r"key_padding_mask must have the shape \[B, S\] = \[2, 5\]",
    ),
    "padding of cached keys": (
        lambda: filled() | {"key_padding_mask": torch.zeros(2, 5).bool()},
        ValueError,
        r"= \[2, 10\], cached keys counted",
    ),
    "flag": (lambda: {"need_weights": 1}, TypeError, "need_weights must be True or False"),
    "query features": (
        lambda: {"change": {"query": torch.randn(2, 5, 3)}},
        ValueError,
        "query must have 3 dim.*size 16",
    ),
    "query dimensions": (lambda: {"change": {"query": torch.randn(16)}}, ValueError, "query must have 3 dimensions"),
    "no key": (lambda: {"change": {"key": None}}, TypeError, "key must be a tensor; got NoneType"),
    "batch of one": (
        lambda: {"change": {"query": torch.randn(5, 16)}},
        ValueError,
        "all have a batch or all have none",
    ),
    "lengths": (lambda: {"change": {"value": torch.randn(2, 6, 16)}}, ValueError, "the same length and batch size"),
    "batch": (lambda: {"change": {"query": torch.randn(3, 5, 16)}}, ValueError, r"inputs are \[B, L, features\] here"),
    "cache": (lambda: {"cache": {}}, TypeError, "cache must be a KeyValueCache or None"),
    "cache of another layer": (lambda: {"cache": filled()["cache"]}, ValueError, "the keys of another layer"),
    "causal query of another length": (
        lambda: filled() | {"is_causal": True, "change": {"query": torch.randn(2, 1, 16)}},
        ValueError,
        "as many queries as new keys",
    ),
    "static memory changed": (lambda: filled(True), ValueError, "key is not the tensor that filled the static cache"),
    "static batch": (
        lambda: filled(True) | {"change": {"query": torch.randn(1, 5, 16)}},
        ValueError,
        "batch size 2 of",
    ),
    "cached batch": (
        lambda: filled() | {"change": dict.fromkeys(("query", "key", "value"), torch.randn(3, 5, 16))},
        ValueError,
        r"key must fit what the cache holds, float32 \[2, 4, 5, 4\]",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_call_is_named_and_leaves_the_cache_as_it_was(case):
    make, error, text = WRONG_CALLS[case]
    arguments = make()
    cache = arguments.get("cache")
    before = getattr(cache, "length", None)
    with pytest.raises(error, match=text):
        call(arguments.pop("layer", None), **arguments)
    assert getattr(cache, "length", None) == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(2, WIDTH)])
    with pytest.raises(TypeError, match=r"query is a nested tensor.*use_nested_tensor = False"):
        ConeMultiheadAttention(WIDTH, HEADS, batch_first=True)(x, x, x)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"embed_dim": 10}, ValueError, "embed_dim must be a multiple of num_heads; got embed_dim=10, num_heads=4"),
        ({"embed_dim": 4}, ValueError, r"at least 2 features \(qk_dim\); got embed_dim / num_heads = 1"),
        ({"embed_dim": 8.0}, TypeError, "embed_dim must be an integer; got float 8.0"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1; got 0"),
        ({"qk_dim": 1}, ValueError, "at least 2 features.*got qk_dim=1"),
        ({"qk_dim": True}, TypeError, "qk_dim must be an integer"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads; got num_kv_heads=3, num_heads=4"),
        ({"dropout": 1.5}, ValueError, r"dropout_p must be a number in \[0, 1\)"),
        ({"score": "cone"}, ValueError, "score must be one of"),
        ({"score": "dot", "learn_radius": True}, ValueError, "learn_radius=True"),
    ],
)
def test_a_wrong_constructor_argument_is_named(arguments, error, text):
    with pytest.raises(error, match=text):
        ConeMultiheadAttention(**{"embed_dim": WIDTH, "num_heads": HEADS} | arguments)


def test_a_value_head_of_one_feature_is_fine_with_a_qk_dim():
    layer, x = ConeMultiheadAttention(HEADS, HEADS, qk_dim=2), torch.randn(KEYS, HEADS)
    assert layer(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("score", SCORE_NAMES)
def test_other_dtypes_run_forward_and_backward(score, dtype):
    layer = ConeMultiheadAttention(WIDTH, HEADS, dtype=dtype, score=score, learn_gamma=True)
    x = torch.randn(KEYS, BATCH, WIDTH, dtype=dtype)
    for need_weights in (True, False):
        out, _ = layer(x, x, x, need_weights=need_weights)
        assert out.dtype == dtype
        out.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_autocast_lowers_the_precision_as_in_multihead_attention():
    theirs, ours = pair(batch_first=True, add_bias_kv=True)
    x = torch.randn(BATCH, KEYS, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = theirs(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0]
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
