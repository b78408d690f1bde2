"""The training loop: what it writes, that it repeats itself, schedules, early stopping, precision, wrong use."""

import dataclasses
import json
import math

import pytest
import torch
import yaml

from coneheads.lab import tasks, train
from coneheads.lab.checkpoint import Checkpoints, load_run
from coneheads.lab.commands import EvaluateConfig, ModelOptions, TrainConfig, TrainOptions
from coneheads.lab.config import Failed, WrongUse, from_dict
from coneheads.lab.tasks.options import KinOptions, ListOpsOptions, TreeOptions
from coneheads.lab.train import Diverged, Trainer, learning_rate
from tests.lab.programs import coneheads

KIN = KinOptions(branching=3, depth=3, set_size=6, values=4, examples=200)
MODEL = ModelOptions(score="umbral", qk_dim=3, heads=1, width=16, depth=1)
TRAIN = TrainOptions(steps=40, batch=64, lr=0.03, warmup=5, eval_every=10, save_every=15)
CONFIG = TrainConfig(task=KIN, model=MODEL, train=TRAIN)


def changed(config=CONFIG, **changes):
    """A config with fields replaced, those of sections by dotted names with __ for the dot."""
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        if section:
            value = dataclasses.replace(getattr(config, section), **{field: value})
            name = section
        config = dataclasses.replace(config, **{name: value})
    return config


def fit(config, folder):
    return Trainer(config, folder).fit()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, fit(CONFIG, folder)


def test_a_run_learns_and_writes_its_record(finished):
    folder, record = finished
    assert record == json.loads((folder / "run.json").read_text())
    assert record["status"] == "done"
    assert record["metrics"]["test"]["accuracy"] > 1.5 * record["chance"]
    assert record["steps"] == 40
    assert record["seed"] == CONFIG.seed
    assert record["config"]["model"]["score"] == "umbral"
    assert set(record["versions"]) == {"coneheads", "torch", "python"}
    assert record["hardware"]["cpu"]
    assert record["wall_seconds"] > 0
    assert record["parameters"] == 27 * 16 + 2 * (16 * 3 + 3) + 1
    assert record["start"]["learn_gamma"] is True
    assert from_dict(TrainConfig, yaml.safe_load((folder / "config.yaml").read_text())) == CONFIG


def test_metrics_are_logged_at_every_evaluation(finished):
    folder, record = finished
    logged = lines(folder)
    assert [line["step"] for line in logged if line["split"] == "valid"] == [10, 20, 30, 40]
    best = max((line for line in logged if line["split"] == "valid"), key=lambda line: line["accuracy"])
    assert record["best_step"] == best["step"]
    assert record["metrics"]["valid"]["accuracy"] == best["accuracy"]


def test_the_same_command_twice_gives_the_same_numbers(finished, tmp_path):
    folder, record = finished
    again = fit(CONFIG, tmp_path / "again")
    assert again["metrics"] == record["metrics"]
    assert lines(tmp_path / "again") == lines(folder)


def test_another_seed_gives_other_numbers(finished, tmp_path):
    assert fit(changed(seed=1), tmp_path / "run")["metrics"] != finished[1]["metrics"]


def test_best_and_last_checkpoints_are_kept_and_nothing_else(finished):
    folder, record = finished
    named = Checkpoints.of(folder).named()
    assert named["best"] == f"step-{record['best_step']:08d}"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {*named.values(), "index.json"}


def test_a_trained_run_loads_and_evaluates_to_its_recorded_metrics(finished, capsys):
    folder, record = finished
    _, task, model = load_run(folder)
    batch = next(task.batches("test", 200))
    with torch.inference_mode():
        right = (model(**batch.inputs).argmax(-1) == batch.targets).double().mean().item()
    assert right == pytest.approx(record["metrics"]["test"]["accuracy"])
    from coneheads.lab import evaluate

    assert evaluate.run(EvaluateConfig(run=str(folder), json=True, quiet=True)) == 0
    assert json.loads(capsys.readouterr().out) == record["metrics"]
    assert evaluate.run(EvaluateConfig(run=str(folder), splits=("test",), checkpoint="last", quiet=True)) == 0
    assert capsys.readouterr().out.startswith("test")
    with pytest.raises(WrongUse, match=r"--splits.*did you mean 'test'"):
        evaluate.run(EvaluateConfig(run=str(folder), splits=("tset",), quiet=True))


def test_gradient_accumulation_changes_nothing_but_rounding(finished, tmp_path):
    record = fit(changed(train__accumulate=4), tmp_path / "run")
    assert record["metrics"]["test"]["loss"] == pytest.approx(finished[1]["metrics"]["test"]["loss"], rel=1e-3)


def test_a_gradient_larger_than_clip_is_cut(tmp_path):
    free, cut = (
        lines_of(
            fit(changed(train__steps=3, train__eval_every=1, train__clip=clip), tmp_path / str(clip)),
            tmp_path / str(clip),
        )
        for clip in (None, 1e-6)
    )
    assert free != cut


def lines_of(_, folder):
    return lines(folder)


def test_early_stopping_ends_a_run_that_gets_no_better(tmp_path):
    record = fit(changed(train__lr=0.0, train__patience=2), tmp_path / "run")
    assert record["steps"] == 30  # the first evaluation is the best, two more are waited for
    assert record["best_step"] == 10


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_other_precisions_train(tmp_path, precision):
    record = fit(changed(train__precision=precision), tmp_path / "run")
    assert record["metrics"]["test"]["accuracy"] > 1.5 * record["chance"]


def test_dropout_repeats_itself(tmp_path):
    config = TrainConfig(
        task=TreeOptions(depth=2, examples=50),
        model=ModelOptions(width=16, heads=2, depth=1, qk_dim=4, feedforward=16, dropout=0.3),
        train=TrainOptions(steps=6, batch=16, eval_every=3, weight_decay=0.1, beta2=0.95),
    )
    first, second = (fit(config, tmp_path / name) for name in "ab")
    assert first["metrics"] == second["metrics"]


def test_tensorboard_files_hold_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(changed(train__tensorboard=True), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    logged = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("valid/accuracy")]
    assert [(line["step"], line["accuracy"]) for line in lines(tmp_path / "run") if line["split"] == "valid"] == logged


def test_the_learning_rate_warms_up_and_decays():
    options = TrainOptions(steps=110, warmup=10, lr=1.0, final_lr=0.1)
    rates = [learning_rate(step, options) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    linear = [learning_rate(step, dataclasses.replace(options, decay="linear")) for step in range(110)]
    assert linear[60] == pytest.approx(0.55)
    assert linear[35] == pytest.approx(0.775)
    assert learning_rate(99, dataclasses.replace(options, decay="constant")) == 1.0
    assert learning_rate(39, dataclasses.replace(options, decay="inverse_sqrt")) == pytest.approx(0.5)
    assert learning_rate(0, dataclasses.replace(options, warmup=0)) == pytest.approx(1.0)


def test_weight_decay_is_on_matrices_alone():
    model = tasks.make(KIN, 0).model(MODEL)
    matrices, others = train._optimizer(model, TrainOptions(weight_decay=0.5)).param_groups
    assert matrices["weight_decay"] == 0.5
    assert others["weight_decay"] == 0
    assert all(parameter.ndim < 2 for parameter in others["params"])


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    folder = tmp_path / "run"
    trainer = Trainer(changed(train__save_every=5), folder)
    taken = trainer.task.train_batch

    def poisoned(step, size):
        if step == 17:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(math.nan)
        return taken(step, size)

    trainer.task.train_batch = poisoned
    with pytest.raises(Diverged, match=r"the loss is nan at step 18; the checkpoint step-00000015 is kept"):
        trainer.fit()
    assert json.loads((folder / "run.json").read_text())["status"] == "diverged"
    assert all(torch.isfinite(value).all() for value in Checkpoints.of(folder).weights("last").values())
    assert Checkpoints.of(folder).state("last")["at"]["step"] == 15


def test_a_folder_with_a_run_is_not_overwritten(finished):
    with pytest.raises(WrongUse, match=r"--out: .*holds a run already; --resume"):
        fit(CONFIG, finished[0])


def test_resuming_a_finished_run_returns_its_record(finished):
    assert fit(changed(resume=True), finished[0]) == finished[1]


def test_resuming_with_other_flags_names_them(finished):
    with pytest.raises(WrongUse, match=r"other values of --model\.gamma, --train\.lr"):
        fit(changed(resume=True, train__lr=0.1, model__gamma=2.0), finished[0])


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    from coneheads.lab import record

    with (
        record.opened(tmp_path / "run", CONFIG, writes=True),
        pytest.raises(Failed, match="another process is training"),
        record.opened(tmp_path / "run", changed(resume=True), writes=True),
    ):
        pass


def test_a_batch_smaller_than_its_parts_is_refused(tmp_path):
    with pytest.raises(WrongUse, match=r"--train\.batch: must be at least 9"):
        Trainer(changed(train__batch=8, train__accumulate=9), tmp_path / "run")


@pytest.mark.parametrize("task", [TreeOptions(depth=2, examples=64), ListOpsOptions(examples=64, examples_train=200)])
def test_every_task_trains_from_the_command_line(tmp_path, task):
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    flags = [f"--task.{name}={'null' if value is None else value}" for name, value in values.items()]
    done = coneheads(
        "train", "--task", task.name, *flags, "--train.steps=4", "--train.batch=8", "--train.eval_every=2", "--seed=3",
        "--model.depth=1", "--model.width=16", "--model.heads=2", "--model.feedforward=16", "--threads=1", "--out=run",
        "-q", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "run in run"
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "done"
