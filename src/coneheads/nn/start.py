"""The temperature that a score starts with inside a module, so that its weights are neither uniform nor one-hot.

``attention(..., score="umbral")`` means the score as the paper has it, gamma = 1. In a layer that has just been
initialised that would give every query a single key (umbral), or all of them alike (finite cones): PyTorch's
projections give features of standard deviation about 0.7, and the scores of such features spread over very different
ranges. So a module that is given a *name* takes the score with this temperature:

    gamma = factor * E^power

chosen such that a query spreads its weights over about 65 % of the keys. docs/integrations.md has the measured table.
A module that is given a score *object* takes it as it is, and the dot product keeps its 1 / sqrt(E).
"""

from __future__ import annotations

from coneheads.scores import Score, resolve

#: factor and power of the temperature, by the name of the score
TEMPERATURE = {
    "penumbral": (28.0, -0.5),
    "umbral": (0.88, -0.5),
    "penumbral_finite": (1.65, 0.5),
    "umbral_finite": (1.65, 0.5),
    "half_space": (3.0, 0.0),
    "hyperboloid": (5.0, 0.0),
    "laplacian": (1.6, 0.0),
}


def temperature_field(score: Score) -> str:
    """The field that multiplies all scores: ``gamma``, ``beta``, or ``scale`` of the dot product.

    >>> temperature_field(resolve("half_space"))
    'beta'
    """
    fields = type(score).__dataclass_fields__
    found = next((name for name in ("gamma", "beta", "scale") if name in fields), None)
    if found is None:
        raise TypeError(f"score {type(score).__name__} has no field 'gamma', 'beta' or 'scale' for its temperature")
    return found


def starting_score(score: Score | str, size: int) -> Score:
    """The score that ``score`` names, with the temperature for features of this size; an object stays as it is.

    >>> starting_score("umbral", 64).gamma
    0.11
    """
    resolved = resolve(score)
    if isinstance(score, Score) or score not in TEMPERATURE:
        return resolved
    factor, power = TEMPERATURE[score]
    return resolved.with_parameters({temperature_field(resolved): factor * size**power})
