"""Cone attention in the models of Hugging Face transformers 5, through its attention interface.

``register()`` makes two kinds of implementation known. ``attn_implementation="coneheads_<score>"`` needs no conversion
and learns nothing. ``"coneheads"`` is what ``convert`` sets: a layer with a ``ConeAttention`` calls it, a layer that
``where`` left out runs SDPA, any other raises.

``save_pretrained`` writes the name and a description of the layers into config.json; learned numbers are ordinary
weights, ``<layer>.cone.log_gamma``. ``from_pretrained`` takes them up after ``register()``, and fails without it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from coneheads.integrations.layers import CONE, Inputs, Layer, Settings, already
from coneheads.integrations.transformers_attention import attention
from coneheads.integrations.transformers_saving import ADVICE, BESIDE, OURS, describe, forget, held, remember_when_saved
from coneheads.nn import ConeAttention
from coneheads.scores import BY_NAME

PROBE = "coneheads_probe"


def register() -> None:
    """Makes "coneheads" and "coneheads_<score>" known to transformers, and saved models loadable.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> register()
        >>> sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaModel(LlamaConfig(**sizes, attn_implementation="coneheads_umbral"))
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4):
        raise ImportError(
            f"coneheads needs transformers 5.4 or later and this is {transformers.__version__}: before 5 models do not "
            "hand masks, caches and position biases to one attention interface, and before 5.4 a saved model forgets "
            "its attention and runs SDPA in silence"
        )
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    if OURS in ALL_MASK_ATTENTION_FUNCTIONS:
        return
    unnamed = dict.fromkeys((OURS, PROBE, f"{BESIDE}eager", f"{BESIDE}sdpa"))
    for name, score in (unnamed | {f"{OURS}_{score}": score for score in BY_NAME}).items():
        for alias in (name, name + ADVICE):
            transformers.AttentionInterface.register(alias, functools.partial(attention, score))
            # Without a function for masks a model is given none, not even for padding, and says nothing.
            transformers.AttentionMaskInterface.register(alias, sdpa_mask)
    remember_when_saved()


def find(model: nn.Module, run: Callable[[], Any] | None) -> Sequence[Layer]:
    """The layers that ask the interface for attention in a forward, and those named attention that do not."""
    roots = _outermost(model)
    if not roots:
        return []
    register()
    if run is None:
        raise ValueError(f"no input is known for {type(model).__name__}; give one that reaches all its layers: probe=")
    seen: dict[nn.Module, tuple[int, int]] = {}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen[module] = query.shape[1], query.shape[3]
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None

    transformers.AttentionInterface.register(PROBE, note)
    before = [(root, _implementations(root)) for root in roots.values()]
    try:
        for root, _ in before:
            root.set_attn_implementation(PROBE)
        run()
    except Exception as error:
        raise RuntimeError(f"a forward of {type(model).__name__} failed ({error}); give an input: probe=") from error
    finally:
        for root, implementations in before:
            _set_implementations(root, implementations)
    why_not = "ignores transformers' attention interface, or the input of the probe does not reach it"
    parts = {part for module in seen for part in module.modules()}
    layers = []
    for name, module in (pair for prefix, root in roots.items() for pair in root.named_modules(prefix=prefix)):
        if module in seen:
            cone = getattr(module, CONE, None)
            layers.append(Layer(name, module, *seen[module], why_not="" if cone is None else already(cone)))
        elif _is_attention(module) and module not in parts and not seen.keys() & set(module.modules()):
            layers.append(Layer(name, module, why_not=why_not))
    return layers


def swap(model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
    """A ``ConeAttention`` in each layer, None in those that are left out, all described in the model's config.

    Layers of other libraries inside a model, like the ``nn.MultiheadAttention`` of SigLIP, are described too.
    """
    cones = {layer.name: settings.attention(layer) for layer in layers}
    kinds = {type(layer.module) for layer in layers}
    for layer in layers:
        setattr(layer.module, CONE, cones[layer.name])
    for root in _outermost(model).values():
        if any(held(root).values()):
            for module in root.modules():
                if not hasattr(module, CONE) and (type(module) in kinds or _is_attention(module)):
                    setattr(module, CONE, None)
            describe(root, before=_implementations(root))
            root.set_attn_implementation(OURS)
        else:
            describe(root)
    return cones


def restore(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """Takes the ``ConeAttention`` out of the layers; without any left, the model has its old implementation again."""
    restored = []
    for prefix, root in _outermost(model).items():
        layers = held(root, prefix)
        cones = [name for name, cone in layers.items() if cone is not None]
        undone = [name for name in cones if names is None or name in names]
        left = len(undone) < len(cones)
        for name in undone if left else layers:
            delattr(model.get_submodule(name), CONE)
        for name in undone if left else ():
            setattr(model.get_submodule(name), CONE, None)
        if not left and (before := getattr(root.config, OURS, {}).get("before")):
            _set_implementations(root, before)
            forget(root)
        describe(root)
        restored += undone
    return restored


def inputs_for(model: nn.Module) -> Inputs | None:
    """A few tokens, a blank image or both, as the model's forward has arguments for them."""
    if list(_outermost(model)) != [""]:
        return None
    root: Any = model
    arguments = inspect.signature(root.forward).parameters
    tokens = torch.tensor([[3, 4, 5, 6, 7]], device=root.device)
    inputs: Inputs = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in arguments}
    if "pixel_values" in arguments:
        vision = getattr(root.config, "vision_config", root.config)
        if not hasattr(vision, "image_size") or not hasattr(vision, "num_channels"):
            return None
        size = vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
        inputs["pixel_values"] = torch.zeros(1, vision.num_channels, *size, dtype=root.dtype, device=root.device)
    return inputs or None


def _outermost(model: nn.Module) -> dict[str, Any]:
    """The models of transformers in this one, by name, without those inside of them."""
    if "transformers.modeling_utils" not in sys.modules:
        return {}  # nobody has made one; to import it would take seconds
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, transformers.PreTrainedModel) and not inside:
            found[name] = module
    return found


def _is_attention(module: nn.Module) -> bool:
    """Whether the class is named so, and none of a module inside, our own aside; layers of other libraries are not."""
    if isinstance(module, nn.MultiheadAttention) or type(module).__module__.startswith("timm."):
        return False
    named = ["Attention" in type(m).__name__ for m in module.modules() if not isinstance(m, ConeAttention)]
    return named[:1] == [True] and not any(named[1:])


def _implementations(root: Any) -> dict[str, str]:
    """The implementation of the model and of each model inside it, by name, outer ones first."""
    inner = [
        (name, module) for name, module in root.named_modules() if isinstance(module, transformers.PreTrainedModel)
    ]
    return {name: module.config._attn_implementation for name, module in inner}


def _set_implementations(root: Any, implementations: dict[str, str]) -> None:
    """Sets what ``_implementations`` has returned."""
    for name, module in root.named_modules():
        if name in implementations:
            module.set_attn_implementation(implementations[name])
