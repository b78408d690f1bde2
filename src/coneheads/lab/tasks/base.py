"""What a task is: batches to train on, batches to measure on, and what could be achieved.

A training batch is a function of (options, seed, step) and of nothing else. So a run that was killed goes on from its
step, and two processes that share a batch see the batch that one process would see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.tasks.options import TaskOptions

#: numbers that keep the random streams of one seed apart
TRAINING, VALID, TEST, WORLD, EXTRA = range(5)


@dataclass(frozen=True)
class Batch:
    """Examples: what the model is called with, what it should say, and how much each answer counts.

    inputs: keyword arguments of the model, each [B, ...]. targets [B] or [B, L], of classes. weights: of that shape, 0
    where nothing is asked.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: slice) -> Batch:
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        return Batch(inputs, self.targets[rows], self.weights[rows])

    def to(self, device: torch.device | str) -> Batch:
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Batch(inputs, self.targets.to(device), self.weights.to(device))


@dataclass(frozen=True)
class Example:
    """One example to look at: a batch of one, and a word for every query and key of its attention maps.

    answer: the key that holds the answer, if it is one.
    """

    batch: Batch
    queries: list[str]
    keys: list[str]
    caption: str = ""
    answer: int | None = None


class Task(ABC):
    """Base of the tasks. ``seed`` is that of the run: of its training batches; the world has a seed of its own."""

    #: the metric that early stopping, the best checkpoint and the tables go by; higher is better
    headline: ClassVar[str] = "accuracy"
    #: where a task can be measured; a run ends with all of them but the first, which guides training
    splits: ClassVar[tuple[str, ...]] = ("valid", "test")

    def __init__(self, options: TaskOptions, seed: int) -> None:
        self.options, self.seed = options, seed

    @abstractmethod
    def model(self, options: ModelOptions) -> nn.Module:
        """A new model, initialised by torch's global generator. It is called as ``model(**batch.inputs)``."""

    @abstractmethod
    def train_batch(self, step: int, size: int) -> Batch:
        """The whole batch of a step, the same whenever it is asked for."""

    @abstractmethod
    def batches(self, split: str, size: int) -> Iterator[Batch]:
        """The examples of a split, always the same ones."""

    @abstractmethod
    def example(self) -> Example | None:
        """An example of the test set on which to look at attention; None if it is not attention of all to all."""

    def optimum(self) -> dict[str, float]:
        """The best that any model can reach on the test set, by the name of the metric; empty if it is not known."""
        return {}

    def chance(self) -> float | None:
        """The headline metric of a guess, if it is known."""
        return None

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss of every target, of the shape of the targets. outputs [B, C] or [B, L, C] are logits."""
        flat = nn.functional.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten(), reduction="none")
        return flat.view_as(batch.targets)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Per target what is averaged, with the batch's weights, into the metrics of a split (beside ``loss``)."""
        return {"accuracy": (outputs.argmax(-1) == batch.targets).to(batch.weights)}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a split, from the averages of what ``metrics`` gives."""
        return metrics


def mixed(*numbers: int) -> int:
    """A seed for every tuple of numbers, such as (seed, TRAINING, step); neighbouring numbers give unrelated ones."""
    state = 0
    for number in numbers:  # SplitMix64
        state = ((state ^ number) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63


def generator(*numbers: int) -> torch.Generator:
    """A random stream of its own for every tuple of numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


def in_parts(batch: Batch, size: int) -> Iterator[Batch]:
    """A batch as batches of at most this size."""
    for start in range(0, len(batch), size):
        yield batch[start : start + size]
