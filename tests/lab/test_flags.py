"""Flags and YAML files of every command make its config: nested, chosen, in order; and help that says what holds."""

import re

import pytest

from coneheads.lab import cli
from coneheads.lab.commands import BenchConfig, CompareConfig, ModelOptions, TrainConfig, TrainOptions
from coneheads.lab.config import choices, flags, from_dict, to_yaml
from coneheads.lab.tasks import TASKS
from coneheads.lab.tasks.options import KinOptions, TreeOptions
from tests.lab.test_cli import CALLS, run


def written(folder, text, name="config.yaml"):
    file = folder / name
    file.write_text(text)
    return str(file)


def test_flags_config_files_and_overrides_make_one_config(tmp_path):
    file = tmp_path / "bench.yaml"
    file.write_text("lengths: [8, 16]\nseconds: 0.5\ncausal: true\nscores: [umbral]\n")
    config = cli.parse("bench", ["--config", str(file), "--seconds", "3", "--no-causal", "--passes=forward"])
    expected = BenchConfig(lengths=(8, 16), scores=("umbral",), seconds=3.0, causal=False, passes=("forward",))
    assert config == expected
    for written in (["--lengths", "8", "16"], ["--lengths", "8,16"], ["--lengths=[8, 16]"], ["--lengths=8", "16"]):
        assert cli.parse("bench", written) == BenchConfig(lengths=(8, 16))
    assert cli.parse("bench", ["--value-size", "3"]).value_size == 3


def test_a_mistyped_key_of_a_config_file_gets_the_nearest_guess(capsys, tmp_path):
    file = tmp_path / "bench.yaml"
    file.write_text("secnds: 1\n")
    code, _, complaint = run(capsys, "bench", "--config", str(file))
    assert code == 2
    assert "'secnds', which is no flag; did you mean 'seconds'?" in complaint


def test_printed_config_is_a_config_file(capsys, tmp_path):
    _, out, _ = run(capsys, "bench", "--lengths", "8,16", "--no_memory", "--print_config")
    file = tmp_path / "bench.yaml"
    file.write_text(out)
    assert cli.parse("bench", ["--config", str(file)]) == BenchConfig(lengths=(8, 16), memory=False)


def test_flags_reach_the_sections():
    arguments = (
        "--task.depth 3 --train.lr 1e-4 --train.clip null --model.width=32 --seed 5 -q --model.height-start -1.5"
    )
    config = cli.parse("train", arguments.split())
    assert config == from_dict(
        TrainConfig,
        {
            "task": {"depth": 3},
            "train": {"lr": 1e-4, "clip": None},
            "model": {"width": 32, "height_start": -1.5},
            "seed": 5,
            "quiet": True,
        },
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--model.qk_norm"], True),
        (["--model.qk-norm"], True),
        (["--no_model.qk_norm"], False),
        (["--no-model.qk-norm"], False),
        (["--model.qk_norm=false"], False),
        (["--model.qk_norm", "true"], True),
        (["--model.qk_norm", "--model.qk_norm", "null"], None),
    ],
)
def test_switches_can_be_on_off_or_left_to_others(words, value):
    assert cli.parse("train", [*words, "--seed", "1"]).model.qk_norm is value


def test_a_task_is_chosen_anywhere_and_by_either_name():
    for words in (["--task", "tree"], ["--task=tree"], ["--task.name", "tree"]):
        for order in ([*words, "--task.symbols", "3"], ["--task.symbols", "3", *words]):
            assert cli.parse("compare", order).task == TreeOptions(symbols=3)
    assert cli.parse("compare", ["--task", "tree", "--task", "kin"]).task == KinOptions()


@pytest.mark.parametrize("text", ["task: {name: tree, depth: 3}", "task: tree\ntask.depth: 3"])
def test_a_file_chooses_a_task_and_flags_override_it(tmp_path, text):
    file = written(tmp_path, f"{text}\nmodel: {{width: 32}}\ntrain: {{lr: 1e-3, steps: 10}}\n")
    config = cli.parse("train", ["--config", file, "--train.steps", "20"])
    assert config.task == TreeOptions(depth=3)
    assert (config.model.width, config.train.lr, config.train.steps) == (32, 1e-3, 20)
    assert cli.parse("train", ["--train.steps", "20", f"--config={file}"]).train.steps == 10
    other = cli.parse("train", ["--config", file, "--task", "kin"])
    assert (other.task, other.model.width) == (KinOptions(), 32)


def test_of_two_files_the_later_one_counts(tmp_path):
    one = written(tmp_path, "seed: 1\ntrain: {steps: 5, batch: 3}", "one.yaml")
    two = written(tmp_path, "train: {steps: 6}\ntask: listops", "two.yaml")
    config = cli.parse("train", ["--config", one, "--config", two])
    assert (config.seed, config.train.batch, config.train.steps, config.task.name) == (1, 3, 6, "listops")


def test_an_empty_file_changes_nothing(tmp_path):
    assert cli.parse("train", ["--config", written(tmp_path, "# nothing\n")]) == cli.parse("train", [])


def test_a_recipe_gives_defaults_that_files_and_flags_override(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        TreeOptions, "recipe", {"train.steps": 77, "model.depth": 9, "sizes": (2, 5), "model.score": "dot"}
    )
    assert cli.parse("train", ["--task", "tree"]).train.steps == 77
    assert cli.parse("train", ["--task", "tree"]).model.score == "dot"
    compare = cli.parse("compare", ["--task", "tree"])
    assert (compare.sizes, compare.model.depth) == ((2, 5), 9)
    assert cli.parse("train", []) == from_dict(TrainConfig, {})
    file = written(tmp_path, "train: {steps: 78}\n")
    assert cli.parse("train", ["--task", "tree", "--config", file]).train.steps == 78
    assert cli.parse("train", ["--config", file, "--task", "tree"]).train.steps == 78
    assert cli.parse("train", ["--train.steps", "79", "--task", "tree"]).train.steps == 79
    _, out, _ = run(capsys, "compare", "--task", "tree", "--help")
    assert "(default: 77)" in out
    assert "(default: 2,5)" in out


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_config_that_was_written_is_read_again(capsys, tmp_path, call):
    name, *words = call
    config = cli.parse(name, words)
    assert cli.parse(name, ["--config", written(tmp_path, to_yaml(config))]) == config
    code, out, _ = run(capsys, *call, "--print_config")
    assert (code, out) == (0, to_yaml(config))


def test_values_far_from_the_defaults_are_read_again_too(tmp_path):
    config = CompareConfig(
        TreeOptions(objective="leaf"), ("umbral",), (5, 6), (9,), ModelOptions(gamma=0.1, learn_gamma=False),
        TrainOptions(lr=1e-7, clip=None, patience=3), out="a folder/with: signs", jobs=1, quiet=True,
    )  # fmt: skip
    assert cli.parse("compare", ["--config", written(tmp_path, to_yaml(config))]) == config


@pytest.mark.parametrize("call", [call for call in CALLS if len(call) > 1], ids=" ".join)
def test_help_shows_the_flags_of_the_chosen_task_with_their_defaults(capsys, call):
    code, out, _ = run(capsys, *call, "--help")
    assert code == 0
    task = call[-1]
    assert "--task NAME" in out
    assert " ".join(TASKS[task].__doc__.split()) in " ".join(out.split())
    assert f"coneheads {call[0]} --task NAME --help" in " ".join(out.split())
    for flag in flags(cli.COMMANDS[call[0]].config, {"task": task}).values():
        assert re.search(rf"^  (-\w, )?--{flag.spelled}\b", out, re.MULTILINE), flag
    mine = set(flags(TrainConfig, {"task": task}))
    for other in choices(TrainConfig)["task"]:
        for key in set(flags(TrainConfig, {"task": other})) - mine:
            assert f"--{key} " not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--train.lr", "fast"], "--train.lr: expected float; got 'fast'"),
        (["--train.lr"], "--train.lr: expected a value"),
        (["--train.lr", "--seed", "1"], "--train.lr: expected a value"),
        (["--train.steps", "0"], "--train.steps: must be at least 1; got 0"),
        (["--train.clip", "none"], "--train.clip: expected float | null; got 'none'"),
        (["--model.qk_norm=perhaps"], "--model.qk_norm: expected bool | null; got 'perhaps'"),
        (["--task"], "--task: expected a value"),
        (["--task.symbols", "3"], "there is no flag '--task.symbols' of kin; it is one of the task 'tree'"),
        (["--config"], "--config: expected a value"),
        (["-z"], "there is no flag '-z'"),
        (["--no_seed"], "there is no flag '--no_seed'"),
        (["--task", "tree", "kin"], "unrecognized arguments: kin"),
    ],
)
def test_wrong_flags_are_told_in_one_sentence(capsys, arguments, part):
    code, out, complaint = run(capsys, "train", *arguments)
    assert (code, out) == (2, "")
    assert part in complaint
    assert complaint.splitlines()[1:] == ["See coneheads train --help"]


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["train", "--train.lrr", "1"], "--train.lr"),
        (["train", "--model.scroe", "dot"], "--model.score"),
        (["train", "--model.score", "dott"], "dot"),
        (["train", "--task", "kn"], "kin"),
        (["train", "--task=tre", "--help"], "tree"),
        (["train", "--lr", "0.1"], "--train.lr"),
        (["train", "--no_tensorboard"], "--no_train.tensorboard"),
        (["compare", "--train.decay", "cosin"], "cosine"),
        (["compare", "--score", "dot"], "--scores"),
    ],
)
def test_a_mistyped_flag_or_choice_of_a_section_gets_the_nearest_guess(capsys, arguments, guess):
    code, out, complaint = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert f"did you mean '{guess}'?" in complaint


def test_a_comparison_says_what_stands_for_the_flags_it_lacks(capsys):
    _, _, complaint = run(capsys, "compare", "--model.score", "dot")
    assert "there is no flag '--model.score'; this command has '--scores' instead" in complaint


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train: {lrr: 1}", "the config has 'train.lrr', which is no flag; did you mean 'train.lr'?"),
        ("task: kn", "--task: 'kn' is not one of kin, tree, listops, cora, citeseer, pubmed, ppi; did you mean 'kin'?"),
        ("model: {score: dott}", "--model.score: 'dott' is not one of"),
        ("train: {steps: many}", "--train.steps: expected int; got 'many'"),
        ("train: {steps: 0}", "--train.steps: must be at least 1; got 0"),
        ("train: [1]", "train: expected its flags and their values"),
        ("task: {name: tree, nodes: 3}", "'task.nodes', which is no flag of tree; it is one of the task 'kin'"),
        ("- 1", "expected flags and their values"),
        ("train: {", "is not YAML: while parsing"),
    ],
)
def test_wrong_files_are_told_in_one_sentence(capsys, tmp_path, text, part):
    code, _, complaint = run(capsys, "train", "--config", written(tmp_path, text))
    assert code == 2
    assert part in complaint
    assert complaint.splitlines()[1:] == ["See coneheads train --help"]


def test_a_file_that_cannot_be_read_is_named(capsys, tmp_path):
    code, _, complaint = run(capsys, "train", "--config", str(tmp_path))
    assert code == 2
    assert f"--config: {tmp_path} cannot be read" in complaint
