"""Taxonomies: balanced, random, or read from a file; and how deep any two of their members are related."""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coneheads.lab.config import WrongUse
from coneheads.lab.tasks.options import KinOptions

# a member more costs a row and a column of the table of kinship
MOST_MEMBERS = 8192
Edges = list[tuple[str, str]]  # child, parent
Parents = dict[str, dict[str, None]]  # an ordered set for every node: numbers of members must not depend on hashes


@dataclass(frozen=True)
class Taxonomy:
    """The members of a taxonomy, and the depth of the lowest common ancestor of every two, [M, M]."""

    members: list[str]
    kinship: Tensor


def from_options(options: KinOptions, source: torch.Generator) -> Taxonomy:
    if options.taxonomy == "balanced":
        leaves = options.branching**options.depth
        if leaves > MOST_MEMBERS:
            raise WrongUse(
                f"--task.depth: {options.branching}^{options.depth} = {leaves} leaves, more than the {MOST_MEMBERS} "
                "that fit; take fewer levels or branches"
            )
        edges = balanced(options.branching, options.depth)
    elif options.taxonomy == "random":
        edges = random(options.nodes, source)
    else:
        edges = read_edges(Path(options.taxonomy))
    return from_edges(edges, leaves_only=options.members == "leaves", origin=options.taxonomy)


def balanced(branching: int, depth: int) -> Edges:
    """A node is named by its way from the root: ``0.2.1`` is the second child of ``0.2``."""
    edges: Edges = []
    above = ["root"]
    for level in range(depth):
        below = []
        for parent in above:
            children = [f"{parent}.{i}" if level else str(i) for i in range(branching)]
            edges += [(child, parent) for child in children]
            below += children
        above = below
    return edges


def random(nodes: int, source: torch.Generator) -> Edges:
    """Every node hangs below an earlier one, any with equal chance: a random recursive tree."""
    draws = torch.rand(nodes - 1, generator=source).tolist()
    return [(str(i), str(int(draw * i))) for i, draw in enumerate(draws, 1)]


def read_edges(path: Path) -> Edges:
    """Lines ``child<TAB>parent``; empty lines, lines that begin with # and a node above itself are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WrongUse(
            f"--task.taxonomy: cannot read {str(path)!r} ({reason}); expected 'balanced', 'random' or a text file of "
            "lines child<TAB>parent"
        ) from None
    edges: Edges = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            raise WrongUse(f"--task.taxonomy: {path}, line {number}: expected child<TAB>parent; got {line!r}")
        if fields[0] != fields[1]:
            edges.append((fields[0], fields[1]))
    if not edges:
        raise WrongUse(f"--task.taxonomy: {path} has no edge; expected lines child<TAB>parent")
    return edges


def from_edges(edges: Iterable[tuple[str, str]], *, leaves_only: bool, origin: str = "the taxonomy") -> Taxonomy:
    """The taxonomy of edges child -> parent, which may name all ancestors (a transitive closure), not parents alone.

    There must be one root and no cycle. A node may have several parents, as in WordNet. The depth of a node is the
    longest way from the root, and two nodes are as closely related as the deepest ancestor they share; a node counts
    among its own ancestors.
    """
    parents: Parents = {}
    for child, parent in edges:
        parents.setdefault(child, {})[parent] = None
        parents.setdefault(parent, {})
    try:
        order = list(graphlib.TopologicalSorter(parents).static_order())  # ancestors before descendants
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise WrongUse(f"--task.taxonomy: {origin} has a cycle: {cycle}; a node cannot be its own ancestor") from None
    roots = [node for node in order if not parents[node]]
    if len(roots) > 1:
        some = ", ".join(roots[:5]) + (", ..." if len(roots) > 5 else "")
        raise WrongUse(
            f"--task.taxonomy: {origin} has {len(roots)} roots ({some}); expected one: add a node above them"
        )
    has_children = Counter(parent for above in parents.values() for parent in above)
    members = [node for node in order if not (leaves_only and has_children[node])]
    if len(members) > MOST_MEMBERS:
        raise WrongUse(
            f"--task.taxonomy: {origin} has {len(members)} members, more than the {MOST_MEMBERS} that fit; "
            "take a part of it" + ("" if leaves_only else " or --task.members leaves")
        )
    depth: dict[str, int] = {}
    for node in order:
        depth[node] = max((depth[parent] + 1 for parent in parents[node]), default=0)
    return Taxonomy(members, _kinship(order, members, parents, depth))


def _kinship(order: list[str], members: list[str], parents: Parents, depth: dict[str, int]) -> Tensor:
    below: dict[str, set[int]] = {node: set() for node in order}  # the members at or below a node
    for number, node in enumerate(members):
        below[node].add(number)
    for node in reversed(order):
        for parent in parents[node]:
            below[parent] |= below[node]
    kinship = torch.zeros(len(members), len(members), dtype=torch.int16)
    for node in sorted(order, key=depth.__getitem__):  # deeper ones later: they overwrite
        inside = torch.tensor(sorted(below[node]), dtype=torch.long)
        if depth[node] and len(inside) > 1:
            kinship[inside.unsqueeze(1), inside] = depth[node]
    for number, node in enumerate(members):
        kinship[number, number] = depth[node]
    return kinship
