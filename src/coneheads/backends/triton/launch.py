"""Arguments for the Triton kernels, and their start. What is done once a token or a head is done here, in PyTorch."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from coneheads.backends.ops import FusedGradients, FusedInputs, Wanted
from coneheads.backends.triton import backward as backward_kernels
from coneheads.backends.triton import constants, interpreted, number_of, scores, sums
from coneheads.backends.triton.blocks import declared_blocks, tuned
from coneheads.backends.triton.forward import forward as forward_kernel
from coneheads.scores import HalfSpaceDistance, HyperboloidDistance, Penumbral, Umbral

LN_2 = math.log(2)
# Positions of so few coordinates have many near pairs: all their distances are computed directly.
FEW_COORDINATES = 8
ALIGNED = 16  # coordinates of other positions are padded to a multiple of it
OFF_CENTRE = 4  # times the variance of queries; a mean with a smaller square may be that of some that are far off alone
# This share of |a|^2 may be rounding and nothing else: half precision, whose positions are no more exact, takes it off,
# so that the distance of a point to itself is 0.
NOISE = 4e-6
Q_AUX = 7  # its place among the tensors of a call
# Rows of so few keys cost little to sum once more, which makes their gradients exact: see `backward_rows`.
FEW_KEYS = 64


@functools.lru_cache
def generation(device: torch.device) -> int:
    """Of the tensor cores: 9 as in sm_90; 10 as in sm_100, where they sum in a memory of their own; else 8 as in sm_80.

    (Those of sm_120 are as the first.)
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 8
    major = torch.cuda.get_device_capability(device)[0]
    return major if major in (9, 10) else 8


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _as_tf32(tensor: Tensor) -> Tensor:
    """float32 rounded to the 10 bits of tf32, so that squares and products are of the same positions."""
    rounded = ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return rounded.where(tensor.isfinite(), tensor)  # the NaN of a GPU would become -0


def _contiguous(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return tensor.to(dtype).contiguous()


class Call:
    """One call as the kernels take it: tensors in their order, then numbers, then what is compiled in.

    marked: whether bad keys make NaN of what attends to them, as in forward.
    """

    def __init__(self, inputs: FusedInputs, *, marked: bool) -> None:
        score, (q, q_level, k, k_level) = inputs.score, inputs.points
        self.inputs, self.score = inputs, score
        self.dtype = inputs.value.dtype
        self.batch, self.heads, self.length, coordinates = q.shape
        self.product = score.measures == "product"
        self.direct = score.measures != "product" and coordinates <= FEW_COORDINATES
        self.sums = self._measure() == "bounded"
        self.positions = coordinates if self.direct else -(-coordinates // ALIGNED) * ALIGNED
        if self.sums:  # whole tiles
            self.positions = _padded(coordinates)
        self.ones = score.measures != "product" and self.positions > coordinates
        self.kv_heads, self.keys = k.shape[1:3]
        self.values = inputs.value.shape[-1]
        number = number_of(score)
        assert number is not None
        self.number = number
        group = self.heads // self.kv_heads
        precision = "tf32" if self.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
        # float16 has no room for every position and gradient: they are multiplied as tf32, which has as many digits.
        self.round = {torch.float16: "tf32", torch.bfloat16: "bf16"}.get(self.dtype, precision)
        self.scaled = self.sums and inputs.fixed and number in (scores.PENUMBRAL.value, scores.UMBRAL.value)
        if self.scaled and q_level is not None and k_level is not None:
            q, q_level, k, k_level = (self._scaled(t) for t in (q, q_level, k, k_level))
        if self.sums and isinstance(score, Penumbral) and q_level is not None and k_level is not None:
            q_level, k_level = (sums.with_16_bits(level, self._light_height()) for level in (q_level, k_level))
        q, k = self._stored(q, k, group)
        ends = (self.length, self.keys)
        q_sq, k_sq = (t[..., :n, :coordinates].float().square().sum(-1) for t, n in zip((q, k), ends, strict=True))
        q_sq = q_sq / 4  # in memory are -2 q
        self.q_norm: Tensor | None = None
        if isinstance(score, Umbral) and score.readout == "height" and not self.sums:
            self.q_norm = q[..., :coordinates].double().norm(dim=-1) / 2
        self.mark = torch.zeros_like(k_sq)
        if inputs.bad is not None:  # makes NaN of every row that attends to it
            self.mark = self.mark.masked_fill(inputs.bad, torch.nan)
        none = q_sq.new_ones(())
        levels = [none, none] if q_level is None or k_level is None else [_contiguous(q_level), _contiguous(k_level)]
        auxs = [_contiguous(self._aux(level)) for level in levels]
        if q_level is None:  # the kernels read a level for every token
            levels = [torch.ones_like(q_sq), torch.ones_like(k_sq)]
        if auxs[0].shape != q_sq.shape:
            auxs = [torch.ones_like(q_sq), torch.ones_like(k_sq)]
        if self.q_norm is not None:
            auxs[0] = torch.zeros_like(q_sq)  # no row is close so far: see `umbral_relative` in scores.py
        mask = inputs.mask
        self.masked = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "float"
        if mask is None:
            mask = q_sq.new_zeros((1, 1, 1, 1))
        elif mask.dtype == torch.float64:
            mask = mask.float()
        self.mask_shape = mask.shape
        self.strides = tuple(0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True))
        seed = inputs.seed if inputs.seed is not None else torch.zeros((), dtype=torch.int64, device=q.device)
        value = self.whole(_contiguous(inputs.value, self.dtype))
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        (q_parts, q_sides), (k_parts, k_sides) = (none, none), (none, none)
        if self.sums:
            k_level = levels[1] + self.mark if self.scaled and marked else levels[1]
            q_parts, q_sides = self._parts_and_sides(q_sq - q_sq * NOISE, levels[0], 1)
            k_parts, k_sides = self._parts_and_sides(k_sq, k_level, -1)
            k_sides = k_sides.mT.contiguous()  # see `load_side` in memory.py
        parts = (q_parts, k_parts, q_sides, k_sides)
        self.tensors = (
            q,
            k,
            value,
            q_sq,
            k_sq,
            *levels,
            *auxs,
            *parts,
            constants.of_heads(self.score, self.scaled, self.batch, self.heads),
            mask,
            seed,
        )
        sizes = (self.heads, group, self.length, self.keys, self.positions, coordinates, self.values)
        self.numbers = (*self.strides, *sizes, float(inputs.dropout_p))
        self.compiled: dict[str, Any] = {
            "SCORE": number,
            "MEASURE": self._measure(),
            "SUMS": self._where_to_sum(),
            "SCALED": self.scaled,
            "ONES": self.ones,
            "MASKED": self.masked,
            "CAUSAL": inputs.is_causal,
            "DROPOUT": inputs.seed is not None,
            "PRECISION": precision,
            "ROUND": self.round,
            "WIDEN": interpreted() and self.dtype != torch.float32,
            "LENGTH_CLASS": (min(self.length, 1 << 13) - 1).bit_length(),
            "DP": _padded(self.positions),
            "DV": _padded(self.values),
        }

    def _where_to_sum(self) -> int:
        """What the kernels call SUMS: see scores.py."""
        if not self.sums:
            return 0
        in_memory = generation(self.inputs.points.q.device) == 10
        return (scores.IN_TENSOR_MEMORY if in_memory else scores.IN_REGISTERS).value

    def _stored(self, q: Tensor, k: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Positions as products read them: in half precision where its range allows, else in float32.

        They are taken relative to the mean query where that is twice the spread of the queries; elsewhere not, so that
        the differences of near points stay exact. (To the mean key, masked-out ones would move it.)
        """
        if self.product:
            return _contiguous(self._aligned(q), self.dtype), _contiguous(self._aligned(k), self.dtype)
        if not self.direct and q.numel():
            grouped = q.unflatten(1, (-1, group))
            mean = grouped.mean((2, 3))[:, :, None]
            variance = grouped.var((2, 3), correction=0)[:, :, None]
            centre = mean.where(mean.square() > OFF_CENTRE * variance, 0)
            k, q = k - centre, q - centre.repeat_interleave(group, 1)
        dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        # A distance takes -2 q k: the factor is put into the positions of the queries.
        q, k = (_contiguous(self._aligned(t), dtype) for t in (-2 * q, k))
        q, k = self.whole(q), self.whole(k)
        return (_as_tf32(q), _as_tf32(k)) if self.round == "tf32" and not self.direct else (q, k)

    def whole(self, rows: Tensor, width: int | None = None) -> Tensor:
        """[B, H, L, N] in whole tiles, if the kernels read these. What is whole already stays as it is."""
        return sums.in_whole_tiles(rows, width or _padded(rows.shape[-1])) if self.sums else rows

    def _parts_and_sides(self, norm_sq: Tensor, level: Tensor, sign: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.score, Penumbral):
            return sums.of_penumbral(norm_sq, level, self._light_height())
        return sums.of_levels(norm_sq, level, sign, far=isinstance(self.score, Umbral))

    def _scaled(self, lengths: Tensor) -> Tensor:
        """In units in which the factor of scores.py is 1."""
        factor = constants.factor(self.score).float()
        return lengths * (factor[..., None] if lengths.dim() == 4 else factor)

    def _aligned(self, positions: Tensor) -> Tensor:
        """To whole vectors, which are loaded faster. What is added meets a 0 in products of a query and a key.

        For distances it starts with a 1, if there is room: the sum of gradients then comes with their product.
        """
        coordinates = positions.shape[-1]
        positions = pad(positions, (0, self.positions - coordinates))
        if self.ones:
            positions[..., coordinates] = 1
        return positions

    def _measure(self) -> str:
        """How pairs are measured: see `measure` in tiles.py."""
        if self.product:
            return "product"
        if self.direct:
            return "direct"
        return "exact" if self.dtype == torch.float32 else "bounded"

    def _aux(self, level: Tensor) -> Tensor:
        """One more number a token, made of its level once: see scores.py."""
        if isinstance(self.score, Penumbral):  # four times the squared height
            return (4 * level * (2 * self._light_height() - level)).float()
        if isinstance(self.score, HalfSpaceDistance):
            return level.rsqrt()
        return level.sinh() if isinstance(self.score, HyperboloidDistance) else level.new_ones(())

    def _light_height(self) -> Tensor:
        """Of a penumbral score, in the units of the lengths."""
        return constants.light_height(cast(Penumbral, self.score), self.scaled)

    def shared_scores(self, close: Tensor) -> Tensor | float:
        """What the kernels leave out of the scores of a query, float64 [B|1, H|1, L|1]: see scores.py.

        close [B, H, L]: for umbral cones in float32.
        """
        level = self.inputs.points.q_level
        if level is not None:
            more = level if self.q_norm is None else self.q_norm.masked_fill(close, 0)
            level = level.double() + more
        return constants.shared_score(self.score, level)

    def shared_slopes(self, lse: Tensor, grad_lse: Tensor) -> Tensor:
        """What the kernels leave out of the gradients of the levels of queries: those of their shared scores.

        The gradients of all scores of a query add up to that of its log-sum-exp, or to 0 if no key is seen.
        """
        seen = lse != -torch.inf
        total = grad_lse.where(seen & ~lse.isnan(), lse).where(seen, 0)  # a bad key makes NaN of it
        return (constants.shared_slope(self.score) * total).float()

    def without_shared_scores(self, lse: Tensor) -> Tensor:
        """The log-sum-exp of what the kernels compute. Of two ways to leave out, a row is given that of the smaller."""
        close = torch.zeros_like(lse, dtype=torch.bool)
        rest = lse - self.shared_scores(close)
        if self.q_norm is not None:
            if_close = lse - self.shared_scores(~close)
            close = if_close.abs() < rest.abs()
            rest = if_close.where(close, rest)
            self.tensors = (*self.tensors[:Q_AUX], close.float(), *self.tensors[Q_AUX + 1 :])
        return rest

    def launch(self, name: str, kernel: Any, tensors: tuple[Tensor, ...], programs: str, **compiled: Any) -> None:
        """Starts a kernel on the device and the current stream of its tensors.

        programs: what a program owns, "rows" of queries or "columns" of keys.
        """
        width = max(self.compiled["DP"], self.compiled["DV"])
        chosen_by = (name, self.number, width, self.dtype, generation(self.tensors[0].device))
        blocks = declared_blocks(*chosen_by)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            if programs == "rows":
                return (triton.cdiv(self.length, meta["BM"]) * self.batch * self.heads,)
            if programs == "columns":
                return (triton.cdiv(self.keys, meta["BN"]) * self.batch * self.kv_heads,)
            b, h, rows, columns = self.mask_shape
            return (b * h * triton.cdiv(rows, meta["BM"]) * triton.cdiv(columns, meta["BN"]),)

        more = compiled.pop("numbers", ())
        compiled = {**self.compiled, **compiled}
        arguments = (*self.tensors, *tensors, *self.numbers, *more)
        if interpreted() or torch.are_deterministic_algorithms_enabled():
            blocks = blocks[:1]
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if len(blocks) == 1:
                block = blocks[0]
                options = {} if interpreted() else block.options
                kernel[grid](*arguments, **compiled, BM=block.rows, BN=block.columns, **options)
            else:
                tuned(kernel, chosen_by)[grid](*arguments, **compiled)


def forward(inputs: FusedInputs) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, Ev] in float32 and log-sum-exp [B, H, L] in float64."""
    q = inputs.points.q
    out = q.new_zeros(*q.shape[:3], inputs.value.shape[-1])
    top, total = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])
    if not out.numel() or not inputs.points.k.shape[2]:
        return out, top.double()
    call = Call(inputs, marked=True)
    call.launch("forward", forward_kernel, (call.mark, out, top, total), "rows")
    lse = (top.double() + total.abs().double().log2()) * LN_2
    return out, lse + call.shared_scores(total < 0)


def backward(
    inputs: FusedInputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, wanted: Wanted
) -> FusedGradients:
    """See backward.py."""
    (q, q_level, k, k_level), value, mask = inputs.points, inputs.value, inputs.mask
    call = Call(inputs, marked=False)
    grads = [t.new_zeros(*t.shape[:3], call.positions) for t in (q, k)]
    levels = [q.new_zeros(t.shape[:3]) for t in (q, k)]
    grad_value = torch.zeros_like(value, dtype=torch.float32)
    grad_mask = None if mask is None or not wanted.mask else torch.zeros_like(mask, dtype=torch.float32)
    by_row = q.new_zeros(2, *q.shape[:3])
    if out.numel() and k.shape[2]:
        # In base 2, as float32 rounds it, and what is left.
        exact = call.without_shared_scores(lse).masked_fill(lse == -torch.inf, 0) / LN_2
        rounded = exact.float()
        exact_rows = call.dtype == torch.float32 or call.keys <= FEW_KEYS
        shift = grad_lse.float() if exact_rows else grad_lse.float() - (grad_out * out).sum(-1)
        by_query = (rounded, (exact - rounded).float(), shift)
        saved = (
            call.whole(_contiguous(grad_out, call.dtype)),
            *(call.whole(number.contiguous()[..., None], 1) for number in by_query),
        )
        # With sums, scores of forward and backward differ by more than what is left, but where rows are made exact.
        rests = exact_rows or not call.sums
        exactness = {"RESTS": rests, "EXACT": exact_rows}
        if exact_rows:
            call.launch("backward_rows", backward_kernels.backward_rows, saved, "rows", RESTS=rests)
        first, second = (name in wanted.parameters for name in (*inputs.score.pair_fields, None)[:2])
        call.launch(
            "backward_queries", backward_kernels.backward_queries, (*saved, grads[0], levels[0], by_row), "rows",
            FIRST=first, SECOND=second, **exactness,
        )  # fmt: skip
        if constants.shares_levels(inputs.score):
            levels[0] += call.shared_slopes(lse, grad_lse)
        of_keys = (grads[1], levels[1], grad_value)
        call.launch("backward_keys", backward_kernels.backward_keys, (*saved, *of_keys), "columns", **exactness)
        if grad_mask is not None:
            grad_mask = grad_mask.contiguous()
            call.launch(
                "backward_mask", backward_kernels.backward_mask, (*saved, grad_mask), "mask",
                numbers=(call.batch, *call.mask_shape), **exactness,
                ONE_ROW=mask is not None and mask.shape[2] == 1, ONE_COLUMN=mask is not None and mask.shape[3] == 1,
            )  # fmt: skip
    fields = dict(zip(inputs.score.pair_fields, by_row.sum(-1)[..., None, None], strict=False))
    parameters = {
        name: fields[name].sum_to_size(torch.as_tensor(getattr(inputs.score, name)).shape) for name in wanted.parameters
    }
    q_grad, k_grad = (grad[..., : q.shape[-1]] for grad in grads)
    return FusedGradients(
        q_grad,
        None if q_level is None else levels[0],
        k_grad,
        None if k_level is None else levels[1],
        parameters,
        _saturated(grad_value, value.dtype),
        None if grad_mask is None or mask is None else _saturated(grad_mask, mask.dtype),
    )


def _saturated(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype; a finite gradient that is too large for float16 becomes the largest that it has."""
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        grad = grad.clamp(-largest, largest)
    return grad.to(dtype)
