"""Block sizes of the Triton kernels: the default of each, and the few that are tried beside it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton

from coneheads.backends.triton import interpreted, memory, scores

REGISTERS = 1 << 16  # of a multiprocessor
MANY_PAIRS = 16  # of a thread in backward


class Blocks(NamedTuple):
    """How a kernel cuts its work: rows and columns of a tile, warps of a program, and loads under way at once."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def pairs(self) -> int:
        """Of a thread."""
        return self.rows * self.columns // (32 * self.warps)

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told. Left alone, it keeps registers free for a second program, and spills."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": min(255, REGISTERS // (32 * self.warps)),
        }

    def config(self) -> triton.Config:
        return triton.Config({"BM": self.rows, "BN": self.columns}, **self.options)


# What fits every GPU since sm_80 without a spill (make gpu-check), by kernel, and by whether it is float32 and how wide
# positions and values are at the most. float32 is multiplied without tensor cores, which takes more registers. Narrow
# tokens have more rows: in half precision, warps without rows of their own would compute those of others once more.
BLOCKS: dict[str, dict[tuple[bool, int], Blocks]] = {
    "forward": {
        (True, 64): Blocks(64, 64, 8, 1),
        (True, 128): Blocks(64, 64, 8, 1),
        (True, 256): Blocks(16, 16, 8, 1),
        (False, 64): Blocks(64, 64, 4, 2),
        (False, 128): Blocks(64, 32, 4, 2),
        (False, 256): Blocks(32, 32, 4, 1),
    },
    "backward_queries": {
        (True, 32): Blocks(32, 16, 4, 2),
        (True, 64): Blocks(32, 32, 8, 1),
        (True, 128): Blocks(16, 16, 8, 2),
        (True, 256): Blocks(16, 16, 8, 2),
        (False, 32): Blocks(64, 32, 4, 2),
        (False, 64): Blocks(32, 32, 4, 2),
        (False, 128): Blocks(32, 32, 4, 1),
        (False, 256): Blocks(16, 16, 8, 1),
    },
    "backward_keys": {
        (True, 32): Blocks(16, 32, 4, 1),
        (True, 64): Blocks(32, 32, 8, 1),
        (True, 128): Blocks(16, 16, 8, 1),
        (True, 256): Blocks(16, 16, 16, 1),
        (False, 32): Blocks(64, 32, 4, 2),
        (False, 64): Blocks(32, 32, 4, 2),
        (False, 128): Blocks(32, 32, 4, 1),
        (False, 256): Blocks(16, 16, 8, 1),
    },
}
# These hold less at once.
BLOCKS["backward_rows"] = {**BLOCKS["backward_queries"], (True, 64): Blocks(32, 32, 4, 1)}
BLOCKS["backward_mask"] = {
    **BLOCKS["backward_queries"],
    (True, 64): Blocks(32, 16, 8, 1),
    (False, 32): Blocks(16, 64, 8, 1),
    (False, 64): Blocks(16, 64, 8, 1),
    (False, 128): Blocks(16, 32, 8, 1),
}
PENUMBRAL, PENUMBRAL_SQ, PENUMBRAL_DISTANCE = (scores.PENUMBRAL.value + i for i in range(3))  # by read-out
UMBRAL = tuple(scores.UMBRAL.value + i for i in range(3))
HYPERBOLOID = scores.HYPERBOLOID.value  # the last
HALVES = (torch.float16, torch.bfloat16)
# What some scores have instead, by dtype. Angles, logarithms and hyperbolic functions take many registers, and would
# spill with the blocks above, and so would dot products, whose loop the compiler orders otherwise. Some cones have
# registers left, and what they do once a tile is done for twice as many pairs. float16 is multiplied as tf32 in places,
# which takes more instructions a tile.
BLOCKS_OF_SCORES: dict[tuple[str, int, torch.dtype, int], Blocks] = {
    ("forward", scores.DOT.value, torch.float32, 64): Blocks(32, 32, 4, 1),
    ("forward", scores.DOT.value, torch.float32, 128): Blocks(32, 32, 8, 1),
    ("backward_queries", scores.FINITE_CONE.value, torch.float32, 64): Blocks(32, 16, 8, 1),
    ("backward_keys", scores.FINITE_CONE.value, torch.float32, 64): Blocks(16, 32, 8, 1),
    ("backward_keys", PENUMBRAL_DISTANCE, torch.float32, 64): Blocks(16, 32, 8, 1),
    ("backward_keys", scores.DOT.value, torch.float16, 64): Blocks(64, 32, 4, 1),
}
for _dtype in HALVES:
    BLOCKS_OF_SCORES["backward_keys", HYPERBOLOID, _dtype, 128] = Blocks(16, 32, 4, 1)
for _score in UMBRAL:
    BLOCKS_OF_SCORES["backward_keys", _score, torch.float32, 64] = Blocks(16, 64, 8, 1)
for _score in UMBRAL[:2]:  # the logarithm takes more registers
    BLOCKS_OF_SCORES["backward_queries", _score, torch.float32, 64] = Blocks(32, 64, 8, 1)
for _score in (PENUMBRAL, PENUMBRAL_SQ, PENUMBRAL_DISTANCE, *UMBRAL):
    BLOCKS_OF_SCORES["backward_queries", _score, torch.bfloat16, 64] = Blocks(64, 32, 4, 2)
    _stages = 2 if _score == PENUMBRAL else 1
    BLOCKS_OF_SCORES["backward_keys", _score, torch.bfloat16, 64] = Blocks(64, 32, 4, _stages)
    if _score != PENUMBRAL_DISTANCE:
        _stages = 2 if _score in UMBRAL else 1
        BLOCKS_OF_SCORES["backward_queries", _score, torch.float16, 64] = Blocks(32, 64, 4, _stages)
        BLOCKS_OF_SCORES["backward_keys", _score, torch.float16, 64] = Blocks(64, 32, 4, 1)
BLOCKS_OF_SCORES["backward_mask", PENUMBRAL, torch.float16, 128] = Blocks(16, 64, 8, 2)
# And what they have on GPUs of other generations. Those of sm_90 multiply tiles of 64 by four warps together; those of
# sm_100 have a memory for sums of products, from which tiles of 64 rows are read into registers whole.
BLOCKS_OF_GPUS: dict[int, dict[tuple[str, int, torch.dtype, int], Blocks]] = {9: {}, 10: {}}
for _generation, _blocks in BLOCKS_OF_GPUS.items():
    for _score in (PENUMBRAL, PENUMBRAL_SQ, PENUMBRAL_DISTANCE):
        _blocks["backward_mask", _score, torch.float16, 128] = Blocks(16, 64, 8, 1)
    for _score, _dtype in itertools.product(range(HYPERBOLOID + 1), HALVES):
        _blocks["backward_keys", _score, _dtype, 32] = Blocks(32, 64, 4, 1 if _generation == 9 else 2)
    for _score in (PENUMBRAL, *UMBRAL):
        _blocks["backward_keys", _score, torch.float16, 64] = Blocks(32, 64, 4, 1)
    for _score in (scores.LAPLACIAN.value, PENUMBRAL_DISTANCE):  # rounded sums take a few registers more
        _blocks["backward_queries", _score, torch.float32, 64] = Blocks(32, 16, 8, 1)
    _blocks["backward_queries", scores.LAPLACIAN.value, torch.float32, 128] = Blocks(16, 16, 8, 1)
BLOCKS_OF_GPUS[9]["backward_keys", PENUMBRAL, torch.bfloat16, 64] = Blocks(64, 32, 4, 1)
for _score in (PENUMBRAL, PENUMBRAL_SQ):
    BLOCKS_OF_GPUS[9]["backward_keys", _score, torch.float16, 64] = Blocks(16, 128, 8, 1)
for _score in (PENUMBRAL, PENUMBRAL_SQ, *UMBRAL):
    _stages = 2 if _score == PENUMBRAL_SQ else 1
    BLOCKS_OF_GPUS[9]["backward_queries", _score, torch.float16, 64] = Blocks(64, 32, 4, _stages)
for _score in (PENUMBRAL, PENUMBRAL_SQ, PENUMBRAL_DISTANCE, *UMBRAL):
    BLOCKS_OF_GPUS[10]["backward_queries", _score, torch.bfloat16, 64] = Blocks(32, 64, 4, 2)
    BLOCKS_OF_GPUS[10]["backward_keys", _score, torch.bfloat16, 64] = Blocks(32, 64, 4, 2)
for _score in (PENUMBRAL, PENUMBRAL_SQ):
    BLOCKS_OF_GPUS[10]["backward_queries", _score, torch.float16, 64] = Blocks(32, 64, 4, 2)
for _score in UMBRAL:
    BLOCKS_OF_GPUS[10]["backward_queries", _score, torch.float16, 64] = Blocks(128, 32, 8, 1)
for _dtype in HALVES:
    BLOCKS_OF_GPUS[10]["backward_queries", HYPERBOLOID, _dtype, 32] = Blocks(64, 32, 4, 1)
BLOCKS_OF_GPUS[10]["backward_keys", HYPERBOLOID, torch.float32, 32] = Blocks(32, 16, 4, 1)
BLOCKS_OF_GPUS[10]["backward_keys", PENUMBRAL_SQ, torch.float16, 64] = Blocks(32, 64, 4, 1)
BLOCKS_OF_GPUS[10]["backward_keys", PENUMBRAL_DISTANCE, torch.float16, 64] = Blocks(16, 64, 4, 1)
IN_THE_INTERPRETER = Blocks(16, 16, 4, 1)  # small, so that small tensors make several tiles


def default_blocks(kernel: str, score: int, width: int, dtype: torch.dtype, generation: int = 8) -> Blocks:
    """What a kernel is started with where nothing is tried.

    score: its number in scores.py. width: the larger of positions and values, padded. generation: that of the GPU, as
    launch.py counts them.
    """
    if interpreted():
        return IN_THE_INTERPRETER
    single = dtype == torch.float32
    most, blocks = next(
        (most, blocks) for (of_single, most), blocks in BLOCKS[kernel].items() if of_single == single and width <= most
    )
    key = (kernel, score, dtype, most)
    return BLOCKS_OF_GPUS.get(generation, {}).get(key, BLOCKS_OF_SCORES.get(key, blocks))


def declared_blocks(kernel: str, score: int, width: int, dtype: torch.dtype, generation: int = 8) -> list[Blocks]:
    """The small set that is tried once for each class of shapes, score and dtype, the default first.

    On sm_90 the keys' kernel multiplies tiles of 64 columns and more by four warps together. With two stages, the
    compiler has the next queries copied to where such a product may still read the last ones: these have one.
    """
    blocks = _declared(kernel, score, width, dtype, generation)
    if kernel == "backward_keys" and generation == 9:
        blocks = [one._replace(stages=1) if one.columns >= 64 else one for one in blocks]
    return list(dict.fromkeys(blocks))


def _declared(kernel: str, score: int, width: int, dtype: torch.dtype, generation: int) -> list[Blocks]:
    default = default_blocks(kernel, score, width, dtype, generation)
    more_stages = default._replace(stages=default.stages + 1)
    if dtype == torch.float32 and default.pairs >= MANY_PAIRS:
        return [default, more_stages, default._replace(rows=32), Blocks(32, 32, 4, 1)]
    if dtype == torch.float32 and default.columns > default.rows:
        narrow = default._replace(columns=default.columns // 2)
        return [default, more_stages, narrow, narrow._replace(rows=2 * narrow.rows)]
    if kernel == "forward" or dtype == torch.float32:
        return [default, more_stages, default._replace(rows=2 * default.rows, warps=8), _wider(default)]
    # In half precision backward has few pairs a thread, and what is done once a tile counts as much as what is done a
    # pair: twice as many take up to a third fewer instructions each at E = 64, but more registers, of which a call with
    # masks and dropout may have too few.
    if default.pairs < MANY_PAIRS:
        return [default, more_stages, default._replace(rows=2 * default.rows), _wider(default)]
    turned = default._replace(rows=default.columns, columns=min(default.rows, 64), warps=4)
    return [default, more_stages, turned, default._replace(rows=32, columns=32, warps=4)]


def _wider(blocks: Blocks) -> Blocks:
    """With twice the columns, or with half of them if it has those of a whole tile in memory."""
    wide = 2 * blocks.columns
    return blocks._replace(columns=wide if wide <= memory.WHOLE.value else blocks.columns // 2)


# What a kernel reads and writes again: while blocks are tried, it runs many times, and each has to find what was there.
CHANGED = {"backward_rows": ["SHIFT", "REST"]}
_TUNED: dict[tuple[Any, ...], Any] = {}


def tuned(kernel: Any, chosen_by: tuple[str, int, int, torch.dtype, int]) -> Any:
    """The kernel that tries its declared blocks once for each class of shapes."""
    key = (kernel, *chosen_by)
    if key not in _TUNED:
        configs = [blocks.config() for blocks in declared_blocks(*chosen_by)]
        classes = ["SCORE", "MASKED", "CAUSAL", "DROPOUT", "PRECISION", "LENGTH_CLASS", "DP", "DV"]
        changed = CHANGED.get(chosen_by[0], [])
        _TUNED[key] = triton.autotune(configs=configs, key=classes, restore_value=changed)(kernel)
    return _TUNED[key]
