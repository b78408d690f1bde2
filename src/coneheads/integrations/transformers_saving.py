"""How a model of transformers that runs cone attention is saved and loaded: what its config.json says of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn

from coneheads.integrations import torch_nn
from coneheads.integrations.layers import CONE
from coneheads.nn import ConeAttention

#: the implementation of converted models, and the key of their description in config.json
OURS = "coneheads"
#: follows the name in config.json: transformers quotes a name that it does not know, and so says what to do
ADVICE = " (pip install coneheads[hf], then: from coneheads.integrations.transformers import register; register())"
#: before the implementation of a model in which layers of other libraries alone are converted
BESIDE = f"{OURS} beside "
#: the file with the layers of timm's that ``convert`` has changed
TIMM = "coneheads.integrations.timm"


def remember_when_saved() -> None:
    """From now on configs save our implementations, and models with a description in their config are rebuilt by it.

    transformers has no hook for what a config saves, nor between making a model and loading its weights. What is added
    here acts on nothing but configs that carry one of our names. To be called once.
    """
    _extend(transformers.PreTrainedConfig, "to_dict", _with_name)
    _extend(transformers.PreTrainedModel, "post_init", _rebuild)


def held(root: Any, prefix: str = "") -> dict[str, ConeAttention | None]:
    """What the layers that ask transformers' interface hold, by name: None where a converted model keeps SDPA."""
    marked = ((name, module) for name, module in root.named_modules(prefix=prefix) if hasattr(module, CONE))
    return {name: module.cone for name, module in marked if not type(module).__module__.startswith("coneheads.")}


def _of_other_libraries(root: Any) -> dict[str, ConeAttention]:
    """The same of converted layers that are not transformers' own: ``nn.MultiheadAttention``, and those of timm."""
    modules = root.named_modules()
    return {name: m.cone for name, m in modules if torch_nn.is_converted(m) or type(m).__module__ == TIMM}


def describe(root: Any, before: dict[str, str] | None = None) -> None:
    """Puts the converted layers of a model into its config; of ``before`` the first counts."""
    known = getattr(root.config, OURS, {})
    forget(root)
    described = {"layers": _settings(held(root)), "others": _settings(_of_other_libraries(root))}
    if any(described.values()):
        setattr(root.config, OURS, {"before": known.get("before") or before, **described})


def _settings(cones: Mapping[str, ConeAttention | None]) -> dict[str, Any]:
    """What ``_rebuild`` needs to make them again."""
    return {
        name: None if cone is None else {"config": cone.config(), "heads": cone.heads, "size": cone.size}
        for name, cone in cones.items()
    }


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
    if getattr(config, OURS, {}).get("others") and not str(name).startswith(OURS):
        name = f"{BESIDE}{name}"
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
    name = config._attn_implementation.removesuffix(ADVICE).removeprefix(BESIDE)
    config._attn_implementation_internal = name
    # transformers can tell whether a model asks the interface by the code of its own models alone.
    of_transformers = type(model).__module__.startswith("transformers.")
    if name.startswith(OURS) and of_transformers and not model._can_set_attn_implementation():
        raise ValueError(f"{type(model).__name__} ignores transformers' attention interface: it would not run {name!r}")
    described = getattr(config, OURS, {})
    if name != OURS and described:
        described["layers"] = {}  # the caller has asked for another implementation
        if not described.get("others"):
            delattr(config, OURS)
    modules = dict(model.named_modules())
    for group in ("layers", "others"):
        for name, settings in described.get(group, {}).items():
            module = modules.get(name, modules.get(name.removeprefix(f"{model.base_model_prefix}.")))
            if module is not None and not hasattr(module, CONE):
                _put(module, settings and ConeAttention.from_config(**settings))
    torch_nn.keep_padded(model)


def _put(module: nn.Module, cone: ConeAttention | None) -> None:
    """Gives a layer that a config describes, of whatever library, its attention."""
    if cone is not None and isinstance(module, nn.MultiheadAttention):
        torch_nn.put(module, cone)
    elif cone is not None and type(module).__module__.startswith("timm."):
        importlib.import_module(TIMM).put(module, cone)
    else:
        setattr(module, CONE, cone)
