"""No speed without being right, on graphs: every layer and network is compared with float64 before anything is timed.

Compared is what will be timed, at its own size: the output of some nodes and the gradients that these cause, of the
parameters and of the input. Truth is the ``reference`` backend in float64, on the part of the graph that leads into
those nodes; for GATConv and TransformerConv that of our layers for concatenation and dot product with the same
parameters. So they must agree with ours. For GATv2Conv, which has no counterpart, truth is itself in float64. Networks
are compared as a whole without dropout: those of torch_geometric and ours for concatenation with one another, ours with
another score with itself in float64. Errors are relative to the largest entry; BOUND is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from coneheads.backends.sorted_edges import SortedEdges
from coneheads.lab.speed import graphs_layers
from coneheads.lab.speed.graphs import COUNTERPARTS, EPOCH, OURS, PYG, GraphRun
from coneheads.lab.speed.graphs_layers import Problem
from coneheads.lab.speed.parity import Wrong

BOUND = 1e-4
NODES = 32


def largest_error(run: GraphRun, problem: Problem) -> float:
    """Raises ``Wrong`` if it is above the bound."""
    torch.set_num_threads(run.threads)
    found = _network_errors(run, problem) if run.pass_ == EPOCH else _layer_errors(run, problem)
    for part, error in found.items():
        if not error <= BOUND:  # NaN is wrong, too
            raise Wrong(
                f"parity failed, nothing was timed: {run.candidate}, {run.layer}, {run.sizes}: the {part} is off by "
                f"{error:.1e} of its largest entry; {BOUND:.0e} is allowed"
            )
    return max(found.values())


def _layer_errors(run: GraphRun, problem: Problem) -> dict[str, float]:
    nodes = torch.linspace(0, run.nodes - 1, NODES).long().unique()
    part, edges, places = _part_into(nodes, problem.edge_index)
    gradient = graphs_layers.upstream_gradient(run)[nodes]
    layer = graphs_layers.layer_of(run)
    got = _results(run, layer, problem.x, problem.edges_for(run.candidate), nodes, gradient)
    truth_layer, arguments = _truth_layer(run)
    form = edges if run.layer == "GATv2Conv" else SortedEdges.of(edges, len(part))
    truth = _results(run, truth_layer.double(), problem.x[part].double(), form, places, gradient, **arguments)
    if "gradient of the input" in got:
        got["gradient of the input"] = got["gradient of the input"][part]
    # The bias of keys shifts all scores of a node alike: its gradient is 0, and has no digits to be compared.
    least = 1e-2 * max(value.abs().max().item() for value in truth.values())
    return {name: _relative(got[name], truth[name], least) for name in truth}


def _truth_layer(run: GraphRun) -> tuple[nn.Module, dict[str, Any]]:
    """Ours with the same parameters, and that it is to take the reference."""
    if run.layer == "GATv2Conv":
        return graphs_layers.layer_of(run), {}
    names = {theirs: ours for ours, theirs in COUNTERPARTS.items()}  # of several, the last: dot
    ours = dataclasses.replace(run, candidate=OURS, layer=names.get(run.layer, run.layer))
    return graphs_layers.layer_of(ours), {"backend": "reference"}


def _part_into(nodes: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes with an edge into the given ones, and these; the edges between, by places in them; the given ones'."""
    edges = edge_index[:, torch.isin(edge_index[1], nodes)]
    part = torch.cat([edges[0], nodes]).unique()
    return part, torch.searchsorted(part, edges), torch.searchsorted(part, nodes)


def _results(
    run: GraphRun, layer: nn.Module, x: Tensor, edges: Any, nodes: Tensor, gradient: Tensor, **arguments: Any
) -> dict[str, Tensor]:
    """Output of the nodes, and, if the run goes backward, the gradients that they cause."""
    wanted, x = graphs_layers.wanted_of(run, layer, x)
    out = layer(x, edges, **arguments)[nodes]
    found = {"output": out.detach()}
    if run.pass_ != "forward":
        names = [f"gradient of {name}" for name, _ in layer.named_parameters() if not name.startswith("lin_skip.")]
        names += ["gradient of the input"] * (len(wanted) - len(names))
        found |= zip(names, torch.autograd.grad(out, wanted, gradient.to(out.dtype)), strict=True)
    return found


def _network_errors(run: GraphRun, problem: Problem) -> dict[str, float]:
    """Of the logits, and of the gradients of the parameters that ours and torch_geometric's both have."""
    truth_run = run
    if run.candidate in PYG or run.layer == "concatenation":
        layer = "concatenation" if run.candidate in PYG else "GATConv"
        truth_run = dataclasses.replace(run, candidate=OURS if run.candidate in PYG else PYG[0], layer=layer)
    network = graphs_layers.network_of(run).eval()
    truth = copy.deepcopy(graphs_layers.network_of(truth_run)).double().eval()
    out = network(graphs_layers.features_for(run, problem.x), problem.edges_for(run.candidate))
    expected = truth(problem.x.double(), problem.edges_for(truth_run.candidate))
    return {"output": _relative(out.detach(), expected.detach()), **_gradient_error(out, network, expected, truth)}


def _gradient_error(out: Tensor, network: nn.Module, expected: Tensor, truth: nn.Module) -> dict[str, float]:
    """Of the biases, which come last and first: their gradients pass through all that is between."""
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    found = []
    for logits, one in ((out, network), (expected, truth)):
        biases = [value for name, value in one.named_parameters() if name.endswith("bias")]
        found.append(torch.autograd.grad(logits, biases, gradient.to(logits.dtype)))
    pairs = zip(*found, strict=True)
    return {f"gradient of bias {number}": _relative(*pair) for number, pair in enumerate(pairs, 1)}


def _relative(got: Tensor, truth: Tensor, least: float = 1e-12) -> float:
    return ((got.double() - truth).abs().amax() / truth.abs().amax().clamp_min(least)).item()
