"""Every flag of `train`, tried in a real run: it is accepted, recorded, and changes what it says."""

import json

import pytest

from coneheads.lab import cli
from coneheads.lab.checkpoint import Checkpoints

KIN = [
    "--task=kin", "--task.branching=3", "--task.depth=3", "--task.set_size=5", "--task.values=4", "--task.examples=64",
    "--model.heads=2", "--model.width=8", "--model.qk_dim=3", "--train.steps=4", "--train.batch=16", 
    "--train.eval_every=4", "--train.warmup=1",
]  # fmt: skip
TREE = [
    "--task=tree", "--task.depth=2", "--task.examples=64", "--model.heads=2", "--model.width=8", "--model.qk_dim=3",
    "--model.depth=1", "--model.feedforward=8", "--train.steps=4", "--train.batch=16", "--train.eval_every=4",
]  # fmt: skip
LISTOPS = ["--task=listops", "--task.examples=32", "--task.examples_train=100", *TREE[3:]]


def train(folder, name, *flags):
    out = folder / name
    assert cli.main(["train", *flags, f"--out={out}", "-q"]) == 0
    return json.loads((out / "run.json").read_text())


def without_flags(record):
    """What came out, with the weights that it came from."""
    return record["metrics"], record["parameters"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {name: train(folder, name, *flags) for name, flags in (("kin", KIN), ("tree", TREE), ("listops", LISTOPS))}


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.start=paper"],
        ["--model.gamma=7.0"],
        ["--no_model.learn_gamma"],
        ["--model.light_height=0.3"],
        ["--model.learn_radius"],
        ["--model.score=umbral"],
        ["--model.score=umbral", "--model.radius=0.7"],
        ["--model.height_scale=0.1"],
        ["--model.readout=distance"],
        ["--model.qk_norm"],
        ["--model.qk_scale=3.0"],
        ["--model.height_spread=4.0"],
        ["--model.height_start=-2.5"],
        ["--model.embedding_scale=2.0"],
        ["--train.lr=0.05"],
        ["--train.warmup=3"],
        ["--train.decay=constant"],
        ["--train.final_lr=0.9"],
        ["--train.weight_decay=30.0"],
        ["--train.beta2=0.5"],
        ["--train.clip=1e-5"],
        ["--train.precision=bf16-mixed"],
        ["--task.taxonomy=random"],
        ["--task.taxonomy=random", "--task.nodes=60"],
        ["--task.members=all"],
        ["--task.seed=7"],
        ["--seed=5"],
    ],
    ids=" ".join,
)
def test_a_flag_of_kin_changes_the_run(tmp_path, plain, flags):
    assert without_flags(train(tmp_path, "run", *KIN, *flags)) != without_flags(plain["kin"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.dropout=0.5"],
        ["--task.objective=leaf"],
        ["--task.objective=leaf", "--task.masked=0.9"],
        ["--task.noise=5.0"],
        ["--task.symbols=3"],
        ["--task.branching=4"],
    ],
    ids=" ".join,
)
def test_a_flag_of_tree_changes_the_run(tmp_path, plain, flags):
    assert without_flags(train(tmp_path, "run", *TREE, *flags)) != without_flags(plain["tree"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--task.min_length=20"],
        ["--task.max_length=40", "--task.long_length=80"],
        ["--task.max_depth=4"],
        ["--task.deep_depth=12"],
        ["--task.max_args=6"],
        ["--task.p_operator=0.4"],
    ],
    ids=" ".join,
)
def test_a_flag_of_listops_changes_the_run(tmp_path, plain, flags):
    assert without_flags(train(tmp_path, "run", *LISTOPS, *flags)) != without_flags(plain["listops"])


def test_accumulate_and_threads_change_nothing_but_rounding(tmp_path, plain):
    record = train(tmp_path, "run", *KIN, "--train.accumulate=3", "--threads=1")
    assert record["metrics"]["test"]["loss"] == pytest.approx(plain["kin"]["metrics"]["test"]["loss"], rel=1e-4)
    assert record["hardware"]["threads"] == 1


def test_save_every_and_eval_every_decide_when_a_checkpoint_is_written(tmp_path):
    train(
        tmp_path, "run", *KIN, "--train.steps=5", "--train.eval_every=100", "--train.save_every=2", "--train.patience=3"
    )
    assert Checkpoints.of(tmp_path / "run").named() == {"last": "step-00000005", "best": "step-00000005"}


def test_tensorboard_is_written_if_asked_for(tmp_path):
    train(tmp_path, "run", *KIN, "--train.tensorboard")
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_the_config_file_of_a_run_makes_the_run_again(tmp_path, plain):
    assert without_flags(train(tmp_path, "a", *KIN, "--model.gamma=3")) != without_flags(plain["kin"])
    again = train(tmp_path, "b", f"--config={tmp_path / 'a/config.yaml'}", "--model.gamma=null")
    assert without_flags(again) == without_flags(plain["kin"])


def test_evaluate_and_draw_take_a_run(tmp_path, capsys):
    train(tmp_path, "run", *KIN)
    capsys.readouterr()
    assert (
        cli.main(["evaluate", f"--run={tmp_path / 'run'}", "--checkpoint=last", "--splits=test", "--json", "-q"]) == 0
    )
    assert set(json.loads(capsys.readouterr().out)) == {"test"}
    assert cli.main(["draw", f"--run={tmp_path / 'run'}", "--checkpoint=last", f"--out={tmp_path / 'pictures'}"]) == 0
    assert list((tmp_path / "pictures").glob("*.png"))


@pytest.mark.parametrize("command", ["evaluate", "draw"])
def test_a_folder_that_holds_no_run_is_named(tmp_path, capsys, command):
    assert cli.main([command, f"--run={tmp_path}"]) == 2
    assert f"--run: '{tmp_path}'" in capsys.readouterr().err


def test_adam_has_its_weight_decay_in_the_loss(tmp_path):
    decayed = [
        train(tmp_path, kind, *KIN, "--train.weight_decay=3.0", f"--train.optimizer={kind}")
        for kind in ("adamw", "adam")
    ]
    assert without_flags(decayed[0]) != without_flags(decayed[1])


def test_the_model_to_keep_can_be_the_best_in_metric_and_loss(tmp_path):
    flags = (*KIN, "--train.steps=30", "--train.eval_every=1", "--train.lr=0.3")
    metric = train(tmp_path, "metric", *flags)
    both = train(tmp_path, "both", *flags, "--train.best=metric and loss")
    assert both["best_step"] != metric["best_step"]
