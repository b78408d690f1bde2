"""Tables of what docs/studies.py trained."""

from typing import Any

from coneheads.lab.tasks import TASKS
from tables import markdown_table, saved_results

LAB_SCORES = ("dot", "laplacian", "penumbral", "umbral")


def study(name: str) -> dict[str, Any]:
    """What docs/studies.py found."""
    return saved_results(name, f"python docs/studies.py {name}")


def where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"On {machine['cpu']}, torch {machine['torch']}, coneheads {machine['coneheads']} at "
        f"{machine['commit'] or 'no commit'}, {machine['date']}."
    )


def mean_and_spread(row: dict[str, Any]) -> str:
    """As 0.981 ± 0.003, with a note of runs that ended in no number."""
    text = "-" if row["mean"] is None else f"{row['mean']:.3f}"
    if row["std"] is not None:
        text += f" ± {row['std']:.3f}"
    return text + (f" ({row['diverged']} diverged)" if row["diverged"] else "")


def by_size(line: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """The rows of a comparison by size and score."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in line["rows"]:
        found.setdefault(row["size"], {})[row["score"]] = row
    return found


def better_cone(rows: dict[str, dict[str, Any]]) -> str:
    """The cone with the higher mean, its difference to dot product, the wider interval, and the verdict on it."""
    cones = [rows[score] for score in ("penumbral", "umbral") if rows[score]["mean"] is not None]
    best = max(cones, key=lambda row: row["mean"])
    difference = best["difference"]
    interval = difference["student"]
    low, high = interval["low"], interval["high"]
    return f"{best['score']} {difference['mean']:+.3f} [{low:+.3f}, {high:+.3f}], {best['verdict']}"


def scores_by_size(name: str, first: str, *, share: bool = False) -> str:
    """A line for every comparison of a study and size: the scores, and the better cone against dot product.

    share: also the best that can be achieved, where it is known and is not 1.
    """
    found = study(name)
    lines = []
    for line in found["lines"]:
        for size, rows in by_size(line).items():
            cells = [line["label"], str(size), *(mean_and_spread(rows[score]) for score in LAB_SCORES)]
            lines.append(cells + ([f"{line['optimum']:.3f}"] if share else []) + [better_cone(rows)])
    header = [first, "size", *LAB_SCORES, *(["optimum"] if share else []), "better cone - dot, 95 % (Student)"]
    seeds = max(row["n"] + row["diverged"] for line in found["lines"] for row in line["rows"])
    headline = found["lines"][0]["headline"]
    return f"{markdown_table(header, lines)}\n\n{headline.capitalize()} on the test set, {seeds} seeds. {where(found)}"


def compare_table() -> str:
    """README's: the comparison that `coneheads compare` makes without arguments."""
    found = study("demo")
    lines = [
        [str(size), *(mean_and_spread(rows[score]) for score in LAB_SCORES), better_cone(rows)]
        for size, rows in by_size(found["lines"][0]).items()
    ]
    seeds = found["lines"][0]["rows"][0]["n"]
    table = markdown_table(["size of query and key", *LAB_SCORES, "better cone - dot, 95 % (Student)"], lines)
    return f"{table}\n\nAccuracy, mean ± standard deviation over {seeds} seeds. {where(found)}"


def changes_table() -> str:
    """One change at a time: a line for each, a column for each taxonomy and cone."""
    found = study("changes")
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for line in found["lines"]:
        taxonomy, _, change = line["label"].partition(": ")
        for row in line["rows"]:
            cells.setdefault(change, {})[taxonomy, row["score"]] = mean_and_spread(row)
    columns = list(cells[""])
    rows = [
        [f"`{change}`" if change else "none: as tuned", *(values[column] for column in columns)]
        for change, values in cells.items()
    ]
    header = ["change", *(f"{score}, {taxonomy}" for taxonomy, score in columns)]
    return f"{markdown_table(header, rows)}\n\nSize 3, accuracy on the test set, 2 seeds. {where(found)}"


def published_table(name: str) -> str:
    """A line a score: ours, and what the paper has."""
    found = study(name)
    (line,) = found["lines"]
    published = TASKS[name].published
    rows = [
        [
            row["score"],
            mean_and_spread(row),
            f"{published[row['score']]:g}",
            str(row["n"] + row["diverged"]),
            _interval(row["difference"]),
            row["verdict"] or "baseline",
        ]
        for row in line["rows"]
    ]
    header = ["score", f"{line['headline']}, mean ± std", "paper", "seeds", "to dot, 95 % (Student)", "verdict"]
    return f"{markdown_table(header, rows)}\n\n`{line['command']}`\n\n{where(found)}"


def _interval(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return ""
    interval = difference["student"]
    return f"{difference['mean']:+.4f} [{interval['low']:+.4f}, {interval['high']:+.4f}]"


def commands_list() -> str:
    """The commands behind the tables, one a line of theirs."""
    lines = [line["command"] for name in ("taxonomies", "starts", "tree", "changes") for line in study(name)["lines"]]
    return "\n".join(["```", *lines, "```"])
