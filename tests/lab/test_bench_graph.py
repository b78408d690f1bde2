"""`coneheads bench --graph`: layers that agree before they are timed, the rows, the record, the promises."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from coneheads.lab import bench_graph, cli
from coneheads.lab.commands import BenchConfig
from coneheads.lab.machine import Machine
from coneheads.lab.speed import graphs, graphs_layers, graphs_parity, results, screen
from coneheads.lab.speed.graphs import (
    EPOCH,
    OURS,
    OURS_DENSE,
    PYG,
    PYG_LAYER_WAYS,
    Graph,
    GraphResult,
    GraphRow,
    GraphRun,
)
from coneheads.lab.speed.memory import supported
from tests.cases import needs_compiler
from tests.test_docs import ROOT, load

SMALL = Graph("random", 60, 300, 12, 2, 4)
TINY = [
    *("bench", "--graph", "--nodes", "60", "--edges", "300", "--heads", "2", "--size", "4"),
    *("--seconds", "0", "--threads", "1"),
]
LAYERS = [
    *((OURS, name) for name in graphs.COUNTERPARTS),
    *((how, name) for name in ("GATConv", "TransformerConv") for how in PYG_LAYER_WAYS),
    ("pyg_sorted", "GATv2Conv"),
]
PROMISED_COLUMNS = {
    "candidate", "layer", "graph", "nodes", "edges", "features", "heads", "size", "pass", "median_ms", "p20_ms",
    "p80_ms", "repetitions", "ratio_to_pyg", "peak_mb", "parity_error", "other_load", "note", "date", "commit",
    "coneheads", "torch", "python", "cpu", "level", "cores", "threads",
}  # fmt: skip
MACHINE = Machine("2026-01-02", "abc123", "0.1.0", "2.13.0", "3.11.7", "A processor", "AVX2", 2)


@pytest.fixture(scope="module")
def small_bench(tmp_path_factory):
    """A whole bench of a random graph with memory, and its rows."""
    folder = tmp_path_factory.mktemp("results")
    assert cli.main([*TINY, "--out", str(folder)]) == 0
    return folder, results.read(folder / "graph-60-300.csv", GraphRow)


@needs_compiler
def test_every_layer_and_pass_has_a_row_with_times_and_ratios(small_bench):
    _, rows = small_bench
    medians = {row.run: row.result.median_ms for row in rows}
    assert len(medians) == len(rows) == 2 * (4 + 2 * 3)
    for row in rows:
        faster = min(medians[dataclasses.replace(row.run.yardstick, candidate=how)] for how in PYG_LAYER_WAYS)
        assert row.result.ratio_to_pyg == pytest.approx(row.result.median_ms / faster, rel=1e-3)
        assert row.result.repetitions >= 3
        assert row.result.parity_error < 1e-5
        assert row.result.note == ""
        assert (row.run.features, row.run.threads) == (8, 1)
    layers = {(row.run.candidate, row.run.layer) for row in rows}
    assert {(OURS, "penumbral"), (OURS, "concatenation"), ("pyg_sorted", "GATv2Conv")} < layers


@needs_compiler
@pytest.mark.skipif(not supported(), reason="Linux alone")
def test_peak_memory_of_forward_and_backward_is_measured(small_bench):
    _, rows = small_bench
    for row in rows:
        assert (row.result.peak_mb is None) == (row.run.pass_ == "forward")


@needs_compiler
def test_the_record_has_the_promised_columns_and_its_config_repeats_the_run(small_bench):
    folder, _ = small_bench
    text = (folder / "graph-60-300.csv").read_text()
    assert set(text.splitlines()[0].split(",")) == PROMISED_COLUMNS
    assert "/" not in text
    again = cli.parse("bench", ["--config", str(folder / "graph-60-300.yaml")])
    assert (again.graph, again.nodes, again.edges, again.heads, again.size) == (True, 60, 300, 2, 4)


@needs_compiler
def test_a_graph_of_ones_own_has_no_verdicts_and_the_fixed_ones_have(monkeypatch, tmp_path, capsys):
    # The graph with Cora's degrees has one size; here the layers on it are left out, which tests below check.
    monkeypatch.setattr(graphs, "LARGE", SMALL)
    monkeypatch.setattr(graphs, "rounds", lambda: [*graphs.layer_rounds(SMALL, 1), graphs.epoch_round(graphs.CORA, 1)])
    monkeypatch.setattr(graphs, "THREADS", 1)
    assert cli.main(["bench", "--graph", "--seconds", "0", "--no_memory", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "parity holds: 27 runs agree with float64" in said
    found = graphs.verdicts(results.read(tmp_path / "graph.csv", GraphRow))
    assert [value is None for _, value in found] == [target.quantity == "memory" for target, _ in found]
    assert "of 7 targets hold" in said
    assert cli.main([*TINY, "--no_memory", "--out", str(tmp_path)]) == 0
    assert "target" not in capsys.readouterr().out


@pytest.mark.parametrize("graph", [SMALL, graphs.CORA], ids=["random", "cora"])
def test_edges_fit_the_graph(graph):
    run = GraphRun(OURS, "dot", *graph)
    edges = graphs_layers.edge_index_of(run)
    assert edges.shape == (2, graph.edges)
    assert 0 <= edges.min() <= edges.max() < graph.nodes
    assert torch.equal(edges, graphs_layers.edge_index_of(run))
    assert graphs_layers.features_of(run).shape == (graph.nodes, graph.features)


def test_the_graph_like_cora_has_its_degrees_its_self_loops_and_its_sparse_features():
    run = GraphRun(OURS, "dot", *graphs.CORA)
    source, target = graphs_layers.edge_index_of(run)
    degrees = torch.bincount(target[: -graphs.CORA.nodes])
    counts = torch.bincount(degrees)
    assert {degree: int(counts[degree]) for degree in counts.nonzero().flatten().tolist()} == graphs_layers.CORA_DEGREES
    assert torch.equal(source[-graphs.CORA.nodes :].sort().values, torch.arange(graphs.CORA.nodes))
    assert torch.equal(source[-graphs.CORA.nodes :], target[-graphs.CORA.nodes :])
    share = (graphs_layers.features_of(run) > 0).float().mean()
    assert share == pytest.approx(0.0127, rel=0.02)


@pytest.mark.parametrize("pass_", ["forward", "forward_backward"])
@pytest.mark.parametrize(("candidate", "layer"), LAYERS)
def test_the_gate_passes_what_is_right(candidate, layer, pass_):
    run = GraphRun(candidate, layer, *SMALL, pass_, 1)
    assert graphs_parity.largest_error(run, graphs_layers.Problem(run)) < 1e-5


@pytest.mark.parametrize(
    ("candidate", "layer"), [(OURS, "concatenation"), (OURS_DENSE, "penumbral"), *((how, "GATConv") for how in PYG)]
)
def test_the_gate_passes_networks_that_are_right(candidate, layer):
    run = GraphRun(candidate, layer, *SMALL, EPOCH, 1)
    assert graphs_parity.largest_error(run, graphs_layers.Problem(run)) < 1e-5


class WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


class Planted(nn.Module):
    """A layer with a fault."""

    def __init__(self, layer, fault):
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, x, edges):
        return self.fault(self.layer(x, edges))


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (lambda out: out + 1e-3, "output"),
        (WrongGradient.apply, "gradient of "),
        (lambda out: out * torch.nan, "output"),
    ],
)
@pytest.mark.parametrize("broken", ["umbral", "GATConv"])
def test_a_wrong_layer_fails_the_gate_and_nothing_is_timed(broken, fault, part, monkeypatch, tmp_path, capsys):
    right, truth = graphs_layers.layer_of, graphs_parity._truth_layer
    monkeypatch.setattr(
        graphs_layers, "layer_of", lambda run: Planted(right(run), fault) if run.layer == broken else right(run)
    )

    def without_fault(run):
        layer, arguments = truth(run)
        return getattr(layer, "layer", layer), arguments

    monkeypatch.setattr(graphs_parity, "_truth_layer", without_fault)
    monkeypatch.setattr(graphs_parity, "_results", _under_plain_names(graphs_parity._results))
    monkeypatch.setattr(bench_graph.timing, "interleaved", lambda *_, **__: pytest.fail("something was timed"))
    assert cli.main([*TINY, "--no_memory", "--out", str(tmp_path)]) == 1
    complaint = capsys.readouterr().err
    assert f", {broken}, random, 60 nodes" in complaint
    assert "parity failed, nothing was timed" in complaint
    assert f"the {part}" in complaint
    assert not list(tmp_path.iterdir())


def _under_plain_names(compute):
    """A planted layer holds the true one, whose parameters it has under longer names."""

    def results_of(*arguments, **others):
        found = compute(*arguments, **others)
        return {name.replace("gradient of layer.", "gradient of "): value for name, value in found.items()}

    return results_of


def test_a_wrong_network_fails_the_gate(monkeypatch):
    right = graphs_layers.network_of
    run = GraphRun(OURS, "concatenation", *SMALL, EPOCH, 1)
    monkeypatch.setattr(
        graphs_layers,
        "network_of",
        lambda one: Planted(right(one), lambda out: out + 1e-2) if one == run else right(one),
    )
    with pytest.raises(graphs_parity.Wrong, match=r"concatenation, random.*the output is off by"):
        graphs_parity.largest_error(run, graphs_layers.Problem(run))


def test_an_epoch_trains_and_then_evaluates_without_dropout():
    problem = graphs_layers.Problem(GraphRun(OURS, "concatenation", *SMALL))
    for candidate, layer in ((OURS, "penumbral"), (OURS_DENSE, "concatenation"), ("pyg_sparse", "GATConv")):
        run = GraphRun(candidate, layer, *SMALL, EPOCH, 1)
        network = graphs_layers.network_of(run)
        before = [value.clone() for value in network.parameters()]
        x, edges = graphs_layers.features_for(run, problem.x), problem.edges_for(candidate)
        logits = graphs_layers._epoch(network, x, edges, SMALL.nodes)()
        assert logits.shape == (SMALL.nodes, graphs_layers.CLASSES)
        assert not any(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True) if b.dim() > 1)
        assert torch.equal(logits, network(x, edges))


def test_the_input_has_a_gradient_unless_it_is_data():
    for graph, count in ((SMALL, 7), (SMALL._replace(name="cora"), 6)):
        run = GraphRun(OURS, "umbral", *graph, "forward_backward", 1)
        assert len(graphs_layers.wanted_of(run, graphs_layers.layer_of(run), torch.ones(60, 12))[0]) == count


def result_of(run: GraphRun) -> GraphResult:
    """PyG takes 10 ms and 100 MB, otherwise 8 ms and 120 MB; ours 4 ms and 30 MB."""
    median, peak = {"pyg": (10.0, 100.0), "pyg_sorted": (8.0, 120.0), "pyg_sparse": (8.0, 120.0)}.get(
        run.candidate, (4.0, 30.0)
    )
    return GraphResult(median, median, median, 5, peak_mb=None if run.pass_ == "forward" else peak)


@pytest.fixture
def record():
    return [
        GraphRow(run, result, MACHINE)
        for round_ in graphs.rounds()
        for run, result in graphs.with_ratios({run: result_of(run) for run in round_}).items()
    ]


def test_every_promise_is_judged_by_the_better_way_of_pyg(record):
    found = {target.what: (value, target.limit) for target, value in graphs.verdicts(record)}
    assert len(found) == 7
    memory = {what: value for what, value in found.items() if "peak memory" in what}
    assert list(memory.values()) == [(0.3, 0.35)] * 2
    assert all(value == 0.5 for what, (value, _) in found.items() if what not in memory)
    limits = {(target.of.layer, target.of.pass_, target.quantity): target.limit for target in graphs.targets()}
    assert limits == {
        ("penumbral", "forward_backward", "time"): 0.5,
        ("umbral", "forward_backward", "time"): 0.5,
        ("penumbral", "forward_backward", "memory"): 0.35,
        ("umbral", "forward_backward", "memory"): 0.35,
        ("concatenation", "forward_backward", "time"): 0.5,
        ("concatenation", EPOCH, "time"): 0.7,
        ("penumbral", EPOCH, "time"): 0.7,
    }


def test_all_that_a_promise_needs_is_measured():
    runs = [run for round_ in graphs.rounds() for run in round_]
    assert len(runs) == len(set(runs))
    for target in graphs.targets():
        assert {target.of, target.to} <= set(runs)
    for round_ in graphs.rounds():
        assert {run.yardstick for run in round_} <= set(round_)
    large = [target.of for target in graphs.targets() if target.of.graph == "random"]
    assert {(run.nodes, run.edges, run.heads, run.size) for run in large} == {(200_000, 3_000_000, 8, 16)}


def test_a_run_that_was_not_measured_leaves_its_promise_open(record):
    rows = [row for row in record if row.run.candidate not in PYG or row.run.graph == "cora"]
    for target, value in graphs.verdicts(rows):
        assert (value is None) == (target.of.graph == "random")
        if value is None:
            assert screen.verdict_cells(target, value)[2:] == ["not measured", "no"]


def test_pyg_is_left_out_where_its_messages_do_not_fit():
    run = GraphRun("pyg", "TransformerConv", *graphs.LARGE)
    assert "about 10 GB, more than 80 %" in graphs.why_not(run, 8 * 2**30)
    assert graphs.why_not(run, 32 * 2**30) == ""
    assert graphs.why_not(dataclasses.replace(run, candidate=OURS), 2**30) == ""


@needs_compiler
def test_what_is_left_out_has_a_row_that_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_graph.machine, "memory_bytes", lambda: 1000)
    assert cli.main([*TINY, "--no_memory", "--out", str(tmp_path), "--name", "mine"]) == 0
    for row in results.read(tmp_path / "mine.csv", GraphRow):
        assert (row.result.median_ms is None) == ("more than 80 % of the memory" in row.result.note)
        assert (row.result.median_ms is None) == (row.run.candidate in PYG)
        assert row.result.ratio_to_pyg is None


def test_the_table_has_every_promise_and_every_layer(record, monkeypatch, tmp_path):
    tables = load(ROOT / "docs/generate.py").of_speed
    monkeypatch.setattr(tables, "MEASURED_GRAPHS", tmp_path / "graph.csv")
    with pytest.raises(FileNotFoundError, match=r"write it with coneheads bench --graph"):
        tables.graphs_table()
    results.Writer(tmp_path / "graph.csv").write(record)
    table = tables.graphs_table()
    assert table.startswith("7 of 7 hold. Medians of 5 repetitions or more, on A processor (AVX2), 2 threads")
    assert "| random | `coneheads` | umbral | 4 | 4 | 0.50 | 30 |" in table
    assert "| cora, epoch | `pyg_sorted` | GATConv |  | 8 | 1.00 | 120 |" in table
    del sys.modules["generate"]


def test_without_kernels_nothing_is_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(graphs_layers.cpp, "unavailable", lambda: "there is no compiler")
    assert cli.main([*TINY, "--no_memory", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("on the kernels of the cpp backend, and there is no compiler\n")
    assert not list(tmp_path.iterdir())


def test_without_torch_geometric_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_graph.importlib.util, "find_spec", lambda name: None)
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 1
    sentence = 'coneheads: this needs torch_geometric, which is not installed: pip install "coneheads[pyg]"\n'
    assert capsys.readouterr() == ("", sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--graph", "--nodes", "0", "--edges", "3"], "--nodes: must be at least 1; got 0"),
        (["--graph", "--nodes", "3", "--edges", "-1"], "--edges: must be at least 1; got -1"),
        (["--graph", "--nodes", "3"], "--edges: a graph has nodes and edges; name both"),
        (["--graph", "--edges", "3"], "--nodes: a graph has nodes and edges; name both"),
        (["--nodes", "3", "--edges", "3"], "--nodes: is of a graph; add --graph"),
        (["--graph", "--heads", "4"], "--heads: --graph measures fixed graphs, unless you name --nodes and --edges"),
        (["--graph", "--lengths", "16"], "--lengths: has no meaning with --graph"),
        (["--graph", "--preset", "targets"], "--preset: has no meaning with --graph"),
        (["--graph", "--no_plot"], "--plot: has no meaning with --graph"),
    ],
)
def test_wrong_use_is_told_in_one_sentence(capsys, arguments, part):
    assert cli.main(["bench", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert part in complaint
    assert complaint.splitlines()[-1] == "See coneheads bench --help"


@needs_compiler
def test_a_graph_may_have_one_node_and_one_edge(tmp_path):
    config = BenchConfig(graph=True, nodes=1, edges=1, size=2, seconds=0.0, threads=1, memory=False, out=str(tmp_path))
    assert bench_graph.GraphBench(config).run() == 0
    assert (tmp_path / "graph-1-1.csv").is_file()


TEN_MILLION = """
import resource, torch, coneheads
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # fails rather than take the memory of others
from coneheads.backends.sorted_edges import SortedEdges
nodes = 500_000
edges = SortedEdges.of(torch.randint(nodes, (2, 10_000_000)), nodes)
tensors = [torch.randn(nodes, 8, 16, requires_grad=True) for _ in range(3)]
out = coneheads.edge_attention(*tensors, edges, score="penumbral", backend="cpp")
gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
assert all(bool(one.isfinite().all()) and bool(one.any()) for one in (out, *gradients))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak has another unit")
@needs_compiler
def test_ten_million_edges_go_forward_and_backward_within_8_GB():
    done = subprocess.run([sys.executable, "-c", TEN_MILLION], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8e9
