"""What each task can be told (``--task.FLAG``), and the recipe it is trained with unless told otherwise. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from coneheads.lab.config import Config, option


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
    recipe: ClassVar = {}

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
    recipe: ClassVar = {}


@dataclass(frozen=True)
class ListOpsOptions(TaskOptions):
    """Nested lists of MIN, MAX, MED and SM over digits, as in the Long Range Arena: find the value."""

    name: ClassVar = "listops"
    task_class: ClassVar = "ListOps"
    recipe: ClassVar = {}
