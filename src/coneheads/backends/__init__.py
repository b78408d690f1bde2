"""The ways to compute attention, all to the same numbers: what each can do, and which one serves a call.

A backend declares its limits once, here. The declaration feeds the choice, the error text, the table in the
documentation and the skips of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coneheads import _checks
from coneheads.backends import build, chunked, cpp, cpp_edges, edges, reference, triton
from coneheads.backends.edges import EdgeInputs
from coneheads.backends.inputs import Inputs, in_onnx_export, in_transform


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and its limits."""

    name: str
    attention: Callable[[Any], tuple[Tensor, Any]]  # of Inputs, or for edges of EdgeInputs
    summary: str
    memory: str  # of forward and backward, beside inputs and outputs
    second_derivative: bool
    transforms: bool  # torch.func.grad, vmap, jvp and the like, and forward-mode differentiation
    onnx: bool = False  # torch.onnx.export, which takes PyTorch's own operators alone
    devices: tuple[str, ...] = ()  # empty: every device
    dtypes: tuple[torch.dtype, ...] = _checks.FLOATING
    obstacle: Callable[[Any], str | None] | None = None  # a reason of its own why it cannot serve a call
    available: Callable[[], bool] = lambda: True  # on this machine

    def why_not(self, inputs: Inputs | EdgeInputs) -> list[str]:
        """The reasons why this backend cannot serve the call; empty if it can."""
        reasons = []
        if self.devices and inputs.query.device.type not in self.devices:
            reasons.append(f"it runs on {', '.join(self.devices)} and query is on {inputs.query.device}")
        if inputs.query.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(f"it takes {names} and query is {str(inputs.query.dtype).removeprefix('torch.')}")
        if not self.transforms and in_transform():
            reasons.append("it has no rules for torch.func and forward-mode differentiation, which are at work here")
        if not self.onnx and in_onnx_export():
            reasons.append("it is an operator of its own, which torch.onnx.export, at work here, cannot translate")
        if not reasons and self.obstacle is not None and (reason := self.obstacle(inputs)):
            reasons.append(reason)
        return reasons


#: in the order of preference
BACKENDS = (
    Backend(
        name="cpp",
        attention=cpp.attention,
        summary="fused C++ kernels, compiled on first use",
        memory="linear in L and S",
        second_derivative=False,
        transforms=False,
        devices=("cpu",),
        obstacle=cpp.why_not,
        available=lambda: build.why_unavailable() is None,
    ),
    Backend(
        name="triton",
        attention=triton.attention,
        summary="fused kernels for GPUs, compiled on first use",
        memory="linear in L and S",
        second_derivative=False,
        transforms=False,
        devices=triton.DEVICES,
        dtypes=triton.DTYPES,
        obstacle=triton.why_not,
        available=triton.available,
    ),
    Backend(
        name="chunked",
        attention=chunked.attention,
        summary="tiles and a running softmax in plain PyTorch",
        memory="linear in L and S",
        second_derivative=False,
        transforms=False,
    ),
    Backend(
        name="reference",
        attention=reference.attention,
        summary="dense, by direct differences: the oracle",
        memory="L x S x E",
        second_derivative=True,
        transforms=True,
        onnx=True,
    ),
)
NAMES = tuple(backend.name for backend in BACKENDS)
#: the same for attention on edges
EDGE_BACKENDS = (
    Backend(
        name="cpp",
        attention=cpp_edges.attention,
        summary="fused C++ kernels, compiled on first use",
        memory="three numbers for each edge and head",
        second_derivative=False,
        transforms=False,
        devices=("cpu",),
        obstacle=cpp_edges.why_not,
        available=lambda: build.why_unavailable() is None,
    ),
    Backend(
        name="reference",
        attention=edges.attention,
        summary="gather, softmax by target, scatter: the oracle",
        memory="M x H x (E + Ev), M edges",
        second_derivative=True,
        transforms=True,
        onnx=True,
    ),
)


def choose(name: str, inputs: Inputs | EdgeInputs, backends: tuple[Backend, ...] | None = None) -> Backend:
    """The backend of that name, or with "auto" the first that can serve; an error if it cannot, never another one."""
    backends = BACKENDS if backends is None else backends
    names = [backend.name for backend in backends]
    _checks.one_of("backend", name, ("auto", *names))
    if name == "auto":
        return _first_able(inputs, backends)
    chosen = backends[names.index(name)]
    if reasons := chosen.why_not(inputs):
        able = ", ".join(repr(other.name) for other in backends if not other.why_not(inputs))
        raise ValueError(f"backend={name!r} cannot serve this call: {'; '.join(reasons)}. Those that can: {able}")
    return chosen


def _first_able(inputs: Inputs | EdgeInputs, backends: tuple[Backend, ...]) -> Backend:
    """The first backend that can serve the call."""
    for backend in backends:
        if not (reasons := backend.why_not(inputs)):
            return backend
        if backend.name == "cpp" and reasons == [cpp.unavailable()]:
            cpp.warn_once()
    raise AssertionError("the reference serves every call")
