"""What a trained model attends to: how sharp its heads are, and what their cones make of the tokens.

It listens to the scores of a model while it answers one batch of the test set, and while it answers the task's example.
Everything in the result can be written as JSON.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coneheads import _checks
from coneheads.backends.inputs import compute_dtype
from coneheads.functional import attention_weights
from coneheads.geometry.cone_levels import lca_level
from coneheads.geometry.primitives import angle_from_chord_sq
from coneheads.lab.tasks.base import Batch, Task
from coneheads.nn import ConeAttention
from coneheads.scores import FinitePenumbral, FiniteUmbral, Penumbral, Score, Umbral

EXAMPLES = 256
QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # per cent
# Weights that are held at once, in elements.
BLOCK = 1 << 23
Cone = Penumbral | Umbral | FinitePenumbral | FiniteUmbral


@dataclass(frozen=True)
class Call:
    """What one attention layer was called with. visible [B, H, L, S]: which key a query may attend to."""

    layer: str
    query: Tensor  # [B, H, L, E]
    key: Tensor  # [B, H, S, E]
    visible: Tensor
    score: Score

    def parts(self) -> Iterator[Call]:
        """The call in parts of the batch that fit into memory."""
        step = max(1, BLOCK // max(1, self.visible[0].numel()))
        for start in range(0, len(self.query), step):
            rows = slice(start, start + step)
            yield Call(self.layer, self.query[rows], self.key[rows], self.visible[rows], self.score)

    def weights(self) -> Tensor:
        """What the queries give to the keys, [B, H, L, S]."""
        return attention_weights(self.query, self.key, self.visible, score=self.score)


@dataclass(frozen=True)
class ConePoints:
    """The queries and keys of a call as points: positions [B, H, L, P] and levels [B, H, L]."""

    q: Tensor
    q_level: Tensor
    k: Tensor
    k_level: Tensor
    cone: Cone  # its fields numbers or tensors [H, 1, 1]

    @property
    def distance(self) -> Tensor:
        """D of every pair [B, H, L, S]: of positions, or the angle of directions if the light is at the origin."""
        found = torch.cdist(self.q, self.k, compute_mode="donot_use_mm_for_euclid_dist")
        return angle_from_chord_sq(found.square()) if isinstance(self.cone, FinitePenumbral | FiniteUmbral) else found

    def have_common_ancestor(self) -> Tensor:
        """Which pairs do [B, H, L, S]: those whose lowest common ancestor lies at or below the light."""
        level = lca_level(self.q_level[..., :, None], self.k_level[..., None, :], self.distance)
        return level <= _level_of_light(self.cone)

    def are_related(self) -> Tensor:
        """Of which pairs one is an ancestor of the other, [B, H, L, S]."""
        return self.distance <= (self.q_level[..., :, None] - self.k_level[..., None, :]).abs()


def cone_points(call: Call) -> ConePoints | None:
    """Where a call's tokens lie; None if its score has no cones."""
    if not isinstance(call.score, Cone):
        return None
    lead = tuple(call.query.shape[:2])
    dtype = compute_dtype(call.query.dtype)
    fields = call.score.parameters().items()
    tensors = {
        name: _checks.per_head(name, value, call.query, lead) for name, value in fields if torch.is_tensor(value)
    }
    cone = call.score.with_parameters({name: value.to(dtype) for name, value in tensors.items()})
    return ConePoints(*cone.points(call.query.to(dtype)), *cone.points(call.key.to(dtype)), cone)


def _level_of_light(cone: Cone) -> Tensor | float:
    if isinstance(cone, Penumbral):
        return cone.light_height
    return {Umbral: math.inf, FinitePenumbral: 0.0, FiniteUmbral: math.pi / 2}[type(cone)]


@contextlib.contextmanager
def listening(model: nn.Module) -> Iterator[list[Call]]:
    """A list that fills with the calls of the model's attention layers while the ``with`` lasts."""
    calls: list[Call] = []

    def listener(name: str) -> Any:
        def note(module: ConeAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            query, key, mask = given["query"].detach(), given["key"].detach(), given.get("attn_mask")
            shape = (*query.shape[:-1], key.shape[-2])
            visible = (torch.ones((), dtype=torch.bool, device=query.device) if mask is None else mask).expand(shape)
            calls.append(Call(name, query, key, visible, module.score()))

        return note

    handles = [
        module.register_forward_pre_hook(listener(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, ConeAttention)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def hear(model: nn.Module, batch: Batch) -> list[Call]:
    """The calls of the model's attention layers, in their order, while it answers a batch. The model stays as it is."""
    training = model.training
    parameter = next(model.parameters(), None)
    if parameter is not None:
        batch = batch.to(parameter.device)
    try:
        with torch.no_grad(), listening(model) as calls:
            model.eval()(**batch.inputs)
    finally:
        model.train(training)
    return calls


@torch.no_grad()
def observe(model: nn.Module, task: Task) -> dict[str, Any]:
    """What each layer and head of the model does on 256 examples of the test set, and its weights on the example.

    ``layers``: for each layer its name, its score and its heads (see ``describe``). ``example``: its words and caption,
    the key that holds the answer, and ``maps`` [layer][head][query][key]. Empty if the task has no example.
    """
    example = task.example()
    if example is None:
        return {}
    batch = next(iter(task.batches("test", EXAMPLES)))[:EXAMPLES]
    maps = [call.weights()[0].double().round(decimals=4).tolist() for call in hear(model, example.batch)]
    return {
        "examples": len(batch),
        "quantiles": list(QUANTILES),
        "layers": [describe(call) for call in hear(model, batch)],
        "example": {
            "queries": example.queries,
            "keys": example.keys,
            "caption": example.caption,
            "answer": example.answer,
            "maps": maps,
        },
    }


def describe(call: Call) -> dict[str, Any]:
    """The heads of a layer: sharpness, the numbers of its score, and what its cones say of visible pairs.

    entropy: of the weights, in nats, mean over queries; relative_entropy: as a share of that of equal weights.
    common_ancestor, related: shares of visible pairs. query_levels, key_levels: quantiles. None without cones.
    """
    entropy, relative, common, related = Shares(), Shares(), Shares(), Shares()
    q_levels, k_levels = Levels(), Levels()
    for part in call.parts():
        visible = part.visible & _real_queries(part.visible)[..., None]
        seen = visible.sum(-1)  # [B, H, L]
        nats = torch.special.entr(part.weights().double().masked_fill(~visible, 0)).sum(-1)
        entropy.add(nats, seen > 0)
        relative.add(nats / seen.clamp_min(2).log(), seen > 1)
        if points := cone_points(part):
            common.add(points.have_common_ancestor(), visible)
            related.add(points.are_related(), visible)
            q_levels.add(points.q_level, seen > 0)
            k_levels.add(points.k_level, visible.any(-2))
    values = {name: value for name, value in call.score.parameters().items() if value is not None}
    heads = [
        {
            "parameters": {name: of_head(value, head) for name, value in values.items()},
            "entropy": entropy.of_head(head),
            "relative_entropy": relative.of_head(head),
            "common_ancestor": common.of_head(head),
            "related": related.of_head(head),
            "query_levels": q_levels.quantiles(head),
            "key_levels": k_levels.quantiles(head),
        }
        for head in range(call.query.shape[1])
    ]
    return {"name": call.layer, "score": call.score.name, "heads": heads}


class Shares:
    """The mean of values for each head, over those that count, as they come in parts."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count: Tensor | None = None

    def add(self, values: Tensor, counts: Tensor) -> None:
        """values and counts (boolean): [B, H, ...]."""
        rest = tuple(i for i in range(values.dim()) if i != 1)
        total, count = values.double().masked_fill(~counts, 0).sum(rest), counts.sum(rest)
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    def of_head(self, head: int) -> float | None:
        """None if there was nothing, or not a number."""
        if self.total is None or self.count is None or not self.count[head]:
            return None
        mean = float(self.total[head] / self.count[head])
        return mean if math.isfinite(mean) else None


class Levels:
    """The levels of points for each head, as they come in parts."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, levels: Tensor, counts: Tensor) -> None:
        """levels and counts (boolean): [B, H, L]."""
        self.parts.append((levels, counts))

    def quantiles(self, head: int) -> list[float] | None:
        """The levels at QUANTILES; None if there are none, or not all are numbers."""
        if not self.parts:
            return None
        values = torch.cat([levels[:, head][counts[:, head]] for levels, counts in self.parts]).double()
        if not len(values) or not values.isfinite().all():
            return None
        ordered = values.sort().values  # torch.quantile refuses more than 16 million values
        return [float(ordered[round(share / 100 * (len(ordered) - 1))]) for share in QUANTILES]


def _real_queries(visible: Tensor) -> Tensor:
    """Which queries count, [B, H, L]: in self-attention not those that no query sees, which are padding."""
    if visible.shape[-2] == visible.shape[-1]:
        return visible.any(-2)
    return torch.ones_like(visible[..., 0])


def of_head(value: float | Tensor, head: int) -> float:
    """What a field of a score is for a head: it is a number, or a tensor of one value or one a head."""
    if not isinstance(value, Tensor):
        return float(value)
    flat = value.detach().flatten()
    return float(flat[head] if len(flat) > 1 else flat[0])
