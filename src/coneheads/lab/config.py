"""What each command can be told. A field is at once a flag, a key of the YAML file and an entry of the record.

No torch in this file: ``--help`` reads it, and has to answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PASSES = ("forward", "forward_backward", "backward")
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


def option(default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    """A field of a command: its default, its help, and what it may be."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "least": least})


@dataclass(frozen=True)
class Config:
    """Base of the commands. The first line of a docstring is the command's line in ``coneheads --help``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if field.metadata["choices"]:
                    check_choice(field.name, one, field.metadata["choices"])
                least = field.metadata["least"]
                if least is not None and one is not None and one < least:
                    raise WrongUse(f"--{field.name}: must be at least {least:g}; got {one:g}")


@dataclass(frozen=True)
class BenchConfig(Config):
    """Time and weigh attention: every backend beside SDPA and other ways to write it, after a check that all agree.

    Rows go to a CSV as they are measured. The preset "lengths" goes through lengths of one size and draws them; the
    preset "targets" measures what the project promises and says for each promise whether it holds.
    """

    preset: str = option("lengths", "what to measure: lengths or targets", choices=("lengths", "targets"))
    scores: tuple[str, ...] = option(("penumbral",), f"of {', '.join(SCORES)}", choices=SCORES)
    lengths: tuple[int, ...] = option((128, 256, 512, 1024), "L, and S: queries and keys", least=1)
    batch: int = option(1, "B", least=1)
    heads: int = option(2, "H", least=1)
    size: int = option(64, "E: features of a query or key", least=2)
    value_size: int = option(64, "Ev: features of a value; SDPA runs with E = Ev = this", least=1)
    dtype: str = option("float32", f"of {', '.join(DTYPES)}", choices=DTYPES)
    causal: bool = option(False, "a query sees the keys up to its own place")
    passes: tuple[str, ...] = option(("forward", "forward_backward"), f"of {', '.join(PASSES)}", choices=PASSES)
    candidates: tuple[str, ...] = option(
        (), "of sdpa, authors, plain, compiled, flex and the backends; empty: all but reference. SDPA always runs"
    )
    compiled_lengths: tuple[int, ...] = option(
        (1024,), "the lengths that compiled and flex run at: each takes half a minute to compile", least=1
    )
    seconds: float | None = option(
        None, "for the repetitions of a candidate in a row, of which 3 are made at least; null: 0.4, and 2 for targets",
        least=0,
    )  # fmt: skip
    threads: int | None = option(None, "of the processor; null: as many as torch takes, and 2 for targets", least=1)
    memory: bool = option(True, "measure peak memory too (Linux)")
    plot: bool = option(True, "draw time and memory against L, if there are several lengths")
    out: str | None = option(None, "folder of the results; null: benchmarks/results in a checkout, else outputs")
    name: str | None = option(None, "name of the results; null: that of the preset")

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("scores", "lengths", "passes"):
            if not getattr(self, flag):
                raise WrongUse(f"--{flag}: name at least one")
        if self.preset == "targets":
            fixed = ("scores", "lengths", "batch", "heads", "size", "value_size", "dtype", "causal", "passes",
                     "candidates", "compiled_lengths", "threads")  # fmt: skip
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for flag in fixed:
                if getattr(self, flag) != defaults[flag]:
                    raise WrongUse(f"--{flag}: the preset 'targets' measures fixed rows; leave it out")


@dataclass(frozen=True)
class InfoConfig(Config):
    """Versions, processor, and the backends with what each can do here and what is missing."""

    json: bool = option(False, "print JSON")
