"""ListOps against an evaluator of text that is written another way, and its sets against the law they are drawn by."""

import dataclasses
import random
import re
import statistics
from collections import Counter

import pytest
import torch

from coneheads.lab.commands import ModelOptions, TrainOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.tasks import make
from coneheads.lab.tasks.listops import PADDING, WORDS, Law, value
from coneheads.lab.tasks.options import ListOpsOptions

SPLITS = ("valid", "test", "deeper", "longer")
SMALL = ListOpsOptions(examples_train=500, examples=200)
OPERATIONS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda numbers: int(statistics.median(numbers)),
    "SM": lambda numbers: sum(numbers) % 10,
}
INNERMOST = re.compile(r"\[(\w+) ([\d ]+) \]")


@pytest.fixture(scope="module")
def task():
    return make(ListOpsOptions(examples_train=5000), 0)


def words(tokens):
    return " ".join(WORDS[token] for token in tokens)


def reduced(text):
    """The value of an expression: innermost lists are replaced by their values until none is left."""
    while text.startswith("["):
        text = INNERMOST.sub(lambda found: str(OPERATIONS[found[1]]([int(n) for n in found[2].split()])), text)
    return int(text)


def nested(text):
    """An expression as nested lists, by Python's own reader."""
    return eval(re.sub(r"\[\w+ ", "[", text).replace(" ]", "]").replace(" ", ","))


def depth(node):
    return 1 + max(map(depth, node)) if isinstance(node, list) else 1


def operators(node, level=1):
    """(level, number of arguments) of every operator, and (level, 0) of every digit."""
    if not isinstance(node, list):
        return [(level, 0)]
    return [(level, len(node)), *(found for child in node for found in operators(child, level + 1))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[MIN 3 1 2 ]", 1),
        ("[MAX 3 1 2 ]", 3),
        ("[MED 9 1 3 ]", 3),
        ("[MED 1 9 4 3 ]", 3),  # the mean of 3 and 4, rounded down
        ("[SM 9 9 9 ]", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM [SM 1 2 ] [MED [MIN 5 6 ] 7 8 ] ]", 0),
    ],
)
def test_values_of_expressions_that_can_be_done_by_hand(text, expected):
    assert value(bytes(WORDS.index(word) for word in text.split())) == expected == reduced(text)


@pytest.mark.parametrize("name", ["train", *SPLITS])
def test_every_value_is_that_of_another_evaluator(task, name):
    found = task.expressions(name)
    assert [reduced(words(text)) for text in found.texts] == found.values.tolist()


@pytest.mark.parametrize("name", ["train", *SPLITS])
def test_lengths_and_depths_are_within_the_bounds_of_the_set(task, name):
    texts = task.expressions(name).texts
    lengths, depths = {len(text) for text in texts}, {depth(nested(words(text))) for text in texts}
    expected = {"deeper": (6, 8), "longer": (2, 5)}.get(name, (2, 5))
    assert expected[0] <= min(depths) <= max(depths) == expected[1]
    assert (min(lengths) >= 65 and max(lengths) == 128) if name == "longer" else min(lengths) >= 8
    assert name == "longer" or max(lengths) == 64
    assert len(texts) == (5000 if name == "train" else 1000)


def test_nodes_are_drawn_as_the_arena_draws_them():
    """With bounds of length that refuse nothing, so that nothing is distorted."""
    law = Law(p_operator=0.25, max_args=10, depths=(2, 4), lengths=(4, 2000))
    assert law.share() == pytest.approx(1, abs=1e-9)
    trees = [nested(words(text)) for text in drawn(law, 4000)]
    nodes = [found for tree in trees for found in operators(tree)]
    free = [count for level, count in nodes if 1 < level < 4]
    assert sum(count > 0 for count in free) / len(free) == pytest.approx(0.25, abs=0.01)
    assert all(count > 0 for level, count in nodes if level == 1)
    assert all(count == 0 for level, count in nodes if level == 4)
    arguments = Counter(count for _, count in nodes if count)
    assert sorted(arguments) == list(range(2, 11))
    for share in arguments.values():
        assert share / arguments.total() == pytest.approx(1 / 9, abs=0.012)
    tokens = Counter(token for text in drawn(law, 4000) for token in text)
    for group in (range(10), range(10, 14)):
        total = sum(tokens[token] for token in group)
        for token in group:
            assert tokens[token] / total == pytest.approx(1 / len(group), rel=0.06)


@pytest.mark.parametrize("name", ["train", "deeper", "longer"])
def test_the_share_of_draws_that_are_taken_is_known_exactly(name):
    law = make_law(ListOpsOptions(max_length=40, max_depth=4, deep_depth=6, p_operator=0.3, max_args=5), name)
    count = 20_000
    source = random.Random(1)
    taken = sum(law.draw(source) is not None for _ in range(count))
    error = (law.share() * (1 - law.share()) / count) ** 0.5
    assert abs(taken / count - law.share()) < 4 * error


def test_no_expression_is_in_two_sets_or_twice_in_one(task):
    texts = [text for name in ("train", *SPLITS) for text in task.expressions(name).texts]
    assert len(set(texts)) == len(texts)


def test_sets_stay_apart_where_most_draws_are_known():
    options = ListOpsOptions(
        min_length=4, max_length=10, long_length=14, max_depth=3, deep_depth=4, max_args=3, examples=300,
        examples_train=3000,
    )  # fmt: skip
    task = make(options, 0)
    texts = [text for name in ("train", "valid", "test") for text in task.expressions(name).texts]
    assert len(set(texts)) == len(texts) == 3600


def test_the_run_decides_the_order_and_the_task_the_examples():
    first, again, other = make(SMALL, 0), make(SMALL, 0), make(SMALL, 1)
    for split in ("train", *SPLITS):
        assert first.expressions(split).texts == other.expressions(split).texts
    other_world = make(dataclasses.replace(SMALL, seed=1), 0)
    assert not set(first.expressions("test").texts) & set(other_world.expressions("test").texts)
    again.train_batch(40, 64)
    for step in (0, 7):
        assert same(first.train_batch(step, 64), again.train_batch(step, 64))
        assert not same(first.train_batch(step, 64), other.train_batch(step, 64))
    assert not same(first.train_batch(0, 64), first.train_batch(1, 64))


def test_valid_and_test_do_not_depend_on_the_size_of_the_training_set():
    more = make(dataclasses.replace(SMALL, examples_train=600), 0)
    for split in SPLITS:
        assert more.expressions(split).texts == make(SMALL, 0).expressions(split).texts


def test_an_epoch_shows_every_expression_once_even_when_batches_cross_its_end():
    task = make(SMALL, 3)
    batches = [task.train_batch(step, 64) for step in range(16)]  # 1024 of 500: two epochs and a bit
    seen = [text for batch in batches for text in texts_of(batch)]
    epochs = [seen[:500], seen[500:1000]]
    expected = sorted(task.expressions("train").texts)
    assert [sorted(epoch) for epoch in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]
    assert len(task.train_batch(0, 1200)) == 1200  # more than there are


@pytest.mark.parametrize("split", SPLITS)
def test_padding_is_behind_the_tokens_and_nowhere_else(split):
    task = make(SMALL, 0)
    batches = list(task.batches(split, 64))
    assert [len(batch) for batch in batches] == [64, 64, 64, 8]
    texts = []
    for batch in batches:
        tokens, padding = batch.inputs["tokens"], batch.inputs["padding"]
        assert torch.equal(padding, tokens == PADDING)
        assert (padding.int().diff(dim=1) >= 0).all()
        assert not padding.all(0).any()  # no column of padding alone
        assert torch.equal(batch.weights, torch.ones(len(batch)))
        texts += texts_of(batch)
    assert texts == task.expressions(split).texts


def test_what_is_behind_the_tokens_does_not_change_what_a_model_says():
    task = make(SMALL, 0)
    model = task.model(ModelOptions(score="dot")).eval()
    (batch,) = task.batches("longer", 200)
    alone = task.expressions("longer").batch(slice(0, 1))
    outputs = model(**batch.inputs)
    assert outputs.shape == (200, 10)
    torch.testing.assert_close(model(**alone.inputs), outputs[:1], atol=1e-5, rtol=1e-5)
    (task.losses(outputs, batch) * batch.weights).mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_chance_is_the_share_of_the_most_frequent_value_and_all_can_be_right(task):
    counts = Counter(reduced(words(text)) for text in task.expressions("test").texts)
    assert task.chance() == counts.most_common(1)[0][1] / 1000
    assert task.chance() < 0.25
    assert task.optimum() == {"accuracy": 1.0}
    assert task.splits == SPLITS


def test_the_example_is_a_short_nested_expression_of_the_test_set(task):
    example = task.example()
    assert example.queries == example.keys
    text = " ".join(example.keys)
    assert text in {words(text) for text in task.expressions("test").texts}
    assert depth(nested(text)) >= 3
    assert 15 <= len(example.keys) <= 25
    assert f"value is {reduced(text)}" in example.caption
    assert words(example.batch.inputs["tokens"][0]) == text
    assert not example.batch.inputs["padding"].any()


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"min_length": 70}, "min_length"),
        ({"min_length": 3}, "min_length"),
        ({"max_length": 3, "min_length": 4}, "max_length"),
        ({"long_length": 64}, "long_length"),
        ({"deep_depth": 5}, "deep_depth"),
        ({"max_depth": 1}, "max_depth"),
        ({"max_args": 1}, "max_args"),
        ({"p_operator": 1.1}, "p_operator"),
        ({"p_operator": -0.1}, "p_operator"),
        ({"p_operator": 0.0}, "max_length|deep_depth"),  # no operator below the root
        ({"max_depth": 2, "min_length": 20}, "max_length"),  # at most 12 tokens
        ({"max_depth": 2, "max_length": 12}, "long_length"),
        ({"max_length": 16, "long_length": 17}, "deep_depth"),  # so deep, it has 16 tokens at least
        ({"examples_train": 0}, "examples_train"),
        ({"examples": 0}, "examples"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_flags_are_named(flags, flag):
    with pytest.raises(WrongUse, match=rf"^--(task\.)?({flag}):"):
        make(ListOpsOptions(**flags), 0)


def test_more_examples_than_there_are_different_ones_end_in_a_word_instead_of_a_loop():
    task = make(SMALL, 0)
    task.laws["train"] = dataclasses.replace(task.laws["train"], max_args=2, depths=(2, 2), lengths=(4, 4))
    with pytest.raises(WrongUse, match=r"^--task.examples_train: .* 500 in the train set; (39\d|400) were found"):
        task.expressions("train")  # of 4 operators on 10 * 10 digits


def test_the_recipe_names_flags_that_there_are():
    known = {f"model.{f.name}" for f in dataclasses.fields(ModelOptions)}
    known |= {f"train.{f.name}" for f in dataclasses.fields(TrainOptions)}
    assert set(ListOpsOptions.recipe) <= known


def drawn(law, count):
    source = random.Random(0)
    return [text for _ in range(count) if (text := law.draw(source)) is not None]


def make_law(options, name="train"):
    return make(options, 0).laws[name]


def texts_of(batch):
    return [bytes(row[row != PADDING].tolist()) for row in batch.inputs["tokens"]]


def same(a, b):
    return texts_of(a) == texts_of(b) and torch.equal(a.targets, b.targets)


def test_the_depth_of_the_long_range_arena_works_with_short_expressions():
    task = make(ListOpsOptions(max_depth=10, examples=20), 0)
    law = task.laws["deeper"]
    assert law.depths == (11, 13)
    assert law.lengths == (8, 128)  # hardly any such expression has 64 tokens
    assert all(len(text) <= 128 for text in task.expressions("deeper").texts)
    assert task.laws["train"].lengths == (8, 64)
