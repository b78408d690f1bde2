"""Taxonomies: how deep two members are related, and what a wrong edge list is told."""

import random

import pytest
import torch

from coneheads.lab.config import WrongUse
from coneheads.lab.tasks import taxonomy
from coneheads.lab.tasks.base import generator
from coneheads.lab.tasks.options import KinOptions

ANIMALS = [("cat", "mammal"), ("dog", "mammal"), ("owl", "bird"), ("mammal", "animal"), ("bird", "animal")]


def related(found, one, other):
    return int(found.kinship[found.members.index(one), found.members.index(other)])


def test_kinship_is_the_depth_of_the_lowest_common_ancestor():
    found = taxonomy.from_edges(ANIMALS, leaves_only=False)
    assert related(found, "cat", "dog") == 1
    assert related(found, "cat", "owl") == 0
    assert (
        related(found, "cat", "mammal") == 1
    )  # an ancestor is the lowest common ancestor of itself and its descendant
    assert related(found, "cat", "cat") == 2


def test_leaves_only_leaves_out_inner_nodes():
    assert sorted(taxonomy.from_edges(ANIMALS, leaves_only=True).members) == ["cat", "dog", "owl"]


def test_balanced_kinship_is_the_length_of_the_common_prefix():
    found = taxonomy.from_edges(taxonomy.balanced(3, 4), leaves_only=True)
    assert len(found.members) == 81
    for one, other in random.Random(0).choices([(a, b) for a in found.members for b in found.members], k=200):
        digits = list(zip(one.split("."), other.split("."), strict=True))
        prefix = next((i for i, (a, b) in enumerate(digits) if a != b), len(digits))
        assert related(found, one, other) == prefix


def test_a_transitive_closure_gives_the_same_taxonomy_as_its_parents():
    closure = [*ANIMALS, ("cat", "animal"), ("dog", "animal"), ("owl", "animal"), ("cat", "cat")]
    closed = taxonomy.from_edges([edge for edge in closure if edge[0] != edge[1]], leaves_only=True)
    plain = taxonomy.from_edges(ANIMALS, leaves_only=True)
    for one in plain.members:
        for other in plain.members:
            assert related(closed, one, other) == related(plain, one, other)


def test_a_node_with_two_parents_is_related_through_the_deeper_one():
    edges = [*ANIMALS, ("dog", "pet"), ("goldfish", "pet"), ("pet", "animal")]
    found = taxonomy.from_edges(edges, leaves_only=True)
    assert related(found, "dog", "cat") == 1
    assert related(found, "dog", "goldfish") == 1
    assert related(found, "cat", "goldfish") == 0


def test_random_taxonomy_is_a_tree_of_that_many_nodes_and_depends_on_the_seed():
    edges = taxonomy.random(200, generator(3))
    assert len({node for edge in edges for node in edge}) == 200
    assert len(edges) == 199
    assert edges == taxonomy.random(200, generator(3))
    assert edges != taxonomy.random(200, generator(4))
    assert len(taxonomy.from_edges(edges, leaves_only=False).members) == 200


def test_an_edge_list_is_read_with_comments_empty_lines_and_nodes_above_themselves(tmp_path):
    path = tmp_path / "edges.tsv"
    path.write_text("# made by hand\ncat\tmammal\n\ndog\tmammal\r\nmammal\tmammal\n")
    assert taxonomy.read_edges(path) == [("cat", "mammal"), ("dog", "mammal")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\tb\nb\tc\nc\ta\n", ["cycle", "->"]),
        ("a\tb\nc\td\n", ["2 roots", "b, d"]),
        ("a\tb\nc d\n", ["line 2", "child<TAB>parent", "c d"]),
        ("a\tb\tc\n", ["line 1"]),
        ("", ["no edge"]),
        ("a\t\n", ["line 1"]),
    ],
)
def test_a_wrong_edge_list_is_told_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "edges.tsv"
    path.write_text(text)
    with pytest.raises(WrongUse, match=r"--task\.taxonomy") as caught:
        taxonomy.from_options(KinOptions(taxonomy=str(path)), torch.Generator())
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path):
    for path, content in ((tmp_path / "none.tsv", None), (tmp_path / "binary.tsv", b"\xff\xfe\x00")):
        if content:
            path.write_bytes(content)
        with pytest.raises(WrongUse, match=path.name):
            taxonomy.read_edges(path)


def test_a_taxonomy_that_is_too_large_is_refused_at_once():
    with pytest.raises(WrongUse, match=r"10\^9 = 1000000000 leaves"):
        taxonomy.from_options(KinOptions(branching=10, depth=9), torch.Generator())
    with pytest.raises(WrongUse, match="9999 members"):
        taxonomy.from_edges([(str(i), "root") for i in range(9999)], leaves_only=True)
