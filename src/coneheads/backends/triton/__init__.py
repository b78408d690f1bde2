"""Fused kernels for GPUs in Triton: one pass over tiles, forward and backward, for every built-in score.

Here is what torch sees: when the kernels serve, and the operator. The kernels, and triton with them, are imported when
they are first called: scores.py has the scores, tiles.py what is done to a tile, forward.py and backward.py the
kernels, and launch.py prepares their arguments and starts them.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from coneheads.backends import ops
from coneheads.backends.inputs import Inputs, prepare
from coneheads.backends.ops import FusedGradients, FusedInputs, Wanted
from coneheads.scores import (
    DotProduct,
    FinitePenumbral,
    FiniteUmbral,
    HalfSpaceDistance,
    HyperboloidDistance,
    Laplacian,
    Penumbral,
    Score,
    Umbral,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 256  # of E and of Ev
READOUTS = ("height", "height_sq", "distance")
#: parameters within these make a scale of 150 at most: the squares of the largest positions still fit float32
USUAL = {"gamma": (0.01, 10.0), "light_height": (0.01, 100.0), "radius": (0.05, 5.0)}
#: the numbers of scores.py, by class and read-out
NUMBERS: dict[tuple[type[Score], str | None], int] = {
    (DotProduct, None): 0,
    (Laplacian, None): 1,
    **{(Penumbral, name): 2 + i for i, name in enumerate(READOUTS)},
    **{(Umbral, name): 5 + i for i, name in enumerate(READOUTS)},
    (FinitePenumbral, None): 8,
    (FiniteUmbral, None): 8,
    (HalfSpaceDistance, None): 9,
    (HyperboloidDistance, None): 10,
}


def number_of(score: Score) -> int | None:
    """How the kernels call a score; None for one of someone else's."""
    return NUMBERS.get((type(score), getattr(score, "readout", None)))


def interpreted() -> bool:
    """Whether Triton interprets its kernels, on tensors of the CPU: TRITON_INTERPRET=1, set before it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


DEVICES = ("cuda", "cpu") if interpreted() else ("cuda",)


@functools.lru_cache(maxsize=1)
def _reason() -> str | None:
    missing = "it needs the package triton, which is not installed"
    try:
        if importlib.util.find_spec("triton") is None:
            return missing
        importlib.import_module("coneheads.backends.triton.launch")
    except Exception as error:  # a broken installation fails in its own way, and must not break anything else
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return missing
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    return None


def unavailable() -> str | None:
    """The reason why there are no kernels on this machine; None if there are."""
    return _reason()


# torch.compile calls it instead of looking inside, see cpp.py.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def available() -> bool:
    """Whether a call on this machine can be served: there is a GPU, or the interpreter was asked for."""
    return (torch.cuda.is_available() or interpreted()) and unavailable() is None


def why_not(inputs: Inputs) -> str | None:
    """The reason why the kernels cannot serve this call, beyond device, dtype and transforms."""
    if number_of(inputs.score) is None:
        return f"it has no kernel for the score {type(inputs.score).__qualname__}"
    for name, size in (("E", inputs.query.shape[-1]), ("Ev", inputs.value.shape[-1])):
        if size > LARGEST:
            return f"it takes {name} up to {LARGEST} and here it is {size}"
    return unavailable()


def numbers_are_fixed(score: Score) -> bool:
    """Whether what pairs depend on are numbers of usual size and not tensors, so that lengths can be scaled by them."""
    numbers = {name: getattr(score, name) for name in score.pair_fields if name in USUAL}
    return bool(numbers) and all(
        not isinstance(number, Tensor) and USUAL[name][0] <= number <= USUAL[name][1]
        for name, number in numbers.items()
    )


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, Ev] and log-sum-exp of the masked scores [B, H, L], in float32."""
    points, value, bad, bad_query = prepare(inputs)
    # The dtype of the value is that of the products, on tensor cores where it is a half one.
    arguments = (value.to(inputs.query.dtype), bad, inputs.mask, inputs.seed, inputs.is_causal, inputs.dropout_p)
    fixed = numbers_are_fixed(inputs.score)
    out, lse = _operator(*ops.call_arguments(inputs.score, points, fixed=fixed), *arguments)
    lse = lse.to(out.dtype)
    attends = bad_query & (lse != -torch.inf)
    return out.masked_fill(attends[..., None], torch.nan), lse.masked_fill(attends, torch.nan)


def _forward(inputs: FusedInputs) -> tuple[Tensor, Tensor]:
    from coneheads.backends.triton import launch

    return launch.forward(inputs)


def _backward(
    inputs: FusedInputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, wanted: Wanted
) -> FusedGradients:
    from coneheads.backends.triton import launch

    return launch.backward(inputs, out, lse, grad_out, grad_lse, wanted)


_operator = ops.define_attention("triton", _forward, _backward)
