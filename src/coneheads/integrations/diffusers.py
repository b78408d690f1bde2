"""Cone attention in diffusers: the layers of a model, and that its own saving and loading keep them.

``save_pretrained`` writes the score of each layer into ``config.json``, and what was learned among the weights. To
load such a model, alone or in a pipeline, call ``register()`` once. Where it was not called, loading is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, FrozenDict
from torch import nn

from coneheads.integrations import torch_nn
from coneheads.integrations.diffusers_attention import KEPT, ConeAttnProcessor, cones, put, take_out, why_not
from coneheads.integrations.layers import Inputs, Layer, Settings
from coneheads.nn import ConeAttention

__all__ = ["ConeAttnProcessor", "find", "inputs_for", "register", "restore", "swap"]

#: the entry of a model's config: what ``ConeAttention.config`` says, by the name of the layer
ENTRY = "coneheads"
# diffusers logs entries of config.json that it does not know, and goes on with the dot product. A quantization that it
# does not know is the one thing that every loading refuses, and it quotes the name. So the file has this one, and the
# config in memory never; ``register`` takes it out before diffusers looks at it.
GUARD = {
    "quant_method": "none (this model has cone attention; install coneheads and run "
    "`from coneheads.integrations.diffusers import register; register()` before you load it)"
}
#: the models that ``inputs_for`` knows, and what their forward takes
PROBED = {
    "AutoencoderKL": ("sample",),
    "DiTTransformer2DModel": ("hidden_states", "timestep", "class_labels"),
    "PixArtTransformer2DModel": ("hidden_states", "timestep", "encoder_hidden_states", "added_cond_kwargs"),
    "Transformer2DModel": ("hidden_states", "timestep", "encoder_hidden_states"),
    "UNet2DConditionModel": ("sample", "timestep", "encoder_hidden_states"),
    "UNet2DModel": ("sample", "timestep"),
}
#: entries of a config that ask for inputs beyond those, or for layers that only such inputs reach
FURTHER = ("addition_embed_type", "class_embed_type", "num_class_embeds", "encoder_hid_dim", "dual_cross_attention")

# As they were when this file was imported, so that register() may be called any number of times.
_config_mixin: Any = ConfigMixin
_plain_from_config = _config_mixin.from_config.__func__
_plain_load_config = _config_mixin.load_config.__func__
_plain_to_json_string = _config_mixin.to_json_string


def register() -> None:
    """Teaches diffusers to save and load models with cone attention; ``convert`` does so too.

    diffusers has no point for it, as processors are no part of what it saves or builds. So three methods of
    ``ConfigMixin`` are wrapped; they act on models with cone attention and on configs with our entry only.
    """
    _config_mixin.from_config = classmethod(_from_config)
    _config_mixin.load_config = classmethod(_load_config)
    _config_mixin.to_json_string = _to_json_string


def _from_config(cls: Any, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Builds a model with its cone attention; ``from_pretrained`` loads the weights afterwards."""
    entry = config.get(ENTRY) if isinstance(config, dict) else None
    others = {name: value for name, value in config.items() if name != ENTRY} if entry else config
    built = _plain_from_config(cls, others, *args, **kwargs)
    model = built[0] if isinstance(built, tuple) else built
    # Instead of a config a path is deprecated, but taken.
    for name, settings in (entry or model.config.get(ENTRY, {})).items():
        layer = model.get_submodule(name)
        if isinstance(layer, nn.MultiheadAttention):
            torch_nn.put(layer, ConeAttention.from_config(settings, layer.num_heads, layer.head_dim))
            torch_nn.keep_padded(model)
        else:
            put(layer, ConeAttention.from_config(settings, layer.heads, layer.inner_dim // layer.heads))
    if entry:
        _note(model)
    return built


def _load_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The config of a file, without the guard."""
    loaded = _plain_load_config(cls, *args, **kwargs)
    config = loaded[0] if isinstance(loaded, tuple) else loaded
    if ENTRY in config:
        config.pop("quantization_config", None)
    return loaded


def _to_json_string(self: Any) -> str:
    """The text of config.json, with the layers as they are now, even if ``convert`` saw only a part of the model."""
    text: str = _plain_to_json_string(self)
    found = cones(self) if isinstance(self, nn.Module) else {}
    if not found and ENTRY not in getattr(self, "_internal_dict", ()):
        return text
    config = {name: value for name, value in json.loads(text).items() if name != ENTRY}
    if found and "quantization_config" in config:
        raise ValueError("a quantized model with cone attention cannot be saved: its config cannot say both")
    if found:
        config |= {ENTRY: {name: cone.config() for name, cone in found.items()}, "quantization_config": GUARD}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _note(model: nn.Module) -> None:
    """Makes the configs in memory say what is converted, so that ``from_config(model.config)`` builds the same.

    Also for layers of other libraries, which ``swap`` and ``restore`` were not given.
    """
    for module in model.modules():
        if isinstance(module, ConfigMixin) and hasattr(module, "_internal_dict"):
            register()
            config = {name: value for name, value in module.config.items() if name != ENTRY}
            entry = {name: _described(cone) for name, cone in cones(module).items()}
            # register_to_config can add an entry, but not remove one.
            vars(module)["_internal_dict"] = FrozenDict(config | ({ENTRY: entry} if entry else {}))


def _described(cone: ConeAttention) -> dict[str, Any]:
    """``cone.config()``; for a user's own score, which has none, something that ``from_config`` refuses by name."""
    try:
        return cone.config()
    except ValueError:
        return {"score": type(cone.base).__qualname__}


def find(model: nn.Module, run: Callable[[], Any] | None) -> list[Layer]:
    """All modules of diffusers with a processor."""
    configs = [getattr(module, "_internal_dict", {}) for module in model.modules() if isinstance(module, ConfigMixin)]
    quantized = any(config.get("quantization_config") is not None for config in configs)
    layers = []
    for name, module in model.named_modules():
        if hasattr(module, "processor") and type(module).__module__.startswith("diffusers."):
            reason = why_not(module) or ("the model is quantized, and could not be saved" if quantized else "")
            attn: Any = module
            heads, size = (0, 0) if reason else (attn.heads, attn.inner_dim // attn.heads)
            layers.append(Layer(name, module, heads, size, reason))
    return layers


def swap(model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
    """Another processor for each layer, and an entry in the config of the model."""
    called = {layer.name: put(layer.module, settings.attention(layer)) for layer in layers}
    _note(model)
    return called


def restore(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """The old processors, and no entry in the config."""
    converted = {name: module for name, module in model.named_modules() if hasattr(module, KEPT)}
    restored = [name for name in converted if names is None or name in names]
    for name in restored:
        take_out(converted[name])
    _note(model)
    return restored


def inputs_for(model: nn.Module) -> Inputs | None:
    """A small image, a time and a text of two tokens for the models in PROBED; None if that is not enough for them."""
    config: Any = getattr(model, "_internal_dict", {}) if isinstance(model, ConfigMixin) else {}
    width = config.get("caption_channels") or config.get("cross_attention_dim") or 1
    if type(model).__name__ not in PROBED or any(map(config.get, FURTHER)) or not isinstance(width, int):
        return None
    if config.get("attention_type", "default") != "default" or not config.get("in_channels"):
        return None
    like: Any = next(model.parameters())
    # Each level but the last halves the image, and two by two points are left there.
    side = 2 ** len(config.get("block_out_channels", ("one level",))) * (config.get("patch_size") or 1)
    image = torch.zeros(1, config["in_channels"], side, side, device=like.device, dtype=like.dtype)
    zero = image.new_zeros(1, dtype=torch.long)
    sized = getattr(model, "use_additional_conditions", False)  # PixArt for large images
    sizes = {name: image.new_ones(1, n) if sized else None for name, n in (("resolution", 2), ("aspect_ratio", 1))}
    given: Inputs = {"sample": image, "hidden_states": image, "timestep": zero, "class_labels": zero}
    given |= {"encoder_hidden_states": image.new_zeros(1, 2, width), "added_cond_kwargs": sizes}
    return {name: given[name] for name in PROBED[type(model).__name__]} | {"return_dict": False}
