"""How a model of transformers that runs cone attention is saved and loaded: what its config.json says of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers

from coneheads.integrations.layers import CONE
from coneheads.nn import ConeAttention

#: the implementation of converted models, and the key of their description in config.json
OURS = "coneheads"
#: follows the name in config.json: transformers quotes a name that it does not know, and so says what to do
ADVICE = " (pip install coneheads[hf], then: from coneheads.integrations.transformers import register; register())"


def remember_when_saved() -> None:
    """From now on configs save our implementations, and models with a description in their config are rebuilt by it.

    transformers has no hook for what a config saves, nor between making a model and loading its weights. What is added
    here acts on nothing but configs that carry one of our names. To be called once.
    """
    _extend(transformers.PreTrainedConfig, "to_dict", _with_name)
    _extend(transformers.PreTrainedModel, "post_init", _rebuild)


def describe(root: Any, before: dict[str, str] | None = None) -> None:
    """Puts the layers of a converted model into its config; ``before`` counts the first time."""
    held = {name: module.cone for name, module in root.named_modules() if hasattr(module, CONE)}
    layers = {
        name: None if cone is None else {"config": cone.config(), "heads": cone.heads, "size": cone.size}
        for name, cone in held.items()
    }
    before = getattr(root.config, OURS, {"before": before})["before"]
    setattr(root.config, OURS, {"before": before, "layers": layers})


def forget(root: Any) -> None:
    """Takes the description out of the config of the model, and of copies of it that models inside have."""
    for module in root.modules():
        if isinstance(module, transformers.PreTrainedModel) and hasattr(module.config, OURS):
            delattr(module.config, OURS)


def _extend(owner: type, method: str, after: Callable[[Any, Any], Any]) -> None:
    """From now on the method's result is ``after(self, result)``."""
    original = getattr(owner, method)
    setattr(owner, method, functools.wraps(original)(lambda self: after(self, original(self))))


def _with_name(config: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """What a config saves, with the implementation if it is ours: transformers leaves it out, and would run SDPA."""
    name = _name(config)
    return saved | {"attn_implementation": name} if OURS in str(name) else saved


def _name(config: Any) -> Any:
    """The implementation of a config; a dict, as transformers reads it, if that of a config inside differs."""
    name = config._attn_implementation
    if name is not None and name.startswith(OURS):
        name = name.removesuffix(ADVICE) + ADVICE
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    names = {key: _name(sub) for key, sub in inner.items() if sub is not None}
    return {"": name, **names} if any(other != name for other in names.values()) else name


def _rebuild(model: Any, _: None) -> None:
    """Gives a model that was just made, before its weights are loaded, the layers that its config describes.

    The models inside it came here before it, with the same config. In a base model the names lack its prefix.
    """
    config = model.config
    config._attn_implementation_internal = config._attn_implementation.removesuffix(ADVICE)
    if config._attn_implementation != OURS and hasattr(config, OURS):
        delattr(config, OURS)  # the caller has asked for another implementation
    modules = dict(model.named_modules())
    for name, settings in getattr(config, OURS, {"layers": {}})["layers"].items():
        module = modules.get(name, modules.get(name.removeprefix(f"{model.base_model_prefix}.")))
        if module is not None and not hasattr(module, CONE):
            setattr(module, CONE, settings and ConeAttention.from_config(**settings))
