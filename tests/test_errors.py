"""Contract 8: a wrong call tells how to make it right. Every rule of `_checks` with the sentence that it gives."""

import dataclasses
import re

import pytest
import torch

import coneheads
from coneheads import (
    DotProduct,
    FinitePenumbral,
    FiniteUmbral,
    HalfSpaceDistance,
    HyperboloidDistance,
    Laplacian,
    Penumbral,
    Umbral,
)
from coneheads.scores import Score

Q = torch.randn(2, 4, 5, 8)
K = torch.randn(2, 4, 7, 8)
V = torch.randn(2, 4, 7, 6)


def says(error, text):
    """The whole sentence, so that a change of a word is a decision."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def attend(query=Q, key=K, value=V, *rest, **named):
    return coneheads.attention(query, key, value, *rest, **named)


ATTENTION = [
    (
        "a query that is no tensor",
        lambda: attend(query=[1.0]),
        TypeError,
        "query must be a tensor [..., H, length, size]; got list [1.0]",
    ),
    (
        "integer features",
        lambda: attend(key=K.long()),
        TypeError,
        "key must have one of the dtypes float64, float32, float16, bfloat16; got int64 [2, 4, 7, 8] on cpu",
    ),
    (
        "complex features",
        lambda: attend(value=V.cfloat()),
        TypeError,
        "value must have one of the dtypes float64, float32, float16, bfloat16; got complex64 [2, 4, 7, 6] on cpu",
    ),
    (
        "a vector",
        lambda: attend(query=Q[0, 0, 0]),
        ValueError,
        "query must have at least 2 dimensions, [..., H, length, size]; got float32 [8] on cpu",
    ),
    (
        "a sparse tensor",
        lambda: attend(query=torch.eye(8).to_sparse()),
        TypeError,
        "query must be a dense (strided) tensor; got layout torch.sparse_coo. "
        "Call .to_dense(), or pad a nested tensor and pass attn_mask.",
    ),
    (
        "two dtypes",
        lambda: attend(key=K.double()),
        TypeError,
        "query and key must have the same dtype; "
        "got query float32 [2, 4, 5, 8] on cpu and key float64 [2, 4, 7, 8] on cpu",
    ),
    (
        "two devices",
        lambda: attend(value=V.to("meta")),
        ValueError,
        "query and value must be on the same device; "
        "got query float32 [2, 4, 5, 8] on cpu and value float32 [2, 4, 7, 6] on meta",
    ),
    (
        "two feature sizes",
        lambda: attend(key=K[..., :7]),
        ValueError,
        "query and key must have the same last size E; "
        "got query float32 [2, 4, 5, 8] on cpu and key float32 [2, 4, 7, 7] on cpu",
    ),
    (
        "one feature only",
        lambda: attend(query=Q[..., :1], key=K[..., :1]),
        ValueError,
        "query must have a last size E of at least 2 (E - 1 features of position and one of height); "
        "got query float32 [2, 4, 5, 1] on cpu",
    ),
    (
        "more values than keys",
        lambda: attend(key=K[:, :, :6]),
        ValueError,
        "key and value must have the same number of rows S (their second last size); "
        "got key float32 [2, 4, 6, 8] on cpu and value float32 [2, 4, 7, 6] on cpu",
    ),
    (
        "an empty value",
        lambda: attend(value=V[..., :0]),
        ValueError,
        "value must have a last size Ev of at least 1; got value float32 [2, 4, 7, 0] on cpu",
    ),
    (
        "batches that do not fit",
        lambda: attend(query=torch.randn(3, 4, 5, 8)),
        ValueError,
        "the leading sizes of query and key must be equal or 1; "
        "got query float32 [3, 4, 5, 8] on cpu and key float32 [2, 4, 7, 8] on cpu",
    ),
    (
        "grouped heads without enable_gqa",
        lambda: attend(key=K[:, :2], value=V[:, :2]),
        ValueError,
        "the leading sizes of query and key must be equal or 1; "
        "got query float32 [2, 4, 5, 8] on cpu and key float32 [2, 2, 7, 8] on cpu. "
        "For grouped queries pass enable_gqa=True",
    ),
    (
        "heads that are no multiple",
        lambda: attend(key=K[:, :3], value=V[:, :3], enable_gqa=True),
        ValueError,
        "with enable_gqa=True the heads of query (its third last size) must be a multiple of the heads of key; "
        "got query float32 [2, 4, 5, 8] on cpu and key float32 [2, 3, 7, 8] on cpu",
    ),
    (
        "two numbers of key heads",
        lambda: attend(key=K[:, :2], value=V[:, :1], enable_gqa=True),
        ValueError,
        "key and value must have the same number of heads (their third last size) with enable_gqa=True; "
        "got key float32 [2, 2, 7, 8] on cpu and value float32 [2, 1, 7, 6] on cpu",
    ),
    (
        "enable_gqa without heads",
        lambda: attend(query=Q[0, 0], key=K[0, 0], value=V[0, 0], enable_gqa=True),
        ValueError,
        "enable_gqa=True needs a heads dimension, [..., H, length, size]; "
        "got query float32 [5, 8] on cpu and key float32 [7, 8] on cpu",
    ),
    (
        "attn_mask together with is_causal",
        lambda: attend(Q, K, V, torch.ones(5, 7, dtype=torch.bool), 0.0, True),
        ValueError,
        "attn_mask must be None when is_causal=True; put the causal triangle into attn_mask, or drop one of the two",
    ),
    (
        "a mask that is no tensor",
        lambda: attend(Q, K, V, [[True]]),
        TypeError,
        "attn_mask must be a tensor or None; got list [[True]]",
    ),
    (
        "an integer mask",
        lambda: attend(Q, K, V, torch.ones(5, 7, dtype=torch.int64)),
        TypeError,
        "attn_mask must be boolean (True = attend) or floating-point (added to the scores); got int64 [5, 7] on cpu",
    ),
    (
        "a mask of another shape",
        lambda: attend(Q, K, V, torch.ones(7, 5)),
        ValueError,
        "attn_mask must broadcast to the shape [..., H, L, S] of the scores, [2, 4, 5, 7]; got float32 [7, 5] on cpu",
    ),
    (
        "a mask with too many dimensions",
        lambda: attend(Q, K, V, torch.ones(1, 2, 4, 5, 7)),
        ValueError,
        "attn_mask must broadcast to the shape [..., H, L, S] of the scores, [2, 4, 5, 7]; "
        "got float32 [1, 2, 4, 5, 7] on cpu",
    ),
    (
        "a mask on another device",
        lambda: attend(Q, K, V, torch.ones(5, 7, device="meta")),
        ValueError,
        "attn_mask must be on the device of query; "
        "got query float32 [2, 4, 5, 8] on cpu and attn_mask float32 [5, 7] on meta",
    ),
    (
        "dropout of 1",
        lambda: attend(Q, K, V, None, 1.0),
        ValueError,
        "dropout_p must be a number in [0, 1); got 1.0",
    ),
    (
        "negative dropout",
        lambda: attend(dropout_p=-0.1),
        ValueError,
        "dropout_p must be a number in [0, 1); got -0.1",
    ),
    (
        "dropout that is NaN",
        lambda: attend(dropout_p=float("nan")),
        ValueError,
        "dropout_p must be a number in [0, 1); got nan",
    ),
    (
        "a flag in the place of dropout",
        lambda: attend(dropout_p=True),
        TypeError,
        "dropout_p must be a number in [0, 1); got bool True",
    ),
    (
        "is_causal that is no flag",
        lambda: attend(is_causal=1),
        TypeError,
        "is_causal must be True or False; got int 1",
    ),
    (
        "an unknown score",
        lambda: attend(score="penumbra"),
        ValueError,
        "score must be one of 'penumbral', 'umbral', 'penumbral_finite', 'umbral_finite', 'laplacian', 'half_space', "
        "'hyperboloid', 'dot'; got 'penumbra'. Did you mean 'penumbral'?",
    ),
    (
        "a score that is neither",
        lambda: attend(score=3),
        TypeError,
        "score must be a score object or one of 'penumbral', 'umbral', 'penumbral_finite', 'umbral_finite', "
        "'laplacian', 'half_space', 'hyperboloid', 'dot'; got int 3",
    ),
    (
        "the class of a score",
        lambda: attend(score=Umbral),
        TypeError,
        "score must be an object or a name; got the class Umbral: write Umbral()",
    ),
    (
        "an unknown backend",
        lambda: attend(backend="chunks"),
        ValueError,
        "backend must be one of 'auto', 'cpp', 'triton', 'chunked', 'reference'; got 'chunks'. Did you mean 'chunked'?",
    ),
    (
        "a backend with no near name",
        lambda: attend(backend="zzz"),
        ValueError,
        "backend must be one of 'auto', 'cpp', 'triton', 'chunked', 'reference'; got 'zzz'.",
    ),
    (
        "a parameter for another number of heads",
        lambda: attend(score=Penumbral(gamma=torch.ones(3))),
        ValueError,
        "gamma is a tensor and must have shape [], [4] (one value a head) or one that broadcasts to [2, 4, 1, 1]; "
        "got float32 [3] on cpu",
    ),
    (
        "a parameter on another device",
        lambda: attend(score=Penumbral(gamma=torch.ones(4, device="meta"))),
        ValueError,
        "gamma is a tensor and must be on the device of query; "
        "got query float32 [2, 4, 5, 8] on cpu and gamma float32 [4] on meta",
    ),
    (
        "a parameter for each query",
        lambda: attend(score=Umbral(radius=torch.ones(4, 5, 1))),
        ValueError,
        "radius is a tensor and must have shape [], [4] (one value a head) or one that broadcasts to [2, 4, 1, 1]; "
        "got float32 [4, 5, 1] on cpu",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), [row[1:] for row in ATTENTION], ids=[row[0] for row in ATTENTION])
def test_wrong_call_of_attention_is_told_what_is_accepted(call, error, text):
    with says(error, text):
        call()


POSITIVE = "must be a finite number above 0"
SCORES = [
    (lambda: Penumbral(gamma=-1), ValueError, "gamma must be a finite number of at least 0; got -1"),
    (lambda: Penumbral(light_height=0), ValueError, f"light_height {POSITIVE}; got 0"),
    (lambda: Penumbral(light_height=-2.0), ValueError, f"light_height {POSITIVE}; got -2.0"),
    (
        lambda: Penumbral(height_scale="1"),
        TypeError,
        "height_scale must be a number or a floating-point tensor; got str '1'",
    ),
    (
        lambda: Penumbral(lift="chi"),
        ValueError,
        "lift must be one of 'xi', 'psi', 'exp'; got 'chi'.",
    ),
    (
        lambda: Penumbral(readout="heights"),
        ValueError,
        "readout must be one of 'height', 'height_sq', 'distance'; got 'heights'. Did you mean 'height'?",
    ),
    (lambda: Penumbral(lift=None), TypeError, "lift must be one of the names 'xi', 'psi', 'exp'; got NoneType None"),
    (lambda: Umbral(radius=-0.1), ValueError, f"radius {POSITIVE}; got -0.1"),
    (lambda: Umbral(radius=float("nan")), ValueError, f"radius {POSITIVE}; got nan"),
    (lambda: Umbral(gamma=float("inf")), ValueError, "gamma must be a finite number of at least 0; got inf"),
    (lambda: Umbral(lift="xi"), ValueError, "lift must be one of 'psi', 'exp'; got 'xi'."),
    (
        lambda: Umbral(gamma=torch.ones(2, dtype=torch.int64)),
        TypeError,
        "gamma must be a number or a floating-point tensor; got int64 [2] on cpu",
    ),
    (lambda: FinitePenumbral(light_radius=0.0), ValueError, f"light_radius {POSITIVE}; got 0.0"),
    (lambda: FiniteUmbral(radius=-1), ValueError, f"radius {POSITIVE}; got -1"),
    (lambda: HalfSpaceDistance(beta=-1), ValueError, "beta must be a finite number of at least 0; got -1"),
    (lambda: HalfSpaceDistance(lift="pseudopolar"), ValueError, "lift must be one of 'psi', 'exp'; got 'pseudopolar'."),
    (
        lambda: HyperboloidDistance(offset=None),
        TypeError,
        "offset must be a number or a floating-point tensor; got NoneType None",
    ),
    (lambda: Laplacian(gamma=True), TypeError, "gamma must be a number or a floating-point tensor; got bool True"),
    (lambda: DotProduct(scale=float("inf")), ValueError, "scale must be a finite number; got inf"),
]


@pytest.mark.parametrize(("make", "error", "text"), SCORES)
def test_wrong_field_of_a_score_is_told_what_is_accepted(make, error, text):
    with says(error, text):
        make()


@pytest.mark.parametrize("function", [coneheads.attention_weights, coneheads.attention_scores])
def test_weights_and_scores_check_their_arguments_too(function):
    with says(TypeError, "query must be a tensor [..., H, length, size]; got NoneType None"):
        function(None, K)
    with says(
        ValueError,
        "query and key must have the same last size E; "
        "got query float32 [2, 4, 5, 8] on cpu and key float32 [2, 4, 7, 7] on cpu",
    ):
        function(Q, K[..., :7])
    with pytest.raises(ValueError, match=r"score must be one of .* Did you mean 'umbral'"):
        function(Q, K, score="umbra")
    with pytest.raises(TypeError, match="enable_gqa must be True or False; got str 'yes'"):
        function(Q, K, enable_gqa="yes")


def test_weights_refuse_a_mask_with_is_causal_and_a_mask_that_does_not_fit():
    with pytest.raises(ValueError, match="attn_mask must be None when is_causal=True"):
        coneheads.attention_weights(Q, K, torch.ones(5, 7), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must broadcast .* \[2, 4, 5, 7\]; got float32 \[5, 6\]"):
        coneheads.attention_weights(Q, K, torch.ones(5, 6))


def test_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        coneheads.attention(Q, K, V, scale=1.0)


def test_score_defined_inside_a_function_is_told_to_move():
    @dataclasses.dataclass(frozen=True)
    class Hidden(Score):
        def points(self, features):
            return features, None

        def pair(self, measure, q_level, k_level):
            return -measure

    with pytest.raises(
        ValueError, match=r"defined inside a function.*top level of a module, or use backend='reference'"
    ):
        coneheads.attention(Q, K, V, score=Hidden())
    assert coneheads.attention(Q, K, V, score=Hidden(), backend="reference").isfinite().all()
