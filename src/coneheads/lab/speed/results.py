"""The record of a benchmark: a CSV row per run, with all that its numbers depend on, written as soon as it is known."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coneheads.lab.machine import Machine
from coneheads.lab.speed.runs import Result, Run


@dataclass(frozen=True)
class Row:
    run: Run
    result: Result
    machine: Machine


R = TypeVar("R")


class Writer:
    """Appends rows to a file that the first row creates anew: an old record stays until there is something newer.

    Every row is one write, so that a killed run leaves a file that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def write(self, rows: Iterable[Any]) -> None:
        """Rows of one kind: ``Row``, or another class whose fields are classes too."""
        for row in rows:
            lines = [_columns(type(row))] if self.count == 0 else []
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if self.count else os.O_TRUNC)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, flags, 0o644)
            try:
                os.write(file, _csv_text([*lines, _cells(row)]).encode())
            finally:
                os.close(file)
            self.count += 1


def read(path: Path, kind: type[R] = Row) -> list[R]:  # type: ignore[assignment]
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    parts = typing.get_type_hints(kind)
    return [kind(**{name: _from_cells(part, line) for name, part in parts.items()}) for line in lines]


def _columns(kind: type[Any]) -> list[str]:
    """A name that Python keeps for itself has an underscore at its end, which the file does without."""
    parts = typing.get_type_hints(kind).values()
    return [field.name.rstrip("_") for part in parts for field in dataclasses.fields(part)]


def _cells(row: Any) -> list[str]:
    parts = [getattr(row, field.name) for field in dataclasses.fields(row)]
    return [_text(getattr(part, field.name)) for part in parts for field in dataclasses.fields(part)]


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _from_cells(cls: type[Any], line: dict[str, str]) -> Any:
    types_of = typing.get_type_hints(cls)
    return cls(**{f.name: _value(line[f.name.rstrip("_")], types_of[f.name]) for f in dataclasses.fields(cls)})


def _value(text: str, kind: Any) -> object:
    if isinstance(kind, types.UnionType):  # float | None
        return _value(text, typing.get_args(kind)[0]) if text else None
    return text == "True" if kind is bool else kind(text)


def _csv_text(lines: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
