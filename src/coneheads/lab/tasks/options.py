"""What each task can be told (``--task.FLAG``), and the recipe it is trained with by default. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from coneheads.lab.config import Config, WrongUse, option


@dataclass(frozen=True)
class TaskOptions(Config):
    """Base of the options of a task. The first line of a docstring is the task's line in ``coneheads list``."""

    name: ClassVar[str] = ""
    task_class: ClassVar[str] = ""
    #: what this task changes in the defaults of other flags, by their full names
    recipe: ClassVar[Mapping[str, Any]] = {}


@dataclass(frozen=True)
class KinOptions(TaskOptions):
    """Nearest kin: of a set of members of a taxonomy, find the one with the deepest common ancestor."""

    name: ClassVar = "kin"
    task_class: ClassVar = "Kin"
    recipe: ClassVar = {"model.depth": 1, "model.heads": 1, "model.qk_dim": 4, "train.steps": 700, "train.lr": 0.01}

    taxonomy: str = option("balanced", "balanced, random, or a file of lines child<TAB>parent")
    branching: int = option(4, "children of a node, of a balanced taxonomy", least=2)
    depth: int = option(5, "levels below the root, of a balanced taxonomy", least=1)
    nodes: int = option(1500, "of a random taxonomy", least=3)
    members: str = option("leaves", "which nodes may be drawn: leaves or all", choices=("leaves", "all"))
    set_size: int = option(16, "members in a set, the nearest kin among them", least=2)
    values: int = option(10, "different values that a member can carry", least=2)
    examples: int = option(4096, "examples of the validation set, and of the test set", least=1)
    seed: int = option(0, "of the taxonomy if it is random, and of the validation and test sets", least=0)


@dataclass(frozen=True)
class TreeOptions(TaskOptions):
    """Leaves of a probabilistic tree grammar: find the root, or a masked leaf, beside the exact optimum."""

    name: ClassVar = "tree"
    task_class: ClassVar = "Tree"
    recipe: ClassVar = {"model.depth": 2, "train.steps": 1500, "train.batch": 128, "train.lr": 3e-3}
    most_leaves: ClassVar = 4096

    objective: str = option("root", "what to find: root, or leaf (those that are masked)", choices=("root", "leaf"))
    depth: int = option(4, "levels below the root", least=1)
    branching: int = option(2, "children of a node", least=2)
    symbols: int = option(8, "different symbols of a node", least=2)
    noise: float = option(0.3, "0: a child is a function of its parent; the larger, the less it depends on it", least=0)
    masked: float = option(0.15, "share of the leaves that is masked, of objective leaf; one at least", least=0)
    examples: int = option(4096, "examples of the validation set, and of the test set", least=1)
    seed: int = option(0, "of the grammar, and of the validation and test sets", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masked > 1:
            raise WrongUse(f"--task.masked: is a share of the leaves, at most 1; got {self.masked:g}")
        if self.branching**self.depth > self.most_leaves:
            raise WrongUse(
                f"--task.depth: a tree of {self.branching}^{self.depth} leaves is too large; at most {self.most_leaves}"
            )


@dataclass(frozen=True)
class ListOpsOptions(TaskOptions):
    """Nested lists of MIN, MAX, MED and SM over digits, as in the Long Range Arena: find the value."""

    name: ClassVar = "listops"
    task_class: ClassVar = "ListOps"
    recipe: ClassVar = {"model.depth": 2, "train.steps": 1500, "train.batch": 64, "train.lr": 2e-3}

    min_length: int = option(8, "tokens of the shortest expression", least=4)
    max_length: int = option(64, "tokens of the longest expression", least=4)
    max_depth: int = option(5, "levels of the deepest expression, the root and the digits among them", least=2)
    max_args: int = option(10, "most arguments of an operator; the fewest are 2", least=2)
    p_operator: float = option(0.25, "probability that a node is an operator", least=0)
    deep_depth: int | None = option(
        None, "levels of the deepest expression of the set `deeper`, all above max_depth; null: 3 more", least=3
    )
    long_length: int = option(
        128, "tokens of the longest expression of the set `longer`, all above max_length", least=5
    )
    examples_train: int = option(20_000, "expressions of the training set", least=1)
    examples: int = option(1000, "expressions of each other set", least=1)
    seed: int = option(0, "of all sets", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_length > self.max_length:
            raise WrongUse(
                f"--task.min_length: must be at most --task.max_length ({self.max_length}); got {self.min_length}"
            )
        if self.long_length <= self.max_length:
            raise WrongUse(
                f"--task.long_length: must exceed --task.max_length ({self.max_length}); got {self.long_length}"
            )
        if self.deep_depth is not None and self.deep_depth <= self.max_depth:
            raise WrongUse(f"--task.deep_depth: must exceed --task.max_depth ({self.max_depth}); got {self.deep_depth}")
        if self.p_operator > 1:
            raise WrongUse(f"--task.p_operator: is a probability, at most 1; got {self.p_operator:g}")
