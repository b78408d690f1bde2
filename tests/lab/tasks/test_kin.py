"""The task kin: one nearest kin in every set, its value the answer, drawn evenly and repeatably."""

import pytest
import torch

from coneheads.lab import tasks
from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import SCORES, WrongUse
from coneheads.lab.tasks.kin import _distinct
from coneheads.lab.tasks.options import KinOptions

SMALL = KinOptions(branching=3, depth=4, examples=300)


def kin(options=SMALL, seed=0):
    return tasks.make(options, seed)


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        KinOptions(taxonomy="random", nodes=400, seed=5),
        KinOptions(branching=2, depth=6, members="all", set_size=5),
    ],
)
def test_the_answer_is_the_value_of_the_one_member_with_the_deepest_common_ancestor(options):
    task = kin(options)
    batch = task.train_batch(0, 500)
    query, members, values = (batch.inputs[name] for name in ("query", "members", "values"))
    assert members.shape == values.shape == (500, options.set_size)
    kinship = task.taxonomy.kinship[query.unsqueeze(1), members]
    nearest = kinship == kinship.amax(1, keepdim=True)
    assert (nearest.sum(1) == 1).all()
    assert (values[nearest] == batch.targets).all()
    assert not (members == query.unsqueeze(1)).any()
    assert all(len(set(row)) == options.set_size for row in members.tolist())  # a set


def test_depths_are_asked_for_evenly_and_the_answer_stands_anywhere():
    task = kin(KinOptions(branching=4, depth=5))
    batch = task.train_batch(0, 8000)
    kinship = task.taxonomy.kinship[batch.inputs["query"].unsqueeze(1), batch.inputs["members"]]
    depths = torch.bincount(kinship.amax(1).long(), minlength=5)
    assert depths[0] == 0
    assert ((depths[1:] - 2000).abs() < 200).all()
    places = torch.bincount(kinship.argmax(1), minlength=16)
    assert ((places - 500).abs() < 110).all()


def test_batches_are_functions_of_seed_and_step_alone():
    one, again, other = kin(), kin(), kin(seed=1)
    for a, b, same in (
        (one.train_batch(3, 8), again.train_batch(3, 8), True),
        (one.train_batch(3, 8), one.train_batch(4, 8), False),
        (one.train_batch(3, 8), other.train_batch(3, 8), False),
    ):
        assert torch.equal(a.inputs["members"], b.inputs["members"]) is same
    for split in task_splits():
        a, b = (torch.cat([batch.inputs["members"] for batch in task.batches(split, 64)]) for task in (one, other))
        assert torch.equal(a, b)  # measured on the same examples whatever the run's seed
        assert len(a) == SMALL.examples


def task_splits():
    return kin().splits


def test_valid_and_test_examples_differ_and_follow_the_seed_of_the_task():
    def first(options, split):
        return next(kin(options).batches(split, 64)).inputs["members"]

    assert not torch.equal(first(SMALL, "valid"), first(SMALL, "test"))
    assert not torch.equal(first(SMALL, "test"), first(KinOptions(branching=3, depth=4, examples=300, seed=1), "test"))


def test_distinct_draws_every_set_equally_often():
    drawn = _distinct(torch.full((30000,), 4), 2, torch.Generator().manual_seed(0)).sort(1).values
    counts = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1])
    assert [count for count in counts.tolist() if count] == pytest.approx([5000] * 6, rel=0.06)


def test_chance_is_what_the_most_frequent_value_of_a_set_gets():
    task = kin(KinOptions(branching=3, depth=4, examples=4000))
    guesses = []
    for batch in task.batches("test", 4000):
        for values, answer in zip(batch.inputs["values"].tolist(), batch.targets.tolist(), strict=True):
            most = max(values.count(value) for value in values)
            best = {value for value in values if values.count(value) == most}
            guesses.append((answer in best) / len(best))
    assert task.chance() == pytest.approx(sum(guesses) / len(guesses), abs=1e-6)
    assert task.optimum() == {"accuracy": 1.0}


def test_the_example_shows_the_nearest_kin_first():
    task = kin()
    example = task.example()
    query, members = example.batch.inputs["query"], example.batch.inputs["members"]
    assert example.queries == [task.taxonomy.members[int(query)]]
    assert len(example.keys) == SMALL.set_size
    kinship = task.taxonomy.kinship[query, members[0]]
    assert (kinship.diff() <= 0).all()
    assert int(example.batch.inputs["values"][0, 0]) == int(example.batch.targets)


def test_sets_that_cannot_be_made_are_refused():
    with pytest.raises(WrongUse, match=r"--task\.set_size"):
        kin(KinOptions(branching=2, depth=2, set_size=4))


@pytest.mark.parametrize("score", SCORES)
def test_the_model_gives_a_distribution_over_values_and_learns(score):
    task = kin(KinOptions(branching=3, depth=3, set_size=4, values=3))
    torch.manual_seed(0)
    model = task.model(ModelOptions(score=score, qk_dim=4, heads=2, width=16, depth=1))
    batch = task.train_batch(0, 256)
    first = model(**batch.inputs)
    assert first.shape == (256, 3)
    assert torch.allclose(first.exp().sum(1), torch.ones(256), atol=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        loss = task.losses(model(**batch.inputs), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.losses(model(**batch.inputs), batch).mean() < 0.5 * task.losses(first, batch).mean()


@pytest.mark.parametrize("change", [{"depth": 2}, {"feedforward": 64}, {"dropout": 0.1}])
def test_options_that_its_model_cannot_heed_are_refused(change):
    with pytest.raises(WrongUse, match=rf"--model\.{next(iter(change))}: the model of kin is one layer"):
        kin().model(ModelOptions(**({"depth": 1} | change)))
