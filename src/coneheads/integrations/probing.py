"""The probe forward of ``convert``: an input for it, and whether each converted layer calls its new attention in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from coneheads.integrations.layers import Inputs, Library
from coneheads.nn import ConeAttention


def inputs_of(model: nn.Module, probe: Any, libraries: Sequence[Library]) -> Inputs | None:
    """What the user has given, or else what the library of the model knows; None if nobody knows an input."""
    if probe is None:
        found = (library.inputs_for(model) for library in libraries)
        return next((inputs for inputs in found if inputs is not None), None)
    if isinstance(probe, dict):
        return probe
    return {"": probe if isinstance(probe, tuple) else (probe,)}


def run_once(model: nn.Module, inputs: Inputs) -> Any:
    """A forward that leaves no trace: in eval mode, without gradients, random numbers as they were."""
    positional = inputs.get("", ())
    keywords = {name: value for name, value in inputs.items() if name}
    with _in_eval(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return model(*positional, **keywords)


@contextlib.contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_called(run: Callable[[], Any], cones: dict[str, ConeAttention]) -> None:
    """One forward; an error if it fails or if one of the layers does not call its new attention."""
    called: set[str] = set()

    def noted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return forward(*args, **kwargs)

        return call

    for name, cone in cones.items():
        # No hook: PyTorch's encoder layer would see it, and leave the fast path that is to be found out.
        cone.forward = noted(name, cone.forward)  # type: ignore[method-assign]
    try:
        run()
    except Exception as error:
        raise RuntimeError(
            f"the probe forward of the converted model failed ({error}); give an input that it takes: probe="
        ) from error
    finally:
        for cone in cones.values():
            del cone.forward
    if silent := sorted(set(cones) - called):
        names = ", ".join(map(repr, silent))
        raise RuntimeError(
            f"a probe forward did not call the new attention in {names}: the old one is still in use there"
        )
