"""Configs as plain values and back; sections, recipes, and what is said of a key or a value that does not fit."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from coneheads.lab import cli
from coneheads.lab.commands import BenchConfig, CompareConfig, EvaluateConfig, ModelOptions, TrainConfig, TrainOptions
from coneheads.lab.config import (
    Config,
    WrongUse,
    as_dict,
    choices,
    flags,
    from_dict,
    nearest,
    option,
    section,
    to_yaml,
)  # fmt: skip
from coneheads.lab.tasks import TASKS
from coneheads.lab.tasks.options import TreeOptions

PAPER = Path(__file__).parents[2] / "configs/paper"
CONFIGS = [
    from_dict(command.config, {"task": task} if task else {})
    for command in cli.COMMANDS.values()
    for task in choices(command.config).get("task", [None])
]


@dataclass(frozen=True)
class Fine(Config):
    """Small grains."""

    recipe: ClassVar = {"rate": 0.5, "oven.degrees": 240, "of_another_command": 1}

    grains: int = option(100, "how many", least=1)


@dataclass(frozen=True)
class Coarse(Config):
    """Large grains."""

    lumps: tuple[int, ...] = option((3,), "sizes")


@dataclass(frozen=True)
class Oven(Config):
    """Heat."""

    degrees: float = option(180.0, "heat", least=0)
    minutes: int | None = option(None, "how long; null: until done", least=1)
    fan: bool | None = option(None, "blow")
    light: bool = option(False, "see")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.light and self.fan:
            raise WrongUse("--light: not with --fan and --light-hearted people")


@dataclass(frozen=True)
class Bake(Config):
    """Bake bread."""

    flour: Config = section(Coarse, "what of", chosen_from={"coarse": Coarse, "fine": Fine})
    oven: Oven = section(Oven, "the oven", leave_out={"light": "rate"})
    rate: float = option(1.0, "speed", least=0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__}")
def test_a_config_comes_back_from_plain_values_yaml_and_json(config):
    assert from_dict(type(config), as_dict(config)) == config
    assert from_dict(type(config), json.loads(json.dumps(as_dict(config)))) == config
    assert from_dict(type(config), yaml.safe_load(to_yaml(config))) == config


def test_a_config_that_was_changed_comes_back_too():
    train = TrainOptions(lr=1e-5, clip=None, tensorboard=True)
    config = TrainConfig(TreeOptions(depth=3), ModelOptions(gamma=2.0, qk_norm=False), train, out="true", seed=7)
    assert from_dict(TrainConfig, yaml.safe_load(to_yaml(config))) == config
    assert as_dict(config)["task"]["name"] == "tree"
    assert as_dict(CompareConfig())["sizes"] == [3, 4, 8]
    assert "score" not in as_dict(CompareConfig())["model"]
    assert "sizes: [3, 4, 8]\n" in to_yaml(CompareConfig())


def test_a_choice_brings_its_flags_and_its_recipe():
    assert set(flags(Bake)) == {
        "flour.name", "flour.lumps", "oven.degrees", "oven.minutes", "oven.fan", "rate",
    }  # fmt: skip
    fine = flags(Bake, {"flour": "fine"})
    assert "flour.grains" in fine
    assert "flour.lumps" not in fine
    assert (fine["rate"].default, fine["oven.degrees"].default, fine["flour.name"].default) == (0.5, 240, "fine")
    made = from_dict(Bake, {"flour": "fine", "oven": {"degrees": 200}})
    assert made == Bake(Fine(), Oven(200.0), rate=0.5)
    assert isinstance(made.oven.degrees, float)
    assert from_dict(Bake, {"flour": {"name": "fine"}, "rate": 2}).rate == 2
    assert from_dict(Bake, {"oven": None, "flour": {"lumps": [1, 2]}}) == Bake(Coarse((1, 2)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rtae": 1}, "the config has 'rtae', which is no flag; did you mean 'rate'?"),
        ({"oven": {"degree": 1}}, "the config has 'oven.degree', which is no flag; did you mean 'oven.degrees'?"),
        ({"ovn": {"fan": True}}, "the config has 'ovn.fan', which is no flag; did you mean 'oven.fan'?"),
        ({"ovn": {}}, "the config has 'ovn', which is no flag"),
        ({"oven": {"light": True}}, "the config has 'oven.light', which is no flag; this command has 'rate' instead"),
        ({"flour": {"grains": 1}}, "'flour.grains', which is no flag of coarse; it is one of the flour 'fine'"),
        ({"flour": "fne"}, "--flour: 'fne' is not one of coarse, fine; did you mean 'fine'?"),
        ({"flour": {"name": 3}}, "--flour: 3 is not one of coarse, fine"),
        ({"flour": 3}, "flour: expected its flags and their values, as in `flour: {...}`; got 3"),
        ({"oven": "hot"}, "oven: expected its flags and their values"),
        ({"rate": "fast"}, "--rate: expected float; got 'fast'"),
        ({"rate": True}, "--rate: expected float; got True"),
        ({"rate": -1}, "--rate: must be at least 0; got -1"),
        ({"rate": float("nan")}, "--rate: must be at least 0; got nan"),
        ({"oven": {"minutes": 1.5}}, "--oven.minutes: expected int | null; got 1.5"),
        ({"oven": {"minutes": 0}}, "--oven.minutes: must be at least 1; got 0"),
        ({"oven": {"fan": 1}}, "--oven.fan: expected bool | null; got 1"),
        ({"flour": {"lumps": 3}}, "--flour.lumps: expected tuple[int, ...]; got 3"),
        ({"flour": {"lumps": [3, "x"]}}, "--flour.lumps: expected tuple[int, ...]; got [3, 'x']"),
        ([1], "expected flags and their values, as in `seed: 1`; got [1]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_by_its_full_name(given, message):
    with pytest.raises(WrongUse) as caught:
        from_dict(Bake, given)
    assert message in str(caught.value)


def test_a_section_that_objects_has_its_own_flags_named_in_full():
    @dataclass(frozen=True)
    class Whole(Config):
        """All flags."""

        oven: Oven = section(Oven, "the oven")

    with pytest.raises(WrongUse) as caught:
        from_dict(Whole, {"oven": {"light": True, "fan": True}})
    assert str(caught.value) == "--oven.light: not with --oven.fan and --light-hearted people"


def test_recipes_name_flags_that_some_command_has_with_values_that_it_takes():
    for name, task in TASKS.items():
        able = [command.config for command in cli.COMMANDS.values() if "task" in choices(command.config)]
        for key, value in task.recipe.items():
            users = [cls for cls in able if key in flags(cls, {"task": name})]
            assert users, f"the recipe of {name} has {key!r}, which no command has"
            for cls in users:
                from_dict(cls, {"task": {"name": name}, key: value})


def test_every_option_has_a_help_and_a_default_of_its_type():
    for cls in (command.config for command in cli.COMMANDS.values()):
        for task in choices(cls).get("task", [None]):
            known = flags(cls, {"task": task} if task else {})
            assert all(flag.help for flag in known.values())
            from_dict(cls, {flag.key: flag.default for flag in known.values()})


def test_guesses_look_at_the_end_of_a_name_first():
    known = ["--train.lr", "--task.depth", "--model.depth", "--seed"]
    assert nearest("--depth", known) == "; did you mean '--task.depth' or '--model.depth'?"
    assert nearest("--modl.depth", known) == "; did you mean '--task.depth' or '--model.depth'?"
    assert nearest("--sed", known) == "; did you mean '--seed'?"
    assert nearest("--zzz", known) == ""


def test_configs_cannot_be_changed_and_check_themselves():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BenchConfig().batch = 2
    with pytest.raises(WrongUse, match="--checkpoint: 'first' is not one of best, last"):
        EvaluateConfig(checkpoint="first")
    with pytest.raises(WrongUse, match="--seeds: 1, 1 names one twice"):
        CompareConfig(seeds=(1, 1))


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_the_paper_is_complete_and_follows_the_recipe_of_its_task(path):
    given = yaml.safe_load(path.read_text())
    read = from_dict(CompareConfig, given)
    assert as_dict(read) == given, "a flag is missing, or there is one too many"
    recipe = from_dict(CompareConfig, {"task": {"name": path.stem}})
    assert dataclasses.replace(recipe, seeds=read.seeds, out=read.out) == read
    assert len(read.seeds) >= 10
