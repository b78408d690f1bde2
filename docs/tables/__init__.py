"""The tables of README and docs that come from code, records and results: a function each, which gives its text."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs/results"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def saved_results(name: str, command: str) -> dict[str, Any]:
    """What lies in docs/results, where the command has put it."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name}: write it with {command}")
    return json.loads(path.read_text())
