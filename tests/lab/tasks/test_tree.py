"""The tree grammar against enumeration of all its trees, and the task against its exact optimum."""

import dataclasses
import itertools

import pytest
import torch

from coneheads.lab.commands import ModelOptions, TrainOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.tasks import make
from coneheads.lab.tasks.base import generator
from coneheads.lab.tasks.options import TreeOptions
from coneheads.lab.tasks.tree_grammar import Grammar

SHAPES = [(2, 2, 3), (2, 3, 2), (1, 4, 4), (3, 2, 2)]  # depth, branching, symbols
OBJECTIVES = ("root", "leaf")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These models are so small that a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def all_trees(grammar):
    """Every assignment of symbols to the nodes [N, nodes], level by level from the root, and its probability [N]."""
    tables, branching, depth = grammar.tables.tolist(), grammar.branching, grammar.depth
    starts = [sum(branching**i for i in range(level)) for level in range(depth + 2)]
    trees, probabilities = [], []
    for tree in itertools.product(range(grammar.symbols), repeat=starts[-1]):
        probability = 1 / grammar.symbols
        for level in range(depth):
            for place in range(branching ** (level + 1)):
                parent, child = starts[level] + place // branching, starts[level + 1] + place
                probability *= tables[level][place % branching][tree[parent]][tree[child]]
        trees.append(tree)
        probabilities.append(probability)
    return torch.tensor(trees), torch.tensor(probabilities, dtype=torch.float64)


def enumerated(trees, probabilities, node, symbols, seen):
    """The distribution of a node given symbols of others, as {node: symbol}; None if that cannot be."""
    fits = torch.ones(len(trees), dtype=torch.bool)
    for other, symbol in seen.items():
        fits &= trees[:, other] == symbol
    weights = torch.zeros(symbols, dtype=torch.float64).index_add_(0, trees[fits, node], probabilities[fits])
    return weights / weights.sum() if weights.sum() > 0 else None


def a_grammar(depth, branching, symbols, noise=0.5, seed=0):
    return Grammar.random(depth, branching, symbols, noise, generator(seed, 7))


@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_belief_propagation_agrees_with_the_enumeration_of_all_trees(shape, noise):
    grammar = a_grammar(*shape, noise)
    trees, probabilities = all_trees(grammar)
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)
    source = generator(1)
    _, leaves = grammar.sample(12, source)
    hidden = torch.rand(leaves.shape, generator=source) < torch.linspace(0, 1, 12).unsqueeze(1)
    first = trees.shape[1] - leaves.shape[1]  # node of the first leaf
    of_roots = grammar.root_posterior(leaves, hidden)
    of_leaves = grammar.leaf_posterior(leaves, hidden)
    for row in range(len(leaves)):
        seen = {first + i: int(leaves[row, i]) for i in range(leaves.shape[1]) if not hidden[row, i]}
        expected = enumerated(trees, probabilities, 0, grammar.symbols, seen)
        torch.testing.assert_close(of_roots[row], expected, atol=1e-10, rtol=0)
        for leaf in range(leaves.shape[1]):
            expected = enumerated(trees, probabilities, first + leaf, grammar.symbols, seen)
            torch.testing.assert_close(of_leaves[row, leaf], expected, atol=1e-10, rtol=0)


def test_the_posterior_of_leaves_of_which_none_is_seen_is_their_marginal():
    grammar = a_grammar(3, 3, 5)
    leaves = torch.zeros(1, 27, dtype=torch.long)
    hidden = torch.ones_like(leaves, dtype=torch.bool)
    torch.testing.assert_close(grammar.leaf_posterior(leaves, hidden)[0], grammar.marginals(), atol=1e-12, rtol=0)
    torch.testing.assert_close(grammar.root_posterior(leaves, hidden)[0], torch.full((5,), 0.2, dtype=torch.float64))


def test_messages_of_a_large_tree_of_little_noise_stay_finite():
    grammar = a_grammar(9, 2, 12, noise=0.05)
    roots, leaves = grammar.sample(16, generator(3))
    hidden = torch.rand(leaves.shape, generator=generator(4)) < 0.5
    for found in (grammar.root_posterior(leaves), grammar.leaf_posterior(leaves, hidden)):
        assert found.isfinite().all()
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1], dtype=torch.float64))
    assert (grammar.root_posterior(leaves).gather(1, roots.unsqueeze(1)) > 0).all()


def test_trees_are_drawn_with_the_probabilities_of_the_tables():
    grammar = a_grammar(2, 2, 2)
    trees, probabilities = all_trees(grammar)
    codes = 2 ** torch.arange(5)  # the root and four leaves as one number
    cells = (trees[:, [0, 3, 4, 5, 6]] * codes).sum(1)
    expected = torch.zeros(32, dtype=torch.float64).index_add_(0, cells, probabilities)
    count = 200_000
    roots, leaves = grammar.sample(count, generator(5))
    drawn = (torch.cat([roots.unsqueeze(1), leaves], 1) * codes).sum(1).bincount(minlength=32) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((drawn - expected).abs() <= 5 * error + 1e-12).all()


def test_rows_of_tables_are_distributions_that_noise_flattens():
    rows = [a_grammar(3, 2, 6, noise).tables for noise in (0.0, 0.1, 0.5, 3.0)]
    for tables in rows:
        assert tables.shape == (3, 2, 6, 6)
        torch.testing.assert_close(tables.sum(-1), torch.ones(3, 2, 6, dtype=torch.float64))
    assert set(rows[0].unique().tolist()) == {0.0, 1.0}
    largest = [tables.amax(-1).mean().item() for tables in rows]
    assert largest == sorted(largest, reverse=True)
    assert rows[1].flatten(0, 1).unique(dim=0).shape[0] == 6  # a table of its own for every level and place


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_predictor_reaches_the_optimum_within_sampling_error(objective, seed):
    task = make(TreeOptions(objective=objective, branching=3, seed=seed), 0)
    (batch,) = task.batches("test", 4096)
    posterior, counts = task.posterior(batch), batch.weights.sum()
    right = (task.metrics(posterior, batch)["accuracy"] * batch.weights).sum() / counts
    optimum = task.optimum()
    assert abs(right - optimum["accuracy"]) < 4 * task.optimum_error()
    assert 0 < task.optimum_error() < 0.01
    losses = task.losses(posterior.clamp_min(1e-300).log(), batch) * batch.weights
    assert (losses.sum() / counts).item() == pytest.approx(optimum["loss"], abs=0.04)
    assert task.chance() < optimum["accuracy"] < 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_optimum_is_the_mean_of_the_largest_posterior_of_what_is_asked(objective):
    task = make(TreeOptions(objective=objective, depth=2, symbols=3, masked=0.5, examples=40), 0)
    trees, probabilities = all_trees(task.grammar)
    largest, entropies = [], []
    for batch in task.batches("test", 1):
        tokens = batch.inputs["tokens"][0].tolist()
        seen = {3 + i: token for i, token in enumerate(tokens) if token < 3}
        asked = [0] if objective == "root" else [3 + i for i, token in enumerate(tokens) if token == 3]
        for node in asked:
            posterior = enumerated(trees, probabilities, node, 3, seen)
            largest.append(posterior.max())
            entropies.append(torch.special.entr(posterior).sum())
    assert len(largest) == (40 if objective == "root" else 80)
    assert task.optimum()["accuracy"] == pytest.approx(torch.stack(largest).mean().item(), abs=1e-10)
    assert task.optimum()["loss"] == pytest.approx(torch.stack(entropies).mean().item(), abs=1e-10)


def test_a_blind_guess_is_right_as_often_as_chance_says():
    task = make(TreeOptions(objective="leaf", examples=20_000), 0)
    (batch,) = task.batches("test", 20_000)
    guess = task.grammar.marginals().argmax(-1)
    right = ((guess == batch.targets) * batch.weights).sum() / batch.weights.sum()
    assert right.item() == pytest.approx(task.chance(), abs=0.01)
    assert make(TreeOptions(symbols=5), 0).chance() == 0.2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_batches_depend_on_the_run_and_the_step_and_on_nothing_else(objective):
    options = TreeOptions(objective=objective)
    first, again, other = make(options, 0), make(options, 0), make(options, 1)
    first.train_batch(3, 16)
    for step in (0, 5):
        assert same(first.train_batch(step, 16), again.train_batch(step, 16))
        assert not same(first.train_batch(step, 16), other.train_batch(step, 16))
    assert not same(first.train_batch(0, 16), first.train_batch(1, 16))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_runs_are_measured_on_the_same_examples(objective):
    options = TreeOptions(objective=objective, examples=50)
    sets = {}
    for split in ("valid", "test"):
        whole, *_ = sets[split] = list(make(options, 0).batches(split, 50))
        parts = list(make(options, 9).batches(split, 20))
        assert [len(part) for part in parts] == [20, 20, 10]
        assert torch.equal(torch.cat([part.inputs["tokens"] for part in parts]), whole.inputs["tokens"])
    assert not same(*sets["valid"], *sets["test"])
    assert torch.equal(make(options, 0).grammar.tables, make(options, 9).grammar.tables)


def test_as_many_leaves_are_masked_in_every_sequence_as_the_share_says_and_one_at_least():
    for share, count in ((0.0, 1), (0.25, 4), (1.0, 16)):
        batch = make(TreeOptions(objective="leaf", masked=share), 0).train_batch(0, 32)
        hidden = batch.inputs["tokens"] == 8
        assert (hidden.sum(1) == count).all()
        assert torch.equal(hidden.float(), batch.weights)
        assert torch.equal(batch.inputs["tokens"][~hidden], batch.targets[~hidden])
        assert batch.targets.max() < 8
    places = make(TreeOptions(objective="leaf"), 0).train_batch(0, 2000).weights.mean(0)
    assert places.min() > 0.07  # every place is asked for: 2 of 16
    assert places.max() < 0.18


def test_flags_say_what_the_sequences_are():
    batch = make(TreeOptions(depth=3, branching=4, symbols=5), 0).train_batch(0, 200)
    assert batch.inputs["tokens"].shape == (200, 64)
    assert batch.inputs["tokens"].unique().tolist() == batch.targets.unique().tolist() == list(range(5))
    assert len(next(make(TreeOptions(examples=33), 0).batches("test", 100))) == 33
    worlds = [make(TreeOptions(seed=seed), 0) for seed in (0, 1)]
    assert not torch.equal(worlds[0].grammar.tables, worlds[1].grammar.tables)
    certain, random = (make(TreeOptions(noise=noise), 0).optimum()["accuracy"] for noise in (0.05, 2.0))
    assert certain > 0.85
    assert random < 0.16


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_model_learns_and_does_not_exceed_the_optimum(objective):
    task = make(TreeOptions(objective=objective, depth=2, symbols=4, noise=0.2), 0)
    torch.manual_seed(0)
    model = task.model(ModelOptions(score="dot", width=32, heads=2, depth=1, feedforward=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(120):
        batch = task.train_batch(step, 64)
        loss = (task.losses(model(**batch.inputs), batch) * batch.weights).sum() / batch.weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (batch,) = task.batches("test", 4096)
    with torch.no_grad():
        found = task.metrics(model(**batch.inputs), batch)["accuracy"]
    accuracy = ((found * batch.weights).sum() / batch.weights.sum()).item()
    optimum = task.optimum()["accuracy"]
    assert 0.9 * optimum < accuracy < optimum + 3 * task.optimum_error()
    assert accuracy > task.chance() + 0.1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_example_is_of_the_test_set_and_has_a_word_for_every_leaf(objective):
    task = make(TreeOptions(objective=objective), 0)
    example = task.example()
    assert same(example.batch, next(task.batches("test", 1)))
    assert example.queries == example.keys
    assert len(example.keys) == 16
    assert set(example.keys) <= set("abcdefgh?")
    assert example.keys.count("?") == (2 if objective == "leaf" else 0)
    assert task.model(ModelOptions())(**example.batch.inputs).shape[-1] == 8
    assert "siblings" in example.caption
    assert make(TreeOptions(symbols=30), 0).example().keys[0].isdigit()


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"masked": 1.5}, "masked"),
        ({"depth": 13}, "depth"),
        ({"depth": 0}, "depth"),
        ({"branching": 1}, "branching"),
        ({"symbols": 1}, "symbols"),
        ({"noise": -0.1}, "noise"),
        ({"objective": "leafs"}, "objective"),
        ({"examples": 0}, "examples"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_flags_are_named(flags, flag):
    with pytest.raises(WrongUse, match=flag):
        TreeOptions(**flags)


def test_the_recipe_names_flags_that_there_are():
    known = {f"model.{f.name}" for f in dataclasses.fields(ModelOptions)}
    known |= {f"train.{f.name}" for f in dataclasses.fields(TrainOptions)}
    assert set(TreeOptions.recipe) <= known


def same(a, b):
    return torch.equal(a.inputs["tokens"], b.inputs["tokens"]) and torch.equal(a.targets, b.targets)
