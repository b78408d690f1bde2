"""Tables of what the code declares, and of what the tests know."""

import dataclasses
import importlib
import re

from coneheads.backends import BACKENDS
from coneheads.lab.models.start import PAPER, TUNED, Start
from coneheads.nn.start import TEMPERATURE
from coneheads.scores import BY_NAME, Score
from tables import ROOT, markdown_table

LIBRARIES = {
    "torch_nn": "torch",
    "transformers": "transformers",
    "timm": "timm",
    "diffusers": "diffusers",
    "pyg": "torch-geometric",
}


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
            "yes" if backend.onnx else "no",
            ", ".join(backend.devices) or "every",
            ", ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes),
        ]
        for backend in BACKENDS
    ]
    return markdown_table(
        ["name", "how", "memory beside inputs", "second derivative", "`torch.func`", "ONNX", "devices", "dtypes"], rows
    )


def starts_values_table() -> str:
    """What the two starts are, score by score."""
    fields = [field.name for field in dataclasses.fields(Start)]
    rows = [["`paper`, every score", *(_plain(getattr(PAPER, field)) for field in fields)]]
    rows += [
        [f"`tuned`, {score}", *(_plain(getattr(start, field)) for field in fields)] for score, start in TUNED.items()
    ]
    return markdown_table(["start", *(f"`{field}`" for field in fields)], rows)


def _plain(value: object) -> str:
    return (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def supported_table() -> str:
    """The models that the tests convert, and those that they see refused, by library and the version installed."""
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = []
    for library, package in LIBRARIES.items():
        models = importlib.import_module(f"tests.integrations.{library}_models")
        names = [", ".join(f"`{name}`" for name in getattr(models, found, {})) for found in ("MODELS", "REFUSED")]
        rows.append([f"{package} {pins[package]}", *names])
    return markdown_table(["library", "converted", "refused, with the reason"], rows)


def entropy_table() -> str:
    """The share of keys that a query attends to in a new layer."""
    entropy = importlib.import_module("tests.nn.entropy")

    def start(score: str) -> str:
        if score not in TEMPERATURE:
            return "1 / sqrt(E)"
        factor, power = TEMPERATURE[score]
        return f"{factor:g}" + ({0.5: " sqrt(E)", -0.5: " / sqrt(E)", 0.0: ""}[power])

    rows = [
        [f"`{row.score}`", start(row.score)]
        + [f"{row.started[size]:.2f}" for size in entropy.SIZES]
        + [" / ".join(f"{row.plain[size]:.2f}" for size in entropy.SIZES)]
        for row in entropy.rows()
    ]
    sizes = [f"E = {size}" for size in entropy.SIZES]
    return markdown_table(["score", "gamma at the start", *sizes, "with gamma = 1"], rows)
