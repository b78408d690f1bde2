"""How attention starts: the parameters of a score, and the size of queries and keys before the first step.

Two starts have a name. ``paper`` is what the paper's equations and settings say. ``tuned`` is what docs/tuning.md found
to learn best over the built-in tasks. Every number can be set by a flag of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from coneheads.lab.commands import ModelOptions


@dataclass(frozen=True)
class Start:
    """All that decides how attention starts. Fields as in ModelOptions."""

    gamma: float = 1.0
    learn_gamma: bool = False
    light_height: float = 1.0
    radius: float = 0.1
    learn_radius: bool = False
    height_scale: float = 1.0
    readout: str = "height"
    qk_norm: bool = False
    qk_scale: float = 1.0
    height_spread: float = 1.0
    height_start: float = 0.0


PAPER = Start()
TUNED = {
    "dot": Start(learn_gamma=True),
    "laplacian": Start(learn_gamma=True),
    "penumbral": Start(learn_gamma=True, gamma=8.0, height_scale=0.5),
    "umbral": Start(learn_gamma=True, gamma=2.0, radius=0.3),
}


def resolve(options: ModelOptions) -> Start:
    """The start that the options name, with every number that they give."""
    base = PAPER if options.start == "paper" else TUNED.get(options.score, Start(learn_gamma=True))
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Start)}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
