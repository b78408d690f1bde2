"""Writes the tables that come from the code into README and docs, between their markers.

    python docs/generate.py            write them
    python docs/generate.py --check    change nothing; exit 1 if one is out of date

A table NAME stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from coneheads.backends import BACKENDS
from coneheads.scores import BY_NAME, Score

ROOT = Path(__file__).resolve().parent.parent


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def scores_table() -> str:
    """Name, object with its defaults, and what it computes: the first line of its docstring."""

    def call(score: type[Score]) -> str:
        fields = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(score))
        return f"`{score.__name__}({fields})`"

    def summary(score: type[Score]) -> str:
        return (score.__doc__ or "").strip().splitlines()[0].replace("``", "`")

    rows = [[f"`{name}`", call(score), summary(score)] for name, score in BY_NAME.items()]
    return markdown_table(["name", "object and its defaults", "what it computes"], rows)


def backends_table() -> str:
    """What the declarations in coneheads.backends say."""
    rows = [
        [
            f"`{backend.name}`",
            backend.summary,
            backend.memory,
            "yes" if backend.second_derivative else "no",
            "yes" if backend.transforms else "no",
            ", ".join(backend.devices) or "every",
            ", ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes),
        ]
        for backend in BACKENDS
    ]
    return markdown_table(
        ["name", "how", "memory beside inputs", "second derivative", "`torch.func`", "devices", "dtypes"], rows
    )


def with_table(text: str, name: str, table: str) -> str:
    """The text with the table of that name replaced."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no pair of markers {begin} ... {end}")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


TABLES = {"README.md": {"scores": scores_table, "backends": backends_table}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for file, tables in TABLES.items():
        old = new = (ROOT / file).read_text()
        for name, table in tables.items():
            new = with_table(new, name, table())
        if new != old:
            stale.append(file)
            if not check:
                (ROOT / file).write_text(new)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` or `python docs/generate.py`", file=sys.stderr)
        return 1
    print("tables are up to date" if not stale else f"wrote {', '.join(stale)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
