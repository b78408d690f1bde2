"""``nn.MultiheadAttention``, alone or inside ``nn.Transformer*``: it becomes a ``ConeMultiheadAttention`` in place.

Its class is changed and its parameters stay the same objects. PyTorch's encoder has two ways past an attention layer in
eval mode. One, the fast path of ``nn.TransformerEncoderLayer``, is closed by ``ConeMultiheadAttention`` itself. The
other, nested tensors made by ``nn.TransformerEncoder`` of a padded batch, is a switch of the encoder: turned off here,
and on again by ``restore``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coneheads.integrations.layers import CONE, Inputs, Layer, Settings, already
from coneheads.nn import ConeAttention, ConeMultiheadAttention

#: what ``swap`` adds to a layer beside its attention, and the value that an encoder's switch had
ADDED = ("qk_dim", "num_kv_heads", "converted")
NESTED_BEFORE = "_use_nested_tensor_before_conversion"


def find(model: nn.Module, run: Callable[[], Any] | None) -> list[Layer]:
    """All ``nn.MultiheadAttention`` of the model, and all layers of a class derived from it."""
    return [
        Layer(name, module, module.num_heads, module.head_dim, _why_not(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]


def _why_not(module: nn.MultiheadAttention) -> str:
    if isinstance(module, ConeMultiheadAttention):
        if module.converted:
            return already(module.cone)
        return f"it was built with the score {module.cone.base.name!r} and is no nn.MultiheadAttention to convert"
    if type(module) is not nn.MultiheadAttention:
        return (
            f"{type(module).__name__} is derived from nn.MultiheadAttention, and what it changes would be lost; "
            "convert before a wrapper like FSDP or a parametrization changes the class"
        )
    if "forward" in vars(module):
        return (
            "its forward was replaced in this one object, by a hook of accelerate for example, and would still be "
            "called; convert before"
        )
    if module.head_dim < 2:
        return f"its heads have {module.head_dim} feature, and a score needs at least 2"
    return ""


def swap(model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
    """Changes the class of these layers; returns the attention of each by name."""
    cones = {layer.name: put(layer.module, settings.attention(layer)) for layer in layers}
    keep_padded(model)
    return cones


def put(module: nn.Module, cone: ConeAttention) -> ConeAttention:
    """Makes an ``nn.MultiheadAttention`` one with this attention."""
    module.__class__ = ConeMultiheadAttention
    assert isinstance(module, ConeMultiheadAttention)
    module.qk_dim, module.num_kv_heads, module.converted = module.head_dim, module.num_heads, True
    module.add_module(CONE, cone)
    return cone


def keep_padded(model: nn.Module) -> None:
    """Encoders that hold a converted layer make no nested tensors from now on."""
    for encoder in _encoders(model):
        if _has_converted(encoder) and getattr(encoder, "use_nested_tensor", False):
            setattr(encoder, NESTED_BEFORE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False


def restore(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """Makes converted layers plain ``nn.MultiheadAttention`` again, all or those of these names."""
    restored = []
    for name, module in model.named_modules():
        if not is_converted(module) or (names is not None and name not in names):
            continue
        restored.append(name)
        delattr(module, CONE)
        for attribute in ADDED:
            delattr(module, attribute)
        module.__class__ = nn.MultiheadAttention
    for encoder in _encoders(model):
        if NESTED_BEFORE in vars(encoder) and not _has_converted(encoder):
            encoder.use_nested_tensor = getattr(encoder, NESTED_BEFORE)
            delattr(encoder, NESTED_BEFORE)
    return restored


def inputs_for(model: nn.Module) -> Inputs | None:
    """Two sequences of three tokens, one of them padded where the model takes padding; for PyTorch's own models only.

    A subclass may take other inputs, and so may a model that holds one of these: there the user gives ``probe=``.
    """
    like = next(model.parameters(), None)
    if like is None or like.device.type == "meta":
        return None
    attention = next((module for module in model.modules() if isinstance(module, nn.MultiheadAttention)), None)
    if attention is None:
        return None

    def tokens(size: int) -> Tensor:
        shape = (2, 3, size) if attention.batch_first else (3, 2, size)
        # No straight line: a layer norm would make all tokens alike.
        return torch.linspace(0, 50, 6 * size, device=like.device).sin().to(like.dtype).reshape(shape)

    source = tokens(attention.embed_dim)
    kind = type(model)
    if kind in (nn.MultiheadAttention, ConeMultiheadAttention):
        return {"query": source, "key": tokens(attention.kdim), "value": tokens(attention.vdim)}
    if kind is nn.TransformerEncoderLayer:
        return {"src": source}
    if kind is nn.TransformerEncoder and _made_of(model, nn.TransformerEncoderLayer):
        padding = torch.tensor([[False, False, False], [False, False, True]], device=like.device)
        return {"src": source, "src_key_padding_mask": padding}
    if kind is nn.TransformerDecoderLayer or (
        kind is nn.TransformerDecoder and _made_of(model, nn.TransformerDecoderLayer)
    ):
        return {"tgt": source, "memory": source}
    if isinstance(model, nn.Transformer) and kind is nn.Transformer:
        encoder, decoder = model.encoder, model.decoder
        plain = type(encoder) is nn.TransformerEncoder and type(decoder) is nn.TransformerDecoder
        return {"src": source, "tgt": source} if plain else None
    return None


def _made_of(model: nn.Module, layer: type[nn.Module]) -> bool:
    layers = getattr(model, "layers", None)
    return isinstance(layers, nn.ModuleList) and all(type(one) is layer for one in layers)


def _encoders(model: nn.Module) -> list[nn.TransformerEncoder]:
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]


def _has_converted(module: nn.Module) -> bool:
    return any(is_converted(part) for part in module.modules())


def is_converted(module: nn.Module) -> bool:
    """Whether ``put`` made this layer; one that was built as it is stays so."""
    return isinstance(module, ConeMultiheadAttention) and module.converted
