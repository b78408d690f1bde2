"""The keys and values of earlier calls, for decoding step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from coneheads import _checks


class KeyValueCache:
    """What one attention layer keeps between calls: projected keys [B, H, S, E] and values [B, H, S, Ev].

    Give each layer its own and pass it as ``cache=``. In self-attention every call appends its keys and values and
    attends to all so far. With ``static=True``, for cross-attention, the first call fills the cache and later ones
    reuse it: they take the same key and value tensors again, or None.

    Without gradients, room is doubled when it runs out, so that n steps copy O(n) rows. With gradients enabled every
    step makes new tensors, because earlier ones are still needed by backward.

    Args:
        static: fill once, then only read.

    Example:
        >>> cache = KeyValueCache()
        >>> keys, values = cache.append(torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 8))
        >>> keys, values = cache.append(torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 8))
        >>> keys.shape, cache.length
        (torch.Size([2, 4, 4, 16]), 4)
    """

    def __init__(self, *, static: bool = False) -> None:
        _checks.flag("static", static)
        self.static = static
        self.clear()

    def clear(self) -> None:
        """Forgets everything; the next call starts anew."""
        self.length = 0
        self._keys: Tensor | None = None  # [B, H, room, E]
        self._values: Tensor | None = None  # [B, H, room, Ev]
        self._source: tuple[Tensor, Tensor] | None = None
        self._layer: int | None = None

    def belongs_to(self, layer: object) -> None:
        """An error if another layer than the one that filled it asks: it would attend to keys that are not its own."""
        if self._keys is not None and self._layer not in (None, id(layer)):
            raise ValueError("cache holds the keys of another layer; make one KeyValueCache for each layer")
        self._layer = id(layer)

    @property
    def keys(self) -> Tensor | None:
        """[B, H, length, E], None if the cache is empty."""
        return None if self._keys is None else self._keys[..., : self.length, :]

    @property
    def values(self) -> Tensor | None:
        """[B, H, length, Ev], None if the cache is empty."""
        return None if self._values is None else self._values[..., : self.length, :]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys [B, H, L, E] and values [B, H, L, Ev] at the end; returns all, [B, H, length, E] and Ev."""
        self._check("key", key, self._keys)
        self._check("value", value, self._values)
        self._keys = _appended(self._keys, self.length, key)
        self._values = _appended(self._values, self.length, value)
        self.length += key.shape[-2]
        return self._keys[..., : self.length, :], self._values[..., : self.length, :]

    def fill(self, key: Tensor, value: Tensor, source: tuple[Tensor, Tensor]) -> None:
        """Keeps keys and values for good, and what they were projected from."""
        self._keys, self._values, self._source = key, value, source
        self.length = key.shape[-2]

    def stored(self, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The keys and values of a static cache; None if it is empty.

        ``key`` and ``value`` are the inputs of the layer: they must be those that filled it, or None.
        """
        if self._keys is None or self._values is None:
            return None
        known = self._source or (None, None)
        for name, given, source in (("key", key, known[0]), ("value", value, known[1])):
            if given is not None and given is not source:
                raise ValueError(
                    f"{name} is not the tensor that filled the static cache, whose {self.length} keys would be used "
                    f"instead of it; got {_checks.describe(given)}. Pass None, or call cache.clear() first"
                )
        return self._keys, self._values

    def reorder(self, indices: Tensor) -> None:
        """Row i of the batch becomes row ``indices[i]`` of before, as beam search needs; the batch may grow or shrink.

        A static cache takes key and value only as None afterwards.
        """
        if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32) or indices.dim() != 1:
            raise TypeError(
                f"indices must be a tensor [batch] of rows, int64 or int32; got {_checks.describe(indices)}"
            )
        self._source = None
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, indices), self._values.index_select(0, indices)

    def _check(self, name: str, new: Tensor, old: Tensor | None) -> None:
        if old is None:
            return
        sizes, kept = (*new.shape[:2], new.shape[-1]), (*old.shape[:2], old.shape[-1])
        if sizes != kept or new.dtype != old.dtype or new.device != old.device:
            raise ValueError(
                f"{name} must fit what the cache holds, {_checks.describe(old[..., : self.length, :])} "
                f"as [batch, heads, length, size]; got {_checks.describe(new)}. "
                "Use one cache for each layer, and clear() or a new one for another batch"
            )

    def __repr__(self) -> str:
        held = "empty" if self._keys is None else f"length={self.length}, batch={self._keys.shape[0]}"
        return f"KeyValueCache({held}{', static' if self.static else ''})"


def _appended(buffer: Tensor | None, length: int, new: Tensor) -> Tensor:
    """A buffer [B, H, room, E] whose rows up to ``length`` are as before, with the new rows behind them."""
    end = length + new.shape[-2]
    if torch.is_grad_enabled():
        return new if buffer is None else torch.cat([buffer[..., :length, :], new], -2)
    # A tensor of inference mode cannot be written to outside of it.
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    if buffer is None or end > buffer.shape[-2] or frozen:
        room = new.new_empty(*new.shape[:-2], max(end, 2 * length), new.shape[-1])
        if buffer is not None:
            room[..., :length, :] = buffer[..., :length, :]
        buffer = room
    buffer[..., length:end, :] = new
    return buffer
