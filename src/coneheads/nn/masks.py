"""From the masks of ``nn.MultiheadAttention``, where True = ignore, to that of ``attention``, where True = attend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coneheads import _checks


def _mask_kind(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        raise TypeError(
            f"{name} must be a boolean (True = ignore) or floating-point (added) tensor, or None; "
            f"got {_checks.describe(mask)}"
        )


def pair_mask(mask: Tensor, batch: int, heads: int, length: int, keys: int) -> Tensor:
    """``attn_mask`` as [1, 1, L, S] or [B, H, L, S]."""
    _mask_kind("attn_mask", mask)
    if mask.dim() == 2 and mask.shape == (length, keys):
        return mask[None, None]
    if mask.dim() == 3 and mask.shape == (batch * heads, length, keys):
        return mask.unflatten(0, (batch, heads))
    raise ValueError(
        f"attn_mask must have the shape [L, S] = {[length, keys]} or [B * num_heads, L, S] = "
        f"{[batch * heads, length, keys]}; got {_checks.describe(mask)}"
    )


def key_mask(mask: Tensor, batch: int, keys: int, *, batched: bool) -> Tensor:
    """``key_padding_mask`` as [B, 1, 1, S]."""
    _mask_kind("key_padding_mask", mask)
    expected = (batch, keys) if batched else (keys,)
    if mask.shape != expected:
        raise ValueError(
            f"key_padding_mask must have the shape {'[B, S]' if batched else '[S]'} = {list(expected)}, cached keys "
            f"counted; got {_checks.describe(mask)}"
        )
    return mask.reshape(batch, 1, 1, keys)


def mask_and_causal(
    pairs: Tensor | None, padding: Tensor | None, is_causal: bool, q: Tensor, keys: int, extra: int
) -> tuple[Tensor | None, bool]:
    """``attn_mask`` and ``is_causal`` of ``attention``, of which only one may be given."""
    length = q.shape[-2]
    if is_causal and padding is None and not extra and length == keys and (pairs is None or _is_causal(pairs)):
        return None, True
    if is_causal and pairs is None and length > 1:
        pairs = _future(length, keys, q.device)
    masks = [mask for mask in (pairs, padding) if mask is not None]
    if not masks:
        return None, False
    if all(mask.dtype == torch.bool for mask in masks):
        merged = ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
    else:
        added = [_additive(mask, q.dtype) for mask in masks]
        merged = added[0] if len(added) == 1 else added[0] + added[1]
    # The keys that add_bias_kv and add_zero_attn add are seen by every query.
    return (pad(merged, (0, extra), value=float(merged.dtype == torch.bool)) if extra else merged), False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added: -inf where a boolean one says to ignore."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _future(length: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, L, S], True where a key comes after the query, the last query being at the last key."""
    return torch.ones(1, 1, length, keys, dtype=torch.bool, device=device).triu(keys - length + 1)


def _is_causal(pairs: Tensor) -> bool:
    """Whether a mask is seen to be causal, where looking costs next to nothing: on the CPU, outside of tracing."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if type(pairs) is not Tensor or pairs.device.type != "cpu" or pairs.requires_grad:
        return False
    causal = _future(pairs.shape[-2], pairs.shape[-1], pairs.device)
    return torch.equal(pairs, causal if pairs.dtype == torch.bool else _additive(causal, pairs.dtype))
