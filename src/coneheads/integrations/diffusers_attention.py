"""The attention layer of diffusers with another score: the processor, and how it comes into a layer and out again."""

from __future__ import annotations

import math
from typing import Any

from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from coneheads.integrations import torch_nn
from coneheads.integrations.layers import already
from coneheads.nn import ConeAttention, ConeMultiheadAttention

#: the attribute of a converted layer with the processor that it had, and the handle of ``_watch``
KEPT = "before_cone_attention"
HONOURED = ("hidden_states", "encoder_hidden_states", "attention_mask", "temb")


class ConeAttnProcessor(nn.Module):
    """What diffusers' ``AttnProcessor2_0`` does, with the score of ``cone``. ``put`` sets it.

    ``attn.scale`` counts as ``ConeAttention.score`` says. Half precision computes in float32, so that
    ``upcast_attention`` and ``upcast_softmax`` hold in any case.
    """

    def __init__(self, cone: ConeAttention) -> None:
        super().__init__()
        self.cone = cone

    # diffusers reads the names of __call__ to see what it may pass. That of nn.Module has none, so forward won't do.
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [B, L, C] or [B, C, height, width], in cross attention with encoder_hidden_states [B, S, D].

        attention_mask [B, 1 or L, S] or [B * H, 1 or L, S] is added to the scores; diffusers makes it from the masks
        that its models take. temb conditions the spatial norm of a layer that has one. Returns the shape that came.
        """
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        shape = hidden_states.shape
        if len(shape) == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross is not None:
            context = attn.norm_encoder_hidden_states(context)
        projected = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        query, key, value = (features.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for features in projected)
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        mask = attn.prepare_attention_mask(attention_mask, context.shape[1], context.shape[0])
        if mask is not None:
            mask = mask.unflatten(0, (-1, attn.heads))  # [B, H, 1 or L, S]
        out, _ = self.cone(query, key, value, mask, scaling=attn.scale)
        out = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
        if len(shape) == 4:
            out = out.transpose(1, 2).reshape(shape)
        return (out + residual if attn.residual_connection else out) / attn.rescale_output_factor


def _watch(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before a converted layer: what diffusers replaces in silence, or drops with a line in the log, is an error.

    args and kwargs are those of ``Attention.forward``; cross_attention_kwargs are among the latter.
    """
    if not isinstance(attn.processor, ConeAttnProcessor):
        raise RuntimeError(
            f"the cone attention of a layer was replaced by {type(attn.processor).__name__} (attention slicing, fused "
            "projections, adapters and set_attn_processor do so); call coneheads.revert(model) if that is meant"
        )
    if unknown := [name for name, value in kwargs.items() if name not in HONOURED and value is not None]:
        raise TypeError(
            f"cross_attention_kwargs: cone attention does not honour {', '.join(unknown)}; "
            f"a converted layer takes {', '.join(HONOURED)}"
        )


def put(attn: Any, cone: ConeAttention) -> ConeAttention:
    """Gives an ``Attention`` this attention, and remembers what it had."""
    setattr(attn, KEPT, (attn.processor, attn.register_forward_pre_hook(_watch, with_kwargs=True)))
    attn.set_processor(ConeAttnProcessor(cone))
    return cone


def take_out(attn: Any) -> None:
    """Undoes ``put``. A processor that the user has set since stays."""
    processor, watch = getattr(attn, KEPT)
    watch.remove()
    delattr(attn, KEPT)
    if isinstance(attn.processor, ConeAttnProcessor):
        attn.set_processor(processor)


def cones(model: nn.Module) -> dict[str, ConeAttention]:
    """What the converted layers of a model call, by the name of the layer; ``nn.MultiheadAttention`` may be one too."""
    found: dict[str, Any] = {
        name: module if torch_nn.is_converted(module) else getattr(module, "processor", None)
        for name, module in model.named_modules()
    }
    ours = (ConeAttnProcessor, ConeMultiheadAttention)
    return {name: holder.cone for name, holder in found.items() if isinstance(holder, ours)}


def why_not(attn: Any) -> str:
    """Why a module of diffusers that has a processor cannot be converted; empty if it can."""
    kind = type(attn.processor)
    if hasattr(attn, KEPT):
        return (
            already(attn.processor.cone)
            if kind is ConeAttnProcessor
            else "its cone attention was replaced: revert first"
        )
    if type(attn) is not Attention:
        return "its class has projections, positions or streams of its own; only diffusers' Attention itself is known"
    if kind not in (AttnProcessor, AttnProcessor2_0):
        return f"its processor {kind.__name__} is not one of the standard ones, AttnProcessor2_0 and AttnProcessor"
    size = attn.inner_dim // attn.heads
    ignored = {
        "added_kv_proj_dim": attn.add_k_proj is not None,
        "kv_heads": attn.inner_kv_dim != attn.inner_dim,
        "pre_only": attn.to_out is None,
        "is_causal": attn.is_causal,
        "qk_norm": kind is AttnProcessor and attn.norm_q is not None,
        "scale_qk=False": kind is AttnProcessor2_0 and not math.isclose(attn.scale, size**-0.5),
    }
    names = ", ".join(name for name, present in ignored.items() if present)
    return f"its {names} would be ignored by its processor {kind.__name__}, too" if names else ""
