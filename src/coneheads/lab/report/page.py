"""The report as one page of HTML: no script, no network, nothing beside it needed."""

from __future__ import annotations

from html import escape
from typing import Any

import yaml  # type: ignore[import-untyped]

from coneheads.lab.report import cones, maps, tables
from coneheads.lab.report.figures import Picture, colour, svg
from coneheads.lab.report.findings import findings, listed
from coneheads.lab.report.style import CSS
from coneheads.lab.results import Comparison
from coneheads.lab.statistics import BETTER, DIVERGED, WORSE, scores_of, summarise

CLASSES = {BETTER: "better", WORSE: "worse", DIVERGED: "worse"}


def page(comparison: Comparison, pictures: dict[str, Picture]) -> str:
    """The whole page. Pictures by their names; a section whose picture is missing is left out."""
    scores = scores_of(comparison)
    title = f"{comparison.task}: {listed(scores)}" if scores else comparison.task
    body = [
        f"<header><p class=kind>attention scores compared on the task</p><h1>{escape(title)}</h1></header>",
        _section("What was found", _bullets(findings(comparison))),
        _section("Table", _table(comparison)),
    ]
    if "sizes" in pictures:
        body.append(_section("Size of query and key", _figure(pictures["sizes"], _sizes_caption(comparison))))
    if "curves" in pictures:
        caption = "Thick: mean over seeds, as far as all go. Thin: each seed; shaded: from the lowest to the highest."
        body.append(_section("Learning curves", _figure(pictures["curves"], caption)))
    if "maps" in pictures:
        example = maps.shown_runs(comparison)[0].telemetry["example"]
        caption = f"{maps.which(comparison)} {example['caption']}"
        body.append(_section("Attention maps", _figure(pictures["maps"], caption, wide=True)))
    telemetry = cones.table(comparison)
    if telemetry:
        body.append(_section("What the cones do", _telemetry(comparison, telemetry, pictures.get("cones"))))
    body.append(_section("How to repeat it", _repeat(comparison)))
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _note(text: str) -> str:
    return f"<p class=note>{_prose(text)}</p>"


def _prose(text: str) -> str:
    """Escaped, and with no line that begins with a per cent sign."""
    return escape(text).replace(" %", "&nbsp;%")


def _bullets(sentences: list[str]) -> str:
    return "<ul class=findings>" + "".join(f"<li>{_prose(text)}</li>" for text in sentences) + "</ul>"


def _table(comparison: Comparison) -> str:
    found = summarise(comparison)
    names = tables.header(comparison)
    verdict = names.index("verdict")
    parts = []
    for size in sorted({row.size for row in found}):
        parts.append(f"<tr class=block><th colspan={len(names)} scope=rowgroup>size {size}</th></tr>")
        for row in (row for row in found if row.size == size):
            line = [escape(cell) for cell in tables.cells(row, comparison)]
            line[0] = _score(row.score)
            line[verdict] = f'<span class="{CLASSES.get(row.verdict, "quiet")}">{line[verdict]}</span>'
            parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>")
    note = (
        f"{comparison.headline} on the test set: mean ± standard deviation over n seeds. The difference to "
        f"{comparison.baseline} is taken seed by seed. It is called better or worse only if both intervals exclude 0, "
        "and within noise otherwise: of few seeds the bootstrap interval is too narrow (of three it is their range), "
        "and Student's takes differences for normal."
    )
    return _grid(names, "".join(parts)) + _note(note)


def _grid(names: list[str], lines: str) -> str:
    heads = "".join(f"<th scope=col{' class=left' if name == 'score' else ''}>{escape(name)}</th>" for name in names)
    return f"<div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"


def _score(score: str) -> str:
    return f'<i class=chip style="background:{colour(score)}"></i>{escape(score)}'


def _sizes_caption(comparison: Comparison) -> str:
    text = "Left: mean and standard deviation; dots: seeds. "
    if len({run.score for run in comparison.runs}) > 1:
        text += "Right: thick bars are bootstrap intervals, thin bars Student's; a bar across 0 is within noise."
    return text


def _figure(picture: Picture, caption: str, wide: bool = False) -> str:
    legend = ""
    if picture.scores:
        legend = "<p class=legend>" + "".join(f"<span>{_score(score)}</span>" for score in picture.scores) + "</p>"
    panels = "".join(f"<div class=panel>{svg(panel)}</div>" for panel in picture.panels)
    kind = "panels wide" if wide else "panels"
    return f'<figure>{legend}<div class="{kind}">{panels}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _telemetry(comparison: Comparison, lines: list[list[str]], picture: Picture | None) -> str:
    parts = []
    for size, score, *numbers in lines:
        rest = (
            "".join(f"<td>{escape(number)}</td>" for number in numbers[:-1]) + f"<td class=long>{escape(numbers[-1])}"
        )
        parts.append(f"<tr><td>{escape(size)}</td><td class=left>{_score(score)}</td>{rest}</tr>")
    examples = next(run.telemetry["examples"] for run in comparison.runs if run.telemetry)
    note = (
        f"Over {examples} examples of the test set; means over heads and seeds. Entropy of the weights is in nats, and "
        "as a share of that of equal weights: 0 % looks at one key, 100 % at all alike. Shares are of pairs of a query "
        "and a key that it sees: with a common ancestor in the order of the cones (under umbral cones all pairs have "
        "one), and of which one is the other's ancestor. Levels are given at 5 / 50 / 95 %; leaves are at the bottom, "
        "the root is above."
    )
    drawn = ""
    if picture and picture.panels:
        shown = maps.shown_runs(comparison)[0]
        caption = (
            f"Size {shown.size}. Marks: mean over seeds; dots: seeds. Levels of seed {shown.seed}: bars hold the "
            "middle half, lines 5 to 95 %; filled: queries, hollow: keys."
        )
        drawn = _figure(picture, caption)
    return _grid(cones.HEADER, "".join(parts)) + _note(note) + drawn


def _repeat(comparison: Comparison) -> str:
    config = yaml.safe_dump(_plain(comparison.config), sort_keys=False, allow_unicode=True)
    entries = [(name, value) for name, value in comparison.machine.items() if value not in ("", None)]
    machine = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in entries)
    return (
        f"<pre class=scroll tabindex=0>{escape(comparison.command)}</pre>"
        f"<details><summary>The whole configuration</summary><pre class=scroll>{escape(config)}</pre></details>"
        f"<dl>{machine}</dl>"
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML knows."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
