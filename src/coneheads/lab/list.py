"""``coneheads list``: the tasks, scores and backends there are, and the runs in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coneheads.lab.commands import ListConfig
from coneheads.lab.results import RECORD
from coneheads.lab.tasks import TASKS

Facts = dict[str, Any]


def run(config: ListConfig) -> int:
    found = facts(Path(config.runs))
    print(json.dumps(found, indent=2) if config.json else as_text(found, config.runs))
    return 0


def facts(folder: Path) -> Facts:
    from coneheads.scores import BY_NAME  # torch takes seconds to import

    return {
        "tasks": {name: _first_line(options) for name, options in TASKS.items()},
        "scores": {name: _first_line(score) for name, score in BY_NAME.items()},
        "backends": backends(),
        "runs": [run_facts(path) for path in sorted(folder.rglob(RECORD))],
    }


def backends() -> dict[str, Facts]:
    """What each backend is, and why it cannot run here, if so."""
    from coneheads.backends import BACKENDS, build

    return {
        backend.name: {
            "summary": backend.summary,
            "available": backend.available(),
            "reason": None if backend.available() else build.why_unavailable(),
        }
        for backend in BACKENDS
    }


def run_facts(path: Path) -> Facts:
    """What the record of a run says in short; or what is wrong with the record."""
    folder = str(path.parent)
    try:
        record = json.loads(path.read_text())
        headline = record.get("headline")
        return {
            "folder": folder,
            "task": record["config"]["task"]["name"],
            "score": record["config"]["model"]["score"],
            "size": record["config"]["model"]["qk_dim"],
            "seed": record["config"]["seed"],
            "status": record["status"],
            "steps": record.get("steps"),
            "wall_seconds": record.get("wall_seconds"),
            "headline": headline,
            "value": record.get("metrics", {}).get("test", {}).get(headline),
        }
    except (OSError, ValueError) as error:
        return {"folder": folder, "error": f"{RECORD} cannot be read: {error}"}
    except (KeyError, TypeError, AttributeError) as error:
        return {"folder": folder, "error": f"{RECORD} is not the record of a run ({type(error).__name__}: {error})"}


def as_text(found: Facts, folder: str) -> str:
    lines = ["tasks (coneheads train --task NAME --help lists the flags of one):"]
    lines += columns([[name, text] for name, text in found["tasks"].items()])
    lines += ["", "scores:", *columns([[name, text] for name, text in found["scores"].items()])]
    lines += ["", "backends:"]
    lines += columns(
        [
            [name, backend["summary"] if backend["available"] else f"not here: {backend['reason']}"]
            for name, backend in found["backends"].items()
        ]
    )
    lines += ["", f"runs in {folder}:" if found["runs"] else f"no runs in {folder}"]
    readable = [run for run in found["runs"] if "error" not in run]
    if readable:
        header = ["task", "score", "size", "seed", "status", "steps", "result", "folder"]
        lines += columns([header, *map(cells, readable)])
    lines += [f"  {run['folder']}: {run['error']}" for run in found["runs"] if "error" in run]
    return "\n".join(lines)


def cells(run: Facts) -> list[str]:
    """The row of a run."""
    value = run["value"]
    result = f"{run['headline']} {value:.4f}" if isinstance(value, (int, float)) else "-"
    steps = "-" if run["steps"] is None else str(run["steps"])
    return [*(str(run[name]) for name in ("task", "score", "size", "seed", "status")), steps, result, run["folder"]]


def columns(rows: list[list[str]]) -> list[str]:
    """The rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").splitlines()[0].replace("``", "")
