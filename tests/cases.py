"""The shapes, masks, dtypes and scores that tests go through."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from coneheads.backends import BACKENDS
from coneheads.scores import BY_NAME

# What this machine has for tensors of the CPU. Without a C++ compiler there is no "cpp": the rest passes without it.
BACKEND_NAMES = [b.name for b in BACKENDS if b.available() and (not b.devices or "cpu" in b.devices)]
SCORE_NAMES = list(BY_NAME)
# What torch.compile needs too.
needs_compiler = pytest.mark.skipif("cpp" not in BACKEND_NAMES, reason="no C++ compiler on this machine")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, and how its tensors lie in memory."""

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    length: int = 7
    keys: int = 11
    size: int = 9
    value_size: int = 5
    layout: str = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def gqa(self) -> bool:
        return self.kv_heads != self.heads

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value: normal features, leaves that ask for gradients or views of such leaves."""
        return (
            self._tensor(self.heads, self.length, self.size, dtype),
            self._tensor(self.kv_heads, self.keys, self.size, dtype),
            self._tensor(self.kv_heads, self.keys, self.value_size, dtype),
        )

    def _tensor(self, heads: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        if self.layout == "transposed":  # [B, L, H, E] in memory, as models have it after a projection
            return torch.randn(self.batch, rows, heads, size).to(dtype).transpose(1, 2)
        if self.layout == "expanded":  # one batch for all
            return torch.randn(1, heads, rows, size).to(dtype).expand(self.batch, -1, -1, -1)
        if self.layout == "strided":  # every second feature
            return torch.randn(self.batch, heads, rows, 2 * size).to(dtype)[..., ::2]
        return torch.randn(self.batch, heads, rows, size).to(dtype)


SHAPES = [
    Shape("plain"),
    Shape("one_query", length=1),
    Shape("one_key", keys=1),
    Shape("one_of_each", batch=1, heads=1, kv_heads=1, length=1, keys=1, value_size=1),
    Shape("square", length=13, keys=13),
    Shape("more_queries_than_keys", length=17, keys=3),
    Shape("size_2", size=2),
    Shape("size_65", size=65, value_size=33),
    Shape("grouped_queries", heads=6, kv_heads=2),
    Shape("one_key_head", heads=4, kv_heads=1, length=5),
    Shape("transposed", layout="transposed"),
    Shape("expanded", layout="expanded"),
    Shape("strided", layout="strided"),
    Shape("empty_batch", batch=0),
]


def masks(shape: Shape) -> dict[str, dict]:
    """The keyword arguments that mask a call of this shape, by name."""
    b, h, n, s = shape.batch, shape.heads, shape.length, shape.keys
    full = torch.rand(b, h, n, s) > 0.4
    full[..., 0, :] = False  # one row that is masked whole
    padding = torch.ones(b, 1, 1, s, dtype=torch.bool)
    padding[:1, ..., s // 2 + 1 :] = False
    return {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": full},
        "padding": {"attn_mask": padding},
        "rows_and_keys": {"attn_mask": torch.randn(n, s)},
        "float_with_infinity": {"attn_mask": torch.randn(b, 1, n, s).masked_fill(~full[:, :1], -torch.inf)},
        "keys_only": {"attn_mask": torch.randn(s)},
    }
