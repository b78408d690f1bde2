"""``coneheads COMMAND``: finds the command, reads its flags, runs it. Exit codes: 0 done, 1 failed, 2 wrong use.

A command is a line of COMMANDS, a dataclass in config.py and a module with ``run(config) -> int``. Modules are imported
when their command runs, and not before: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys
import typing
from typing import TYPE_CHECKING, Any, NamedTuple

from coneheads._version import __version__
from coneheads.lab.commands import BenchConfig, InfoConfig
from coneheads.lab.config import Config, Failed, WrongUse, nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


class Command(NamedTuple):
    config: type[Config]
    module: str


COMMANDS = {
    "bench": Command(BenchConfig, "coneheads.lab.bench"),
    "info": Command(InfoConfig, "coneheads.lab.info"),
}
# the packages of the extra `lab`, whose absence is told in one sentence
EXTRA = ("jsonargparse", "yaml", "rich", "matplotlib", "numpy")
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    try:
        if name in ("-h", "--help", "help"):
            print(overview())
            return 0
        if name == "--version":
            print(f"coneheads {__version__}")
            return 0
        if name not in COMMANDS:
            raise WrongUse(f"there is no command {name!r}{nearest(name, COMMANDS)}")
        config = parse(name, arguments[1:])
        return int(importlib.import_module(COMMANDS[name].module).run(config))
    except WrongUse as error:
        hint = f"coneheads {name} --help" if name in COMMANDS else "coneheads --help"
        return _report(f"{error}\nSee {hint}", 2)
    except Failed as error:
        return _report(str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        return _report(f"this needs {package}, which is not installed: pip install 'coneheads[lab]'", 1)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED)


def overview() -> str:
    """What ``coneheads --help`` prints."""
    lines = [f"  {name:8}{_summary(command.config)}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: coneheads COMMAND [--config FILE] [--flag value ...]",
            "",
            "Hierarchy-aware attention for PyTorch.",
            "",
            *lines,
            "",
            "coneheads COMMAND --help lists the flags of a command; coneheads --version prints the version.",
        ]
    )


def parse(name: str, arguments: list[str]) -> Config:
    """The config that the flags and YAML files of a command make; later ones count."""
    cls = COMMANDS[name].config
    parser = _parser(name, cls)
    types = typing.get_type_hints(cls)
    lists = {field.name for field in dataclasses.fields(cls) if typing.get_origin(types[field.name]) is tuple}
    known = {flag for action in parser._actions for flag in action.option_strings}
    try:
        found = parser.parse_args(_normalised(arguments, known, lists))
    except argparse.ArgumentError as error:
        raise WrongUse(_explained(str(error), known, types)) from None
    return cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls)})


def _parser(name: str, cls: type[Config]) -> ArgumentParser:
    from jsonargparse import ActionYesNo, ArgumentParser

    parser = ArgumentParser(prog=f"coneheads {name}", description=cls.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file of these flags; later flags override it")
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag, help = f"--{field.name}", field.metadata["help"]
        if types[field.name] is bool:
            parser.add_argument(flag, action=ActionYesNo, default=field.default, help=help)
        else:
            parser.add_argument(flag, type=types[field.name], default=field.default, help=help)
    return parser


def _normalised(arguments: list[str], known: set[str], lists: set[str]) -> list[str]:
    """Flags with dashes for underscores, and lists as ``a,b`` or ``a b``, in the form that jsonargparse reads."""
    result = []
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            result.append(flag + equals + value)
            continue
        flag = "--" + flag[2:].replace("-", "_")
        if flag not in known:
            raise WrongUse(f"there is no flag {flag!r}{nearest(flag, known)}")
        if flag[2:] in lists:
            values = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            if not values:
                raise WrongUse(f"{flag}: expected at least one value")
            words = [word for text in values for word in re.split(r"[,\s]+", text.strip("[] ")) if word]
            value, equals = f"[{', '.join(words)}]", "="
        result.append(flag + equals + value)
    return result


def _explained(message: str, known: set[str], types: dict[str, Any]) -> str:
    """jsonargparse's message in one line, in the words of the flags, with a guess where a name is unknown."""
    message = " ".join(message.split())
    if found := re.search(r"Option '([^']+)' is not accepted|[Kk]ey '([^']+)' is not expected", message):
        key = found[1] or found[2]
        return f"the config file has {key!r}, which is no flag{nearest(f'--{key}', known).replace('--', '')}"
    if found := re.fullmatch(r"Parser key \"(\w+)\": (.*)", message):
        flag, reason = found[1], found[2]
        if value := re.search(r"(?:Got|Given) value: (.*)", reason):
            expected = re.sub(r"<class '(\w+)'>", r"\1", str(types[flag])).replace("None", "null")
            return f"--{flag}: expected {expected}; got {value[1]!r}"
        return f"--{flag}: {reason[:1].lower()}{reason[1:]}"
    return message


def _summary(cls: type[Config]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _report(message: str, code: int) -> int:
    print(f"coneheads: {message}", file=sys.stderr)
    return code
