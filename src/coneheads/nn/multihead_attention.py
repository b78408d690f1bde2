"""``nn.MultiheadAttention`` with the score of one's choice, smaller queries and keys, shared key heads, and a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import init  # not its functions: transformers replaces them while it loads, lest weights be drawn anew

from coneheads import _checks
from coneheads.nn import masks
from coneheads.nn.cone_attention import ConeAttention
from coneheads.nn.key_value_cache import KeyValueCache
from coneheads.scores import Score


class ConeMultiheadAttention(nn.MultiheadAttention):
    """A superset of ``nn.MultiheadAttention``: same arguments, call, shapes, masks, initialisation and state dict.

    A checkpoint of ``nn.MultiheadAttention`` loads strictly and the other way round, as long as ``qk_dim`` and
    ``num_kv_heads`` are left alone and nothing is learned; ``score="dot"`` then gives the same numbers to rounding.
    With another ``qk_dim`` or ``num_kv_heads`` the projections are the separate ``q_proj_weight``, ``k_proj_weight``
    and ``v_proj_weight``.

    Two things differ. A query whose keys are all masked gets zero attention, so that the bias of ``out_proj`` is its
    output, where ``nn.MultiheadAttention`` gives NaN. And nested tensors are refused.

    Args:
        embed_dim: the features of queries and of the output.
        num_heads: the heads; each has values of size embed_dim / num_heads.
        dropout: the share of weights set to 0 in training, in [0, 1).
        bias: biases in the projections.
        add_bias_kv: one more key and value, learned.
        add_zero_attn: one more key and value, zero. A cone score of a key of zeros is not 0, unlike a dot product.
        kdim: the features of keys; embed_dim if None.
        vdim: the features of values; embed_dim if None.
        batch_first: inputs are [B, L, features] and not [L, B, features].
        device: where the parameters are.
        dtype: what they are.
        score: a name, for a score that starts as ``coneheads.nn.start`` says, or a score object, which stays as it is.
        qk_dim: the size of a head of queries and keys, at least 2; embed_dim / num_heads if None.
        learn_gamma: learn the temperature, one for each head.
        learn_radius: learn radius or light of the cones, one for each head.
        num_kv_heads: the heads of keys and values, each for an equal group of query heads; num_heads if None.

    Example:
        >>> layer = ConeMultiheadAttention(64, 4, batch_first=True, qk_dim=8)
        >>> x = torch.randn(2, 10, 64)
        >>> out, weights = layer(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    cone: ConeAttention
    #: whether ``convert`` made this layer of an ``nn.MultiheadAttention``
    converted = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        score: Score | str = "penumbral",
        qk_dim: int | None = None,
        learn_gamma: bool = False,
        learn_radius: bool = False,
        num_kv_heads: int | None = None,
    ) -> None:
        head_dim, qk_dim, num_kv_heads = _checked_sizes(embed_dim, num_heads, kdim, vdim, qk_dim, num_kv_heads)
        _checks.dropout(dropout)
        # Before the rest, because the base class calls _reset_parameters, which reads them.
        self.qk_dim, self.num_kv_heads = qk_dim, num_kv_heads
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if (qk_dim, num_kv_heads) != (head_dim, num_heads):
            self._resize_projections(device, dtype)
        self.cone = ConeAttention(
            score,
            num_heads,
            qk_dim,
            learn_gamma=learn_gamma,
            learn_radius=learn_radius,
            device=device,
            dtype=dtype,
        )

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """What the base class stored while it is being built, then False.

        ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` read it to decide whether they may compute the
        dot product themselves from ``in_proj_weight``, in eval mode, without a call of this module.
        """
        return "cone" not in self._modules and self.__dict__["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def _projection_sizes(self) -> tuple[int, int, int]:
        """The features of all heads of queries, of keys, of values."""
        return (
            self.num_heads * self.qk_dim,
            self.num_kv_heads * self.qk_dim,
            self.num_kv_heads * self.head_dim,
        )

    def _resize_projections(self, device: Any, dtype: torch.dtype | None) -> None:
        """Separate projections of the sizes that ``qk_dim`` and ``num_kv_heads`` ask for."""

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        query_size, key_size, value_size = self._projection_sizes()
        self.register_parameter("in_proj_weight", None)
        self.q_proj_weight = parameter(query_size, self.embed_dim)
        self.k_proj_weight = parameter(key_size, self.kdim)
        self.v_proj_weight = parameter(value_size, self.vdim)
        if self.in_proj_bias is not None:
            self.in_proj_bias = parameter(query_size + key_size + value_size)
        if self.bias_k is not None:
            self.bias_k, self.bias_v = parameter(1, 1, key_size), parameter(1, 1, value_size)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """The distributions of ``nn.MultiheadAttention``, drawn in its order.

        Projections of another size are drawn as the rows of its packed weight, so that queries and keys start with the
        same spread whatever ``qk_dim`` is: Xavier's rule would widen it by up to a factor of 2 ** 0.5 for small ones.
        """
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if (self.qk_dim, self.num_kv_heads) != (self.head_dim, self.num_heads) and self.in_proj_weight is None:
            for weight in separate:
                bound = math.sqrt(6 / (4 * weight.shape[1]))
                init.uniform_(weight, -bound, bound)
        else:
            for weight in separate if self.in_proj_weight is None else (self.in_proj_weight,):
                init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            init.zeros_(self.in_proj_bias)
            init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                init.xavier_normal_(extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of each query to all keys; S counts the keys of a cache, in the masks too.

        Args:
            query: [L, B, embed_dim], [B, L, embed_dim] if batch_first, or [L, embed_dim] without a batch.
            key: [S, B, kdim], [B, S, kdim] or [S, kdim].
            value: [S, B, vdim], [B, S, vdim] or [S, vdim].
            key_padding_mask: [B, S], or [S] without a batch; boolean (True = ignore this key) or float (added).
            need_weights: return the weights too, which need memory for all pairs.
            attn_mask: [L, S] or [B * num_heads, L, S]; boolean (True = ignore) or float (added). Both masks may be of
                different kinds.
            average_attn_weights: the mean of the weights over the heads.
            is_causal: says that ``attn_mask`` is the causal mask, which lets half of the work be skipped. Without
                ``attn_mask`` it is an error, as in ``nn.MultiheadAttention``; a mask that is not causal counts all the
                same. With a cache that is not static it needs no ``attn_mask``: the last query is at the last key.
            cache: what keeps keys and values from call to call, see ``KeyValueCache``.

        Returns:
            The output, shaped as query, and the weights after dropout: [B, L, S], [B, num_heads, L, S] if not averaged,
            both without B for inputs without a batch; None if not needed. ``add_bias_kv`` and ``add_zero_attn`` add
            a key each to S.
        """
        for name, flag in (
            ("need_weights", need_weights),
            ("average_attn_weights", average_attn_weights),
            ("is_causal", is_causal),
        ):
            _checks.flag(name, flag)
        # All checks come before the cache changes: a call that fails leaves it as it was.
        batch, length, keys = self._checked_inputs(query, key, value, is_causal, attn_mask is not None, cache)
        if attn_mask is not None:
            attn_mask = masks.pair_mask(attn_mask, batch, self.num_heads, length, keys)
        if key_padding_mask is not None:
            key_padding_mask = masks.key_mask(key_padding_mask, batch, keys, batched=query.dim() == 3)
        q, k, v = self._with_extra_keys(*self._queries_keys_values(query, key, value, cache))
        mask, causal = masks.mask_and_causal(attn_mask, key_padding_mask, is_causal, q, keys, extra=k.shape[-2] - keys)
        out, weights = self.cone(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
            need_weights=need_weights,
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.dim() == 2:
            out, weights = out[0].transpose(0, 1), None if weights is None else weights[0]  # [L, H, Ev]
        else:
            out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)  # [B, L, H, Ev], [L, B, H, Ev]
        return self.out_proj(out.flatten(-2)), weights

    def _checked_inputs(
        self,
        query: object,
        key: object,
        value: object,
        is_causal: bool,
        has_mask: bool,
        cache: object,
    ) -> tuple[int, int, int]:
        """The sizes B, L, S of the call, cached keys counted in, once the arguments are found to fit."""
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache or None; got {_checks.describe(cache)}")
        if cache is not None:
            cache.belongs_to(self)
        growing = cache is not None and not cache.static
        _sequence("query", query, self.embed_dim)
        assert isinstance(query, Tensor)
        batch, length = self._batch_and_length(query)
        if is_causal and not has_mask and not growing:
            raise ValueError(
                "is_causal=True is a hint about attn_mask, as in nn.MultiheadAttention, and needs one; got None. "
                "nn.Transformer.generate_square_subsequent_mask makes it. A cache= that is not static needs none"
            )
        if cache is not None and cache.static and cache.keys is not None:
            if cache.keys.shape[0] != batch:
                raise ValueError(
                    f"query must have the batch size {cache.keys.shape[0]} of the static cache; "
                    f"got {_checks.describe(query)}"
                )
            return batch, length, cache.length
        _sequence("key", key, self.kdim)
        _sequence("value", value, self.vdim)
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        got = f"got query {_checks.describe(query)}, key {_checks.describe(key)} and value {_checks.describe(value)}"
        if not query.dim() == key.dim() == value.dim():
            raise ValueError(f"query, key and value must all have a batch or all have none; {got}")
        key_batch, keys = self._batch_and_length(key)
        if (key_batch, keys) != self._batch_and_length(value):
            raise ValueError(f"key and value must have the same length and batch size; {got}")
        if key_batch != batch:
            order = "[B, L, features]" if self.batch_first else "[L, B, features]"
            raise ValueError(f"query and key must have the same batch size; the inputs are {order} here, {got}")
        if growing and is_causal and length != keys:
            raise ValueError(f"is_causal=True with a cache needs as many queries as new keys; {got}")
        return batch, length, keys + (cache.length if growing and cache is not None else 0)

    def _batch_and_length(self, tensor: Tensor) -> tuple[int, int]:
        if tensor.dim() == 2:
            return 1, tensor.shape[0]
        return (tensor.shape[0], tensor.shape[1]) if self.batch_first else (tensor.shape[1], tensor.shape[0])

    def _queries_keys_values(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected and split into heads, with what the cache holds: [B, H, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev]."""
        kept = cache.stored(key, value) if cache is not None and cache.static else None
        if kept is not None:
            weight, bias, _ = self._projections()[0]
            return self._in_heads(F.linear(query, weight, bias), self.num_heads), *kept
        assert key is not None
        assert value is not None
        if self.in_proj_weight is not None and query is key and key is value:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            projected = tuple(
                F.linear(x, weight, bias)
                for x, (weight, bias, _) in zip((query, key, value), self._projections(), strict=True)
            )
        q, k, v = (self._in_heads(x, heads) for x, (_, _, heads) in zip(projected, self._projections(), strict=True))
        if cache is None:
            return q, k, v
        if cache.static:
            cache.fill(k, v, (key, value))
            return q, k, v
        return q, *cache.append(k, v)

    def _projections(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Weight, bias and heads of the projections of queries, keys and values."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else bias.split([len(weight) for weight in weights])
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return list(zip(weights, biases, heads, strict=True))

    def _in_heads(self, projected: Tensor, heads: int) -> Tensor:
        """[L, B, H * E], [B, L, H * E] or [L, H * E] -> [B, H, L, E]."""
        split = projected.unflatten(-1, (heads, projected.shape[-1] // heads))
        if split.dim() == 3:
            return split.transpose(0, 1)[None]
        return split.transpose(1, 2) if self.batch_first else split.permute(1, 2, 0, 3)

    def _with_extra_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What ``add_bias_kv`` and ``add_zero_attn`` add to keys and values, behind all others and never cached."""
        for wanted, extra_key, extra_value in (
            (self.bias_k is not None, self.bias_k, self.bias_v),
            (self.add_zero_attn, None, None),
        ):
            if wanted:
                k, v = _with_one_more(k, extra_key), _with_one_more(v, extra_value)
        return q, k, v

    def extra_repr(self) -> str:
        shown: dict[str, tuple[Any, Any]] = {
            "qk_dim": (self.qk_dim, self.head_dim),
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "kdim": (self.kdim, self.embed_dim),
            "vdim": (self.vdim, self.embed_dim),
            "dropout": (self.dropout, 0.0),
            "bias": (self.in_proj_bias is not None, True),
            "add_bias_kv": (self.bias_k is not None, False),
            "add_zero_attn": (self.add_zero_attn, False),
            "batch_first": (self.batch_first, False),
        }
        changed = [f"{name}={value}" for name, (value, default) in shown.items() if value != default]
        return ", ".join([f"embed_dim={self.embed_dim}, num_heads={self.num_heads}", *changed])


def _checked_sizes(
    embed_dim: int, num_heads: int, kdim: int | None, vdim: int | None, qk_dim: int | None, num_kv_heads: int | None
) -> tuple[int, int, int]:
    """The sizes of a head of values and of one of queries and keys, and the heads of keys and values."""
    given = {"embed_dim": embed_dim, "num_heads": num_heads}
    optional = {"kdim": kdim, "vdim": vdim, "qk_dim": qk_dim, "num_kv_heads": num_kv_heads}
    for name, size in (given | {name: size for name, size in optional.items() if size is not None}).items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer; got {_checks.describe(size)}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads; got embed_dim={embed_dim}, num_heads={num_heads}")
    head_dim = embed_dim // num_heads
    size = head_dim if qk_dim is None else qk_dim
    if size < 2:
        source = f"qk_dim={qk_dim}" if qk_dim is not None else f"embed_dim / num_heads = {head_dim}"
        raise ValueError(f"a head of queries and keys must have at least 2 features (qk_dim); got {source}")
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads; got num_kv_heads={kv_heads}, num_heads={num_heads}")
    return head_dim, size, kv_heads


def _sequence(name: str, tensor: object, features: int) -> None:
    """A dense tensor of two or three dimensions, the last of this size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {_checks.describe(tensor)}")
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; pass a padded one and key_padding_mask. nn.TransformerEncoder makes nested "
            "tensors of padded ones in eval mode: set its use_nested_tensor = False, or convert it as a whole"
        )
    if tensor.dim() not in (2, 3) or tensor.shape[-1] != features:
        raise ValueError(
            f"{name} must have 3 dimensions, or 2 without a batch, the last of size {features}; "
            f"got {_checks.describe(tensor)}"
        )


def _with_one_more(rows: Tensor, extra: Tensor | None) -> Tensor:
    """[B, H, S, E] and one row more: that of ``extra`` [1, 1, H * E], or zeros."""
    batch, heads, _, size = rows.shape
    if extra is None:
        return F.pad(rows, (0, 0, 0, 1))
    row = extra.reshape(1, heads, 1, size).expand(batch, -1, -1, -1)
    return torch.cat([rows, row], -2)
