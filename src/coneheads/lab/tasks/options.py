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
    #: the file in tasks/ that has the class; empty: that of the name
    module: ClassVar[str] = ""
    #: whether its models attend on the edges of a graph, and so take the score "concatenation"
    on_edges: ClassVar[bool] = False
    #: what the paper reports of the headline metric, by score
    published: ClassVar[Mapping[str, float]] = {}
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


GAT_SCORES = ("concatenation", "dot", "penumbral", "umbral", "half_space", "hyperboloid", "laplacian")
#: of graph attention networks, in the paper and here: one choice for all scores
GAT_RECIPE = {
    "scores": GAT_SCORES,
    "model.start": "paper",
    "train.optimizer": "adam",
    "train.lr": 0.005,
    "train.warmup": 0,
    "train.decay": "constant",
    "train.beta2": 0.999,
    "train.clip": None,
}
PLANETOID_RECIPE = GAT_RECIPE | {
    "sizes": (8,),
    "model.depth": 2,
    "model.heads": 8,
    "model.qk_dim": 8,
    "model.dropout": 0.6,
    "train.steps": 2000,
    "train.weight_decay": 5e-4,
    "train.eval_every": 1,
    "train.save_every": 2000,
    "train.patience": 100,
    "train.best": "metric and loss",
}


@dataclass(frozen=True)
class CoraOptions(TaskOptions):
    """Cora: the subject of a paper from its words and its citations, by graph attention."""

    name: ClassVar = "cora"
    task_class: ClassVar = "Planetoid"
    module: ClassVar = "planetoid"
    on_edges: ClassVar = True
    #: the name in the files
    files: ClassVar[str] = "Cora"
    recipe: ClassVar = PLANETOID_RECIPE | {"train.batch": 140}
    published: ClassVar = {
        "concatenation": 0.831, "dot": 0.834, "penumbral": 0.835, "umbral": 0.836, "half_space": 0.834,
        "hyperboloid": 0.13, "laplacian": 0.823,
    }  # fmt: skip

    root: str = option("data", "folder with Cora/raw/ind.cora.x and so on, or with raw/; nothing is downloaded")


@dataclass(frozen=True)
class CiteSeerOptions(CoraOptions):
    """CiteSeer: as Cora, with six classes; not in the paper."""

    name: ClassVar = "citeseer"
    files: ClassVar = "CiteSeer"
    recipe: ClassVar = PLANETOID_RECIPE | {"train.batch": 120}
    published: ClassVar = {}

    root: str = option("data", "folder with CiteSeer/raw/ind.citeseer.x and so on, or with raw/; nothing is downloaded")


@dataclass(frozen=True)
class PubMedOptions(CoraOptions):
    """PubMed: as Cora, with three classes; not in the paper."""

    name: ClassVar = "pubmed"
    files: ClassVar = "PubMed"
    recipe: ClassVar = PLANETOID_RECIPE | {"train.batch": 60}
    published: ClassVar = {}

    root: str = option("data", "folder with PubMed/raw/ind.pubmed.x and so on, or with raw/; nothing is downloaded")


@dataclass(frozen=True)
class PPIOptions(TaskOptions):
    """PPI: the functions of proteins in graphs of interactions that a model has not seen, by graph attention."""

    name: ClassVar = "ppi"
    task_class: ClassVar = "PPI"
    on_edges: ClassVar = True
    recipe: ClassVar = GAT_RECIPE | {
        "sizes": (64,),
        "model.depth": 3,
        "model.heads": 4,
        "model.qk_dim": 64,
        "train.steps": 2000,
        "train.batch": 2,
        "train.eval_every": 10,
        "train.patience": 100,
        "train.best": "metric and loss",
    }
    published: ClassVar = {
        "concatenation": 0.977, "dot": 0.985, "penumbral": 0.990, "umbral": 0.989, "half_space": 0.987,
        "hyperboloid": 0.989, "laplacian": 0.986,
    }  # fmt: skip

    root: str = option("data", "folder with PPI/raw/train_graph.json and so on, or with raw/; nothing is downloaded")
