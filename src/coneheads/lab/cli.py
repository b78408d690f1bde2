"""``coneheads COMMAND``: finds the command, reads its flags, runs it. Exit codes: 0 done, 1 failed, 2 wrong use.

A command is a line of COMMANDS, a dataclass in commands.py and a module with ``run(config) -> int``. Modules are
imported when their command runs, and not before: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from typing import NamedTuple, TextIO

from coneheads._version import __version__
from coneheads.lab.commands import (
    BenchConfig,
    CompareConfig,
    DrawConfig,
    EvaluateConfig,
    InfoConfig,
    ListConfig,
    TrainConfig,
)
from coneheads.lab.config import Config, Failed, WrongUse, nearest


class Command(NamedTuple):
    config: type[Config]
    module: str


COMMANDS = {
    "compare": Command(CompareConfig, "coneheads.lab.compare"),
    "train": Command(TrainConfig, "coneheads.lab.train"),
    "evaluate": Command(EvaluateConfig, "coneheads.lab.evaluate"),
    "bench": Command(BenchConfig, "coneheads.lab.bench"),
    "draw": Command(DrawConfig, "coneheads.lab.draw"),
    "info": Command(InfoConfig, "coneheads.lab.info"),
    "list": Command(ListConfig, "coneheads.lab.list"),
}
# the packages of the extra `lab`, whose absence is told in one sentence
EXTRA = (
    "jsonargparse", "yaml", "rich", "matplotlib", "numpy", "lightning_fabric", "safetensors", "tensorboard",
)  # fmt: skip
# what a disk can refuse, told in one sentence too
REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full: the quota is used up",
    errno.EACCES: "permission denied",
    errno.EROFS: "the disk can only be read",
}
# as shells count: 128 and the number of the signal
INTERRUPTED = 130
NOBODY_READS = 141


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `coneheads list | head -1`
        if not any([_is_closed(sys.stdout), _is_closed(sys.stderr)]):
            raise
        return NOBODY_READS


def _run(arguments: list[str]) -> int:
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
        return int(importlib.import_module(COMMANDS[name].module).run(config)) if config else 0
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
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = f": {error.filename}" if error.filename else ""
        return _report(f"{REFUSALS[error.errno]}{where}", 1)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED)


def overview() -> str:
    """What ``coneheads --help`` prints."""
    lines = [f"  {name:10}{_summary(command.config)}" for name, command in COMMANDS.items()]
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


def parse(name: str, arguments: list[str]) -> Config | None:
    """The config that the flags and YAML files of a command make; None if they asked for a text, which was printed."""
    from coneheads.lab import flags  # which needs jsonargparse, of the extra

    return flags.parse(f"coneheads {name}", COMMANDS[name].config, arguments)


def _summary(cls: type[Config]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _report(message: str, code: int) -> int:
    print(f"coneheads: {message}", file=sys.stderr)
    return code


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody reads the pipe any more; it then leads nowhere, lest Python complain when it ends."""
    pipe = select.poll()
    try:
        pipe.register(stream.fileno(), 0)
    except OSError:  # a stream without a file, as in tests
        return False
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True
