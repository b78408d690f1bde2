"""One line for a model that exists: ``convert`` swaps its attention, ``revert`` puts the old one back."""

from __future__ import annotations

import fnmatch
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from coneheads import _checks
from coneheads.integrations import probing
from coneheads.integrations.layers import Layer, Library, Settings
from coneheads.nn import ConeAttention
from coneheads.scores import Score, resolve

#: the library that must have been imported for its file to be of use, and the file; those that save models come last,
#: since a model of theirs may hold layers of the others
LIBRARIES = {
    "torch": "torch_nn",
    "timm": "timm",
    "torch_geometric": "pyg",
    "diffusers": "diffusers",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did: the layers that have cone attention now, and those that have not, with the reason.

    ``probed`` says whether a forward showed that each of them calls it.
    """

    score: Score
    swapped: tuple[Layer, ...]
    skipped: tuple[Layer, ...]
    probed: bool

    @property
    def found(self) -> tuple[Layer, ...]:
        """All attention layers, converted or not."""
        return (*self.swapped, *self.skipped)

    def __len__(self) -> int:
        return len(self.swapped)

    def __str__(self) -> str:
        seen = (
            "each seen in a probe forward"
            if self.probed
            else "no probe forward: give probe= to see each of them called"
        )
        lines = [
            f"{len(self.swapped)} of {len(self.found)} attention layers have the score {self.score.name!r} ({seen})"
        ]
        lines += [f"  {layer.name or '(the model)'}: {layer.kind}" for layer in self.swapped]
        lines += [f"  {layer.name or '(the model)'}: left as it is, {layer.why_not}" for layer in self.skipped]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    score: Score | str = "penumbral",
    where: str | Callable[[str], bool] | None = None,
    *,
    learn_gamma: bool = False,
    learn_radius: bool = False,
    probe: Any = None,
) -> Conversion:
    """Gives the attention layers of a model another score, in place; all weights stay.

    It knows ``nn.MultiheadAttention`` (and so ``nn.Transformer*``), transformers, timm, diffusers and PyG, and goes
    through the extension point of each. Call it before ``torch.compile``, DDP or FSDP, and before the optimizer is made
    if something is to be learned.

    Args:
        model: any module; layers are found by their class, at any depth.
        score: a name, for a score that starts as ``coneheads.nn.start`` says, or a score object, which stays as it is.
        where: which layers, by their name in ``model.named_modules()``: a pattern like ``"encoder.*"``, or a function.
        learn_gamma: learn the temperature, one for each head of each layer; saved with the model.
        learn_radius: learn radius or light of the cones, likewise.
        probe: an input of the model, for a forward that shows that each layer calls the new attention: a tensor, a
            tuple of positional or a dict of keyword arguments. Models of transformers, timm and diffusers need none.

    Returns:
        A ``Conversion``: how many layers, which, and why others were left as they are.

    Raises:
        ValueError: no layer was found, or none could be converted.
        RuntimeError: the probe forward failed, or a layer did not call the new attention. The model is as it was then.

    Example:
        >>> layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> len(convert(model, "umbral"))
        2
    """
    _check_model(model)
    if where is not None and not isinstance(where, str) and not callable(where):
        raise TypeError(f"where must be a pattern or a function; got {_checks.describe(where)}")
    settings = Settings(score, learn_gamma, learn_radius)
    resolved = resolve(score)
    libraries = _libraries()
    inputs = probing.inputs_of(model, probe, libraries)
    run = (lambda: probing.run_once(model, inputs)) if inputs is not None else None
    found = [(library, layer) for library in libraries for layer in library.find(model, run)]
    chosen = [(library, layer) for library, layer in found if not layer.why_not and _selected(where, layer.name)]
    taken = {layer.name for _, layer in chosen}
    skipped = tuple(_with_reason(layer) for _, layer in found if layer.name not in taken)
    if not chosen:
        raise ValueError(_nothing_to_do(model, where, [layer for _, layer in found]))
    try:
        cones: dict[str, ConeAttention] = {}
        for library in libraries:
            cones |= library.swap(model, [layer for home, layer in chosen if home is library], settings)
        if run is not None:
            probing.check_called(run, cones)
    except BaseException:
        for library in libraries:
            library.restore(model, taken)
        raise
    return Conversion(resolved, tuple(layer for _, layer in chosen), skipped, probed=run is not None)


def revert(model: nn.Module) -> list[str]:
    """Puts back the attention that ``convert`` replaced; what was learned of the score is lost.

    Returns the names of the layers. A model without a converted layer is an error.
    """
    _check_model(model)
    restored = [name for library in _libraries() for name in library.restore(model)]
    if not restored:
        raise ValueError(
            f"model {type(model).__name__} has no layer that convert has changed: there is nothing to revert"
        )
    return restored


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {_checks.describe(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a TorchScript module, whose code is fixed; convert it before torch.jit")
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # which takes a second to import
    if compiler is not None and isinstance(model, compiler.OptimizedModule):
        raise TypeError("model is compiled; convert it first, then call torch.compile")
    sharding = sys.modules.get("torch.distributed.fsdp")
    wrappers: tuple[type, ...] = (nn.parallel.DistributedDataParallel,)
    wrappers += (sharding.FSDPModule, sharding.FullyShardedDataParallel) if sharding is not None else ()
    if wrapped := next((type(module).__name__ for module in model.modules() if isinstance(module, wrappers)), ""):
        raise TypeError(f"model has a {wrapped}, which knows the parameters of before alone; convert first, then wrap")


def _libraries() -> list[Library]:
    """The files of the libraries that have been imported: a model of another cannot be there."""
    files = [file for library, file in LIBRARIES.items() if library in sys.modules]
    return [cast(Library, importlib.import_module(f"coneheads.integrations.{file}")) for file in files]


def _selected(where: str | Callable[[str], bool] | None, name: str) -> bool:
    if where is None:
        return True
    return fnmatch.fnmatchcase(name, where) if isinstance(where, str) else bool(where(name))


def _with_reason(layer: Layer) -> Layer:
    """A layer that was not taken says why; if it could be, ``where`` left it out."""
    if layer.why_not:
        return layer
    return Layer(layer.name, layer.module, layer.heads, layer.size, why_not="where= does not name it")


def _nothing_to_do(model: nn.Module, where: object, found: Sequence[Layer]) -> str:
    kind = type(model).__name__
    if not found:
        known = ", ".join(LIBRARIES)
        return f"model {kind} has no attention layer of a library that convert knows ({known})"
    able = [layer for layer in found if not layer.why_not]
    if able:
        names = ", ".join(repr(layer.name) for layer in able)
        return f"where={where!r} matches no attention layer of {kind}; there are {names}"
    reasons = "; ".join(f"{layer.name!r} ({layer.kind}): {layer.why_not}" for layer in found)
    return f"no attention layer of {kind} can be converted: {reasons}"
