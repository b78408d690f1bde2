"""The report: what its sentences claim, and that its page is whole, safe and readable."""

import dataclasses
import math

import numpy as np

from coneheads.lab.results import Comparison, RunResult

MEANS = {  # by score and size, much like a real comparison
    "dot": {3: 0.74, 4: 0.83, 8: 0.935},
    "laplacian": {3: 0.955, 4: 0.972, 8: 0.99},
    "penumbral": {3: 0.91, 4: 0.95, 8: 0.94},
    "umbral": {3: 0.962, 4: 0.978, 8: 0.993},
}
MACHINE = {"date": "2026-01-31", "commit": "0123456789ab", "torch": "2.13.0", "cpu": "A processor", "cores": 2}


def telemetry(score, source, heads=2, layers=1, queries=1, keys=16):
    cones = score in ("penumbral", "umbral")

    def levels():
        return np.sort(source.uniform(0, 1, 7)).round(4).tolist() if cones else None

    def head():
        found = {"parameters": {"gamma": float(source.uniform(3, 9))}, "entropy": float(source.uniform(0.2, 1.2))}
        found |= {
            "relative_entropy": float(source.uniform(0.05, 0.4)),
            "query_levels": levels(),
            "key_levels": levels(),
        }
        common = 1.0 if score == "umbral" else float(source.uniform(0.3, 0.9))
        return found | {"common_ancestor": common if cones else None,
                        "related": float(source.uniform(0, 0.3)) if cones else None}  # fmt: skip

    def weights():
        scores = source.normal(size=(queries, keys)) * 2 - 0.6 * np.arange(keys)
        return (np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)).round(4).tolist()

    return {
        "examples": 256,
        "quantiles": [0, 5, 25, 50, 75, 95, 100],
        "layers": [{"name": f"{i}.score", "score": score, "heads": [head() for _ in range(heads)]} for i in range(layers)],
        "example": {
            "queries": [f"query{i}" if queries > 1 else "2.0.3.1.1" for i in range(queries)],
            "keys": [f"2.0.{i % 4}.{i % 3}.{i} ({max(0, 4 - i // 3)})" for i in range(keys)],
            "caption": "Query 2.0.3.1.1; keys from nearest to farthest kin. The first key is the answer.",
            "maps": [[weights() for _ in range(heads)] for _ in range(layers)],
        },
    }  # fmt: skip


def comparison(scores=tuple(MEANS), sizes=(3, 4, 8), seeds=(0, 1, 2), **changes):
    source = np.random.default_rng(0)
    shape = {name: changes.pop(name) for name in ("heads", "layers", "queries", "keys") if name in changes}
    runs = []
    for score in scores:
        for size in sizes:
            for seed in seeds:
                value = min(0.999, float(MEANS[score][size] + 0.008 * source.normal()))
                steps = range(100, 1100, 100)
                noise = 0.01 * source.normal(size=10)
                curve = [(step, float(0.17 + (value - 0.17) * (1 - math.exp(-step / 250)) + n))
                         for step, n in zip(steps, noise, strict=True)]  # fmt: skip
                seconds = float(0.005 * (1 + 0.1 * source.uniform()))
                runs.append(RunResult(score, size, seed, value, {"test": {"accuracy": value}}, 66_000 + 130 * size,
                                      seconds, curve, telemetry(score, source, **shape)))  # fmt: skip
    config = {"task": {"name": "kin", "branching": 4, "depth": 5}, "scores": scores, "sizes": sizes, "seeds": seeds}
    made = Comparison(config, "kin", "accuracy", runs, 1.0, 0.17, MACHINE, "coneheads compare --task kin")
    return dataclasses.replace(made, **changes)
