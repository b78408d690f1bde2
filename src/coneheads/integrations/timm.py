"""Cone attention in timm: a class for ``attn_layer=``, and the layers that ``convert`` gives to a model that exists.

``timm.create_model("vit_tiny_patch16_224", attn_layer=attention_layer("umbral"))`` builds a ViT or DeiT with it. Most
other models of timm take ``attn_layer=`` and ignore it without a word (swin, the ``_xp_`` ViTs); ``convert`` refuses
them by name. timm's switch ``fused_attn`` keeps its meaning: if it is on, ``attention`` computes with linear memory and
the scale 1 / sqrt(E); if it is off, the layer's ``scale`` counts and the weights of all pairs go through ``attn_drop``,
where ``timm.utils.AttentionExtract(method="hook")`` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from timm import layers as timm_layers  # type: ignore[import-not-found,unused-ignore]
from timm.layers import Attention, AttentionRope  # type: ignore[import-not-found,unused-ignore]
from timm.models import register_notrace_module  # type: ignore[import-not-found,unused-ignore]
from timm.models.eva import EvaAttention  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn

from coneheads.integrations.layers import CONE, Inputs, Layer, Settings, already
from coneheads.nn import ConeAttention
from coneheads.nn.cone_attention import NO_SCRIPT
from coneheads.scores import Score

# timm's feature extraction traces models with torch.fx, which cannot look into the choice of a backend.
register_notrace_module(ConeAttention)


class _Converted:
    """What the three layers share, beside a class of timm's: attention by ``self.cone``, and what stands around it."""

    def attend(self: Any, x: Tensor, heads: Sequence[Tensor], attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The input [B, N, C] of the layer and its query, key and value, each [B, H, N, E], to its output [B, N, C]."""
        query, key, value = heads
        if self.fused_attn:
            out, _ = self.cone(query, key, value, attn_mask, self.attn_drop.p if self.training else 0.0, is_causal)
        else:
            _, weights = self.cone(query, key, value, attn_mask, 0.0, is_causal, scaling=self.scale, need_weights=True)
            out = self.attn_drop(weights) @ value
        out = self.norm(out.transpose(1, 2).flatten(2))  # [B, N, H * E]
        if (gate := getattr(self, "gate", None)) is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def split(self: Any, features: Tensor, *groups: int) -> Tensor:
        """[B, N, groups * H * E] to [groups, B, H, N, E]; without groups [B, N, H * E] to [B, H, N, E]."""
        return features.unflatten(-1, (*groups, -1, self.head_dim)).movedim(1, -2).movedim(0, -4)

    def rotated(self: Any, features: Tensor, rope: Tensor | None) -> Tensor:
        """[B, H, N, E] with rotary positions on all tokens after the prefix (class and register tokens)."""
        if rope is None:
            return features
        prefix, others = features.tensor_split([self.num_prefix_tokens], 2)
        return torch.cat([prefix, timm_layers.apply_rot_embed_cat(others, rope, half=self.rotate_half)], 2)


class ConeVisionAttention(_Converted, Attention):  # type: ignore[misc,unused-ignore]
    """timm's ``Attention`` with another score: the layer of ViT and DeiT, and what to give as ``attn_layer=``.

    Args:
        score, learn_gamma, learn_radius: those of ``ConeAttention``, as in ``convert``.
        args, kwargs: those of ``timm.layers.Attention``.
    """

    def __init__(
        self,
        *args: Any,
        score: Score | str = "penumbral",
        learn_gamma: bool = False,
        learn_radius: bool = False,
        **kwargs: Any,
    ) -> None:
        if timm_layers.is_scriptable():
            raise ValueError(f"scriptable=True: {NO_SCRIPT}")
        super().__init__(*args, **kwargs)
        self.cone = Settings(score, learn_gamma, learn_radius).attention(Layer("", self, self.num_heads, self.head_dim))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, C]; the mask broadcasts to [B, H, N, N], boolean (True = attend) or added."""
        query, key, value = self.split(self.qkv(x), 3).unbind(0)
        return self.attend(x, (self.q_norm(query), self.k_norm(key), value), attn_mask, is_causal)


class _Rotary(_Converted):
    """The forward of the two layers with rotary positions."""

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]; rope: the sines and cosines of all tokens after the prefix; mask as above."""
        if self.qkv is None:
            query, key, value = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        else:
            query, key, value = self.split(self.fused_projection(x), 3).unbind(0)
        query = self.rotated(self.q_norm(query), rope).type_as(value)
        key = self.rotated(self.k_norm(key), rope).type_as(value)
        if (groups := getattr(self, "num_kv_groups", 1)) > 1:
            key, value = (shared.repeat_interleave(groups, 1) for shared in (key, value))
        return self.attend(x, (query, key, value), attn_mask, is_causal)

    def fused_projection(self: Any, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, 3 * H * E]; in EVA, keys have no bias."""
        if getattr(self, "q_bias", None) is None:
            return self.qkv(x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return self.qkv(x) + bias if self.qkv_bias_separate else nn.functional.linear(x, self.qkv.weight, bias)


class ConeRotaryAttention(_Rotary, AttentionRope):  # type: ignore[misc,unused-ignore]
    """timm's ``AttentionRope`` with another score: the layer of the ViTs with rotary positions."""


class ConeEvaAttention(_Rotary, EvaAttention):  # type: ignore[misc,unused-ignore]
    """timm's ``EvaAttention`` with another score: the layer of EVA, EVA-02 and DINOv3."""


CONVERTED = {Attention: ConeVisionAttention, AttentionRope: ConeRotaryAttention, EvaAttention: ConeEvaAttention}
ORIGINAL = {converted: original for original, converted in CONVERTED.items()}


def attention_layer(
    score: Score | str = "penumbral", *, learn_gamma: bool = False, learn_radius: bool = False
) -> type[ConeVisionAttention]:
    """The class for ``timm.create_model(..., attn_layer=)``; arguments as in ``ConeVisionAttention``."""

    class Recipe(ConeVisionAttention):
        # timm wants a class, and a layer of a class made here could not be pickled: so no layer is of this class.
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return ConeVisionAttention(*args, **kwargs, score=score, learn_gamma=learn_gamma, learn_radius=learn_radius)

    return Recipe


def find(model: nn.Module, run: Callable[[], Any] | None) -> Sequence[Layer]:
    """All attention of timm's; with the reason, what is not exactly one of the classes in ``CONVERTED``."""
    found = {name: module for name, module in model.named_modules() if _is_attention(module)}
    # A block around attention is not one more layer.
    blocks = {name for name in found if any(inner.startswith(f"{name}." if name else "") for inner in found if inner)}
    return [
        Layer(name, module, getattr(module, "num_heads", 0), getattr(module, "head_dim", 0), _why_not(module))
        for name, module in found.items()
        if name not in blocks
    ]


def swap(model: nn.Module, layers: Sequence[Layer], settings: Settings) -> dict[str, ConeAttention]:
    """Changes the class of each layer, so that all else about it stays."""
    return {layer.name: put(layer.module, settings.attention(layer)) for layer in layers}


def put(module: nn.Module, cone: ConeAttention) -> ConeAttention:
    """Gives a layer of timm's this attention."""
    module.__class__ = CONVERTED[type(module)]
    setattr(module, CONE, cone)
    return cone


def restore(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """Gives layers of this file, those built by ``attn_layer=`` too, the class of timm's that they come from."""
    converted = {name: module for name, module in model.named_modules() if type(module) in ORIGINAL}
    chosen = [name for name in converted if names is None or name in names]
    for name in chosen:
        delattr(converted[name], CONE)
        converted[name].__class__ = ORIGINAL[type(converted[name])]
    return chosen


def inputs_for(model: nn.Module) -> Inputs | None:
    """One image of zeros of the size that the model was built for, or else of the size in its ``pretrained_cfg``."""
    stem = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if stem is None or not any(kind.__module__.startswith("timm.models") for kind in type(model).__mro__):
        return None  # a block alone, or no model of timm's
    size = next((module.img_size for module in model.modules() if getattr(module, "img_size", None)), None)
    expected = getattr(model, "pretrained_cfg", {}).get("input_size") or (3, 224, 224)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return {"": (like.new_zeros(1, stem, *(timm_layers.to_2tuple(size) if size else expected[1:])),)}


def _why_not(module: Any) -> str:
    if type(module) in CONVERTED:
        return "" if getattr(module, "head_dim", 0) > 1 else "its heads have 1 feature, or timm is older than 1.0.26"
    if type(module) in ORIGINAL:
        return already(module.cone)
    known = ", ".join(f"{original.__module__}.{original.__name__}" for original in CONVERTED)
    return f"its scores are computed in code of its own; of timm's, convert knows {known}"


def _is_attention(module: nn.Module) -> bool:
    """By its name, or by the heads it has as a part of a model; a subclass of a layer that we know too."""
    home, name = type(module).__module__, type(module).__name__.lower()
    named = home.startswith("timm.") and ("attention" in name or "attn" in name)
    headed = home.startswith("timm.models.") and (hasattr(module, "num_heads") or hasattr(module, "fused_attn"))
    return named or headed or isinstance(module, tuple(CONVERTED))
