"""What each command can be told. A field is at once a flag, a key of the YAML file and an entry of the record.

No torch in this file: ``--help`` reads it, and has to answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float64", "bfloat16", "float16")
SCORES = (
    "penumbral", "umbral", "penumbral_finite", "umbral_finite", "laplacian", "half_space", "hyperboloid", "dot",
)  # fmt: skip


class WrongUse(Exception):
    """The command was told something it cannot do: exit code 2."""


class Failed(Exception):
    """The command could not be done: exit code 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"``, or nothing if no known word is near.

    >>> nearest("umbrel", ["umbral", "dot"])
    "; did you mean 'umbral'?"
    """
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_choice(flag: str, value: str, known: Iterable[str]) -> None:
    """Raises with the nearest guess, unless the value is one of the known ones."""
    known = tuple(known)
    if value not in known:
        raise WrongUse(f"--{flag}: {value!r} is not one of {', '.join(known)}{nearest(value, known)}")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None, short: str | None = None
) -> Any:
    """A field of a command: its default, its help, what it may be, and a letter that stands for it (``-q``)."""
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "least": least, "short": short}
    )


def section(
    default: type[Config],
    help: str,
    *,
    chosen_from: Mapping[str, type[Config]] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Any:
    """A field of a command that is itself a config: its options become flags ``--FIELD.OPTION``.

    chosen_from: classes of which ``--FIELD NAME`` chooses one. leave_out: options that the command does not offer.
    """
    metadata = {"help": help, "section": True, "chosen_from": chosen_from, "leave_out": leave_out}
    return dataclasses.field(default_factory=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Base of the commands. The first line of a docstring is the command's line in ``coneheads --help``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "section" in field.metadata:
                continue
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if field.metadata["choices"] and one is not None:
                    check_choice(field.name, one, field.metadata["choices"])
                least = field.metadata["least"]
                if least is not None and one is not None and one < least:
                    raise WrongUse(f"--{field.name}: must be at least {least:g}; got {one:g}")
