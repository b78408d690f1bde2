"""Contract 3 at large: random calls of every kind give no NaN and no inf, in output or gradient.

The number of calls is a flag: ``pytest tests/test_fuzz.py --fuzz-cases 1000000``.
"""

import math
import random

import pytest
import torch

import coneheads
from coneheads.scores import BY_NAME
from tests.cases import BACKEND_NAMES, DTYPES, SCORE_NAMES

SHARDS = 16


def random_score(rng, name):
    """A score with random fields: floats, or tensors per head."""

    def positive():
        return rng.choice([1.0, 10 ** rng.uniform(-2, 2)])

    cls = BY_NAME[name]
    fields = cls().parameters().keys()
    values = {field: positive() for field in fields if field not in ("height_scale", "offset", "scale")}
    if "height_scale" in fields:
        values["height_scale"] = rng.choice([1.0, 1.0, -1.0, 0.0, rng.uniform(0, 2)])
    for field in ("radius", "light_radius"):
        if field in fields:
            values[field] = 10 ** rng.uniform(-2, 0.7)
    if name in ("penumbral", "umbral"):
        values["readout"] = rng.choice(["height", "height_sq", "distance"])
        values["lift"] = rng.choice(["xi", "psi", "exp"] if name == "penumbral" else ["psi", "exp"])
    if name == "half_space":
        values["lift"] = rng.choice(["psi", "exp"])
    return values


def features(rng, *shape):
    """Normal features at a scale from 1e-30 to 1e4, or one of the special cases."""
    scale = 10 ** rng.uniform(-30, 4)
    kind = rng.choice(["normal"] * 6 + ["zeros", "equal", "coarse", "mixed"])
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "equal":
        return scale * torch.randn(shape[-1]).expand(shape)
    if kind == "coarse":
        return scale * torch.randn(shape).sign()
    if kind == "mixed":  # every entry at a scale of its own
        return torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-30, 4)
    return scale * torch.randn(shape)


def random_mask(rng, b, h, length, keys):
    kind = rng.choice(["none", "none", "causal", "boolean", "float"])
    if kind == "none":
        return {}
    if kind == "causal":
        return {"is_causal": True}
    shape = [rng.choice([1, n]) for n in (b, h, length, keys)]
    allowed = torch.rand(shape) > rng.choice([0.1, 0.5, 1.0])
    if kind == "boolean":
        return {"attn_mask": allowed}
    return {"attn_mask": (10 ** rng.uniform(-2, 3) * torch.randn(shape)).masked_fill(~allowed, -torch.inf)}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_nan_or_inf_in_random_calls(shard, request):
    cases = math.ceil(request.config.getoption("--fuzz-cases") / SHARDS)
    rng = random.Random(shard)
    torch.manual_seed(shard)
    for case in range(cases):
        name = SCORE_NAMES[(case + shard) % len(SCORE_NAMES)]
        dtype = rng.choice(DTYPES)
        b, group, kv_heads = rng.choice([1, 2]), rng.choice([1, 1, 2]), rng.choice([1, 2])
        length, keys = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 4, 6])
        size, value_size = rng.choice([2, 3, 5, 8, 17]), rng.choice([1, 3])
        query = features(rng, b, group * kv_heads, length, size)
        key = features(rng, b, kv_heads, keys, size)
        if rng.random() < 0.2 and length <= keys and group == 1:
            query = key[:, :, :length].clone()
        value = torch.randn(b, kv_heads, keys, value_size)
        leaves = [t.clamp(-6e4, 6e4).to(dtype).requires_grad_() for t in (query, key, value)]
        fields = random_score(rng, name)
        parameters = []
        if rng.random() < 0.3:  # learned parameters
            fields = {
                field: torch.full((group * kv_heads,), value).requires_grad_() if isinstance(value, float) else value
                for field, value in fields.items()
            }
            parameters = [value for value in fields.values() if isinstance(value, torch.Tensor)]
        backend = rng.choice(BACKEND_NAMES)
        mask = random_mask(rng, b, group * kv_heads, length, keys)
        out = coneheads.attention(
            *leaves,
            **mask,
            score=BY_NAME[name](**fields),
            enable_gqa=group > 1,
            backend=backend,
            dropout_p=rng.choice([0.0, 0.0, 0.3]),
        )
        grads = torch.autograd.grad(out, [*leaves, *parameters], torch.randn_like(out))
        described = f"shard {shard}, case {case}: {name} {fields}, {dtype}, {backend}, {list(mask)}"
        assert out.isfinite().all(), f"output of {described}"
        for label, grad in zip(("query", "key", "value", *(f for f in fields if parameters)), grads, strict=False):
            assert grad.isfinite().all(), f"gradient of {label} of {described}"
