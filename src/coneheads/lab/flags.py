"""Flags and YAML files, read into the config of a command by jsonargparse; and the help of a command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader

from coneheads.lab import config as configs
from coneheads.lab.config import Config, Flag, WrongUse

METAVARS = {int: "N", float: "X", str: "NAME"}


def parse(program: str, cls: type[Config], arguments: list[str]) -> Config | None:
    """The config that the arguments make; later ones count. ``--help`` and ``--print_config`` print, and give None."""
    arguments = [_with_underscores(word) for word in arguments]
    files, chosen = _first_look(cls, arguments)
    known = configs.flags(cls, chosen)
    parser = _parser(program, cls, chosen, known)
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return None
    try:
        found = parser.parse_args(list(_normalised(cls, chosen, arguments, files)))
    except argparse.ArgumentError as error:
        raise WrongUse(_explained(str(error), known)) from None
    config = configs.build(cls, chosen, {key: found[key] for key in known})
    if found.print_config:
        print(configs.to_yaml(config), end="")
        return None
    return config


def _with_underscores(word: str) -> str:
    """--self-test is --self_test: both habits are common.

    >>> _with_underscores("--self-test=a-b"), _with_underscores("-1")
    ('--self_test=a-b', '-1')
    """
    flag, equals, value = word.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value if flag.startswith("--") else word


def _first_look(cls: type[Config], arguments: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The YAML files that the arguments name, and what they and the flags choose: that decides what flags there are."""
    files: dict[str, dict[str, Any]] = {}
    chosen: dict[str, str] = {}
    sections = configs.choices(cls)
    for index, word in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        flag, equals, value = word.partition("=")
        value = value if equals else following
        name = flag[2:].removesuffix(".name")
        if flag == "--config" and value:
            files[value] = _read(cls, value)
            chosen |= {name: files[value][f"{name}.name"] for name in sections if f"{name}.name" in files[value]}
        elif flag.startswith("--") and name in sections and value and not _is_flag(value):
            configs.check_choice(name, value, sections[name])
            chosen[name] = value
    for name, given in files.items():
        for choice in sections:
            # what a file says of another task than the one that was chosen later is of no use
            if given.get(f"{choice}.name", chosen.get(choice)) != chosen.get(choice):
                files[name] = {key: value for key, value in given.items() if not key.startswith(f"{choice}.")}
        with _naming(name):
            configs.check(cls, chosen, files[name])
    return files, chosen


def _read(cls: type[Config], name: str) -> dict[str, Any]:
    """A YAML file by full keys."""
    try:
        content = get_loader("yaml")(Path(name).read_text())  # which also knows 1e-3, unlike PyYAML
    except FileNotFoundError:
        raise WrongUse(f"--config: file does not exist: {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"--config: {name} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise WrongUse(f"--config: {name} is not YAML: {' '.join(str(error).split())}") from None
    with _naming(name):
        given = configs.flat(cls, {} if content is None else content)
        configs.chosen_in(cls, given)
    return given


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Says in which file something is wrong."""
    try:
        yield
    except WrongUse as error:
        raise WrongUse(f"{name}: {error}") from None


def _normalised(
    cls: type[Config], chosen: dict[str, str], arguments: list[str], files: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """The arguments as ``--key=value``, the one form that jsonargparse is given.

    Known are dashes for underscores, lists as ``a,b`` or ``a b``, ``--flag`` and ``--no_flag``, letters for flags.
    """
    known = {f"--{flag.spelled}": flag for flag in configs.flags(cls, chosen).values()}
    known |= {f"--{flag.key}": flag for flag in known.values()}
    known |= {f"-{flag.short}": flag for flag in known.values() if flag.short}
    negated = {f"--no_{flag.spelled}": flag for flag in known.values() if _is_switch(flag)}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            raise WrongUse(f"unrecognized arguments: {word}")
        name, equals, value = word.partition("=")
        name = re.sub(r"(?<=\w)-", "_", name)
        if name in negated and not equals:
            yield f"--{negated[name].key}=false"
        elif name == "--print_config":
            yield name
        elif name == "--config":
            file = value if equals else _taken(name, rest)
            yield f"--config={json.dumps(files[file], default=str)}"
        elif name not in known:
            raise WrongUse(f"there is no flag {name!r}{_guess(name, cls, chosen, negated)}")
        else:
            flag = known[name]
            if typing.get_origin(flag.type) is tuple:
                value = _list([value] if equals else [], name, rest)
            elif not equals and _is_switch(flag):
                value = rest.pop(0) if rest and rest[0].lower() in ("true", "false", "null") else "true"
            elif not equals:
                value = _taken(name, rest)
            yield f"--{flag.key}={value}"


def _is_flag(word: str) -> bool:
    """Whether a word is a flag, and neither a value nor a negative number."""
    return re.match(r"--?[A-Za-z]", word) is not None


def _is_switch(flag: Flag) -> bool:
    return flag.type is bool or bool in typing.get_args(flag.type)


def _taken(name: str, rest: list[str]) -> str:
    if not rest or _is_flag(rest[0]):
        raise WrongUse(f"{name}: expected a value")
    return rest.pop(0)


def _list(values: list[str], name: str, rest: list[str]) -> str:
    while rest and not _is_flag(rest[0]):
        values.append(rest.pop(0))
    if not values:
        raise WrongUse(f"{name}: expected at least one value")
    words = [word for text in values for word in re.split(r"[,\s]+", text.strip("[] ")) if word]
    return f"[{', '.join(words)}]"


def _guess(name: str, cls: type[Config], chosen: dict[str, str], negated: dict[str, Flag]) -> str:
    if name.startswith("--no_"):
        return configs.nearest(name, negated)
    return configs.no_such_flag(name, cls, chosen)


def _explained(message: str, known: dict[str, Flag]) -> str:
    """jsonargparse's message in one line, in the words of the flags."""
    message = " ".join(message.split())
    if found := re.fullmatch(r"Parser key \"([\w.]+)\": (.*)", message):
        flag, reason = known[found[1]], found[2]
        if value := re.search(r"(?:Got|Given) value: (.*)", reason):
            return f"--{flag.spelled}: expected {flag.expected}; got {value[1]!r}"
        return f"--{flag.spelled}: {reason[:1].lower()}{reason[1:]}"
    return message


def _parser(program: str, cls: type[Config], chosen: dict[str, str], known: dict[str, Flag]) -> ArgumentParser:
    parser = ArgumentParser(
        prog=program,
        usage=" ".join(
            [program, *(f"[--{name} NAME]" for name in configs.choices(cls)), "[--config FILE] [--flag value ...]"]
        ),
        description=inspect.getdoc(cls),
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=_Help,
        print_config=None,
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="a YAML file of these flags; later flags override it"
    )
    parser.add_argument("--print_config", action="store_true", help="print all flags as such a file, and exit")
    groups = {"": parser}
    for field in dataclasses.fields(cls):
        if configs.is_section(field):
            groups[field.name] = _group(parser, program, field, chosen)
    for flag in known.values():
        section, dot, _ = flag.key.rpartition(".")
        short = [f"-{flag.short}"] if flag.short else []
        groups[section if dot else ""].add_argument(
            *short, f"--{flag.key}", type=flag.type, default=flag.default, metavar=_metavar(flag),
            help=f"{flag.help} (default: {_shown(flag.default)})",
        )  # fmt: skip
    return parser


def _group(parser: ArgumentParser, program: str, field: dataclasses.Field[Any], chosen: dict[str, str]) -> Any:
    """The part of the help that a section has."""
    name, choices = field.name, field.metadata["chosen_from"]
    if not choices:
        return parser.add_argument_group(name, _plain(field.metadata["default"]))
    cls = choices[chosen[name]] if name in chosen else field.metadata["default"]
    here = next(choice for choice, one in choices.items() if one is cls)
    others = " and ".join(choice for choice in choices if choice != here)
    text = f"{_plain(cls)} {others} have other flags, and other defaults here: {program} --{name} NAME --help"
    return parser.add_argument_group(f"{name} {here}", text)


def _plain(cls: type[Config]) -> str:
    """The docstring without its marks."""
    return (inspect.getdoc(cls) or "").replace("``", "")


def _metavar(flag: Flag) -> str:
    """What stands for the value: N of a whole number, X of any number, N,N of a list; nothing for a switch."""
    if _is_switch(flag):
        return ""
    (inner,) = {one for one in (flag.type, *typing.get_args(flag.type)) if one in METAVARS}
    return f"{METAVARS[inner]},{METAVARS[inner]}" if typing.get_origin(flag.type) is tuple else METAVARS[inner]


def _shown(value: object) -> str:
    """A default as one would write it after its flag."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}" or "none"


class _Help(DefaultHelpFormatter):
    """Flags in one column and what they mean in the other; the texts already say all there is to say."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help or ""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        *short, name = action.option_strings
        name = name.removesuffix(".name")  # --task chooses the value of task.name
        forms = [*short, f"{name} {action.metavar}" if action.metavar else name]
        if action.metavar == "" and action.default is not False:
            forms.append(f"--no_{name[2:]}")
        return ", ".join(forms)
