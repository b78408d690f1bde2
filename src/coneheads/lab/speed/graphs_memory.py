"""Peak memory of a run on a graph, beside features, edges and parameters: what memory.py is for dense attention."""

from __future__ import annotations

import dataclasses
import sys

import torch

from coneheads.lab.speed import memory
from coneheads.lab.speed.graphs import GraphRun
from coneheads.lab.speed.graphs_layers import Problem, call_of

# Enough for the code of every step to be loaded, few enough to need no memory to speak of.
WARM_UP_NODES = 64


def measure(run: GraphRun) -> float:
    """Megabytes that one call of the run adds to this process at its peak."""
    torch.set_num_threads(run.threads)
    problem = Problem(run)
    call = call_of(run, problem)
    few = dataclasses.replace(run, graph="random", nodes=WARM_UP_NODES, edges=4 * WARM_UP_NODES)
    call_of(few, Problem(few))()
    return memory.peak_of(call)


if __name__ == "__main__":
    memory.serve(sys.stdin, sys.stdout, lambda fields: measure(GraphRun(**fields)))
