"""The score objects, and the names that stand for them.

A score turns a query and a key into a number before mask and softmax. Give ``score=`` an object, or the name of one to
take it with its defaults. base.py says what a score is; a new one is a class in one of the files listed here.
"""

from __future__ import annotations

from coneheads import _checks
from coneheads.scores import cones, distances, dot, finite_cones
from coneheads.scores.base import Score
from coneheads.scores.concatenation import Concatenation
from coneheads.scores.cones import Penumbral, Umbral
from coneheads.scores.distances import HalfSpaceDistance, HyperboloidDistance, Laplacian
from coneheads.scores.dot import DotProduct
from coneheads.scores.finite_cones import FinitePenumbral, FiniteUmbral

__all__ = [
    "BY_NAME",
    "Concatenation",
    "DotProduct",
    "FinitePenumbral",
    "FiniteUmbral",
    "HalfSpaceDistance",
    "HyperboloidDistance",
    "Laplacian",
    "Penumbral",
    "Score",
    "Umbral",
    "resolve",
]

BY_NAME: dict[str, type[Score]] = {
    cls.name: cls for file in (cones, finite_cones, distances, dot) for cls in file.SCORES
}


def resolve(score: Score | str) -> Score:
    """The score object that ``score`` is or names.

    >>> resolve("umbral")
    Umbral(radius=0.1, gamma=1.0, lift='psi', readout='height', height_scale=1.0)
    """
    if isinstance(score, Score):
        return score
    if isinstance(score, type) and issubclass(score, Score):
        raise TypeError(f"score must be an object or a name; got the class {score.__name__}: write {score.__name__}()")
    if not isinstance(score, str):
        names = ", ".join(repr(name) for name in BY_NAME)
        raise TypeError(f"score must be a score object or one of {names}; got {_checks.describe(score)}")
    _checks.one_of("score", score, BY_NAME)
    return BY_NAME[score]()
