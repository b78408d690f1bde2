"""The function that a layer of transformers calls when its model's attention implementation is one of coneheads'."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from coneheads.integrations.layers import CONE
from coneheads.nn import ConeAttention

#: arguments of a model that reach its attention and mean nothing there; a sliding window has to be in the mask
HARMLESS = {"position_ids", "cache_position", "sliding_window", "use_cache", "num_items_in_batch", "return_dict"}
HARMLESS |= {"output_hidden_states", "output_router_logits", "encoder_hidden_states", "encoder_attention_mask"}


def attention(
    score: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev] -> [B, L, H, Ev], and the weights [B, H, L, S] if asked for.

    Args:
        score: the name of a score; None in a converted model.
        module: the layer. In a converted model it holds a ``ConeAttention``, or None if it was left out: then it runs
            SDPA, or the score "dot" for what SDPA cannot do.
        attention_mask: broadcasts to [B, H, L, S]; boolean (True = attend) or added to the scores.
        scaling: what the layer would multiply dot products by; see ``ConeAttention.score``.
        dropout: the share of weights set to 0.
        is_causal: the layer's own ``is_causal`` if None; of no effect beside a mask or for a single query.
        position_bias: [1 or B, H, L, S], added to the scores.
        softcap: bounds the scores; see ``ConeAttention.forward``.
        output_attentions: whether weights are returned.
        others: must be None, but for those that mean nothing to attention.
    """
    layer = type(module).__name__
    cone: Any = getattr(module, CONE, "missing")
    if score is None and cone == "missing":
        raise ValueError(
            f"{layer} runs 'coneheads' but has no ConeAttention: convert(model) makes them, a saved one has them if it "
            "is loaded whole or as its base model; a plain model can run a score by name, 'coneheads_umbral'"
        )
    if score is not None and cone != "missing":
        raise ValueError(
            f"{layer} was converted and cannot run 'coneheads_{score}': set 'coneheads' again, or revert(model) first"
        )
    window = others.get("sliding_window")
    if attention_mask is None and isinstance(window, int) and key.shape[2] > window:
        raise ValueError(
            f"{layer} was given sliding_window={window} without a mask that has it for {key.shape[2]} keys"
        )
    if unknown := [name for name, given in others.items() if given is not None and name not in HARMLESS]:
        raise ValueError(f"{layer} was given {', '.join(unknown)}, which cone attention does not honour: leave it out")
    weighted = bool(output_attentions) or _weights_are_collected()
    if cone is None and softcap is None and not weighted:
        sdpa = transformers.AttentionInterface()["sdpa"]
        asked = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, "position_bias": position_bias}
        return sdpa(module, query, key, value, attention_mask, **asked)
    own = getattr(module, "scaling", None)
    if scaling == 1 and isinstance(own, float) and own != 1:
        # OPT, Whisper and some others multiply the query themselves; cones need query and key on one scale.
        query, scaling = query / own, own
    length, causal = query.shape[2], False
    if length > 1 and attention_mask is None:
        # As in transformers' SDPA: aligned top-left, also if a static cache has more keys than there are queries.
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:
        key, value = key[:, :, :length], value[:, :, :length]
    if position_bias is not None:
        attention_mask, causal = _with_bias(position_bias[..., : key.shape[2]], attention_mask, causal), False
    attend = cone if isinstance(cone, ConeAttention) else ConeAttention(score or "dot", query.shape[1], query.shape[3])
    out, weights = attend(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        enable_gqa=query.shape[1] != key.shape[1],
        scaling=scaling,
        softcap=softcap,
        need_weights=weighted,
    )
    return out.transpose(1, 2).contiguous(), weights


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The bias [1 or B, H, L, S] and a mask as one mask to be added."""
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _weights_are_collected() -> bool:
    """Whether the running forward was asked for weights: GPT-2, OPT and others do not tell their layers."""
    from transformers.utils.output_capturing import _active_collector

    return any("attentions" in name for name in _active_collector.get() or ())
