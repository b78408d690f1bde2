"""``coneheads bench --graph``: layers on graphs beside those of torch_geometric, checked, timed in turns, weighed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util

import torch

from coneheads.lab import machine
from coneheads.lab.bench import results_folder, warn_of_load, write_config
from coneheads.lab.commands import BenchConfig
from coneheads.lab.config import Failed
from coneheads.lab.speed import graphs, memory, timing
from coneheads.lab.speed.graphs import Graph, GraphResult, GraphRound, GraphRow, GraphRun
from coneheads.lab.speed.results import Writer
from coneheads.lab.speed.screen import Screen, milliseconds

# for the repetitions of a candidate in a row, unless told
SECONDS = 5.0
HEADER = ["candidate", "layer", "median ms", "20-80 %", "of PyG", "peak MB", "error"]


class GraphBench:
    """One benchmark on graphs from its plan to its record."""

    def __init__(self, config: BenchConfig) -> None:
        if importlib.util.find_spec("torch_geometric") is None:
            raise Failed('this needs torch_geometric, which is not installed: pip install "coneheads[pyg]"')
        from coneheads.lab.speed import graphs_layers, graphs_parity  # which import it

        self.layers, self.parity = graphs_layers, graphs_parity
        self.config = config
        self.rounds = graphs.rounds()
        name = "graph"
        if config.nodes is not None and config.edges is not None:
            width = config.heads * config.size
            graph = Graph("random", config.nodes, config.edges, width, config.heads, config.size)
            self.rounds = graphs.layer_rounds(graph, config.threads or torch.get_num_threads())
            name = f"graph-{config.nodes}-{config.edges}"
        self.machine = machine.this_machine()
        self.record = Writer(results_folder(config) / f"{config.name or name}.csv")
        self.rows: list[GraphRow] = []
        self.errors: dict[GraphRun, float] = {}
        present = machine.memory_bytes()
        runs = [run for round_ in self.rounds for run in round_]
        self.reasons = {run: reason for run in runs if (reason := graphs.why_not(run, present))}

    def run(self) -> int:
        steps = sum(map(len, self.rounds))
        with contextlib.ExitStack() as stack:
            screen = stack.enter_context(Screen(steps=2 * steps))
            weigh = self.config.memory and memory.supported()
            server = memory.MemoryServer("coneheads.lab.speed.graphs_memory") if weigh else None
            if server:
                stack.enter_context(server)
            try:
                for round_ in self.rounds:
                    self._check(round_, screen)
                worst = max(self.errors, key=self.errors.__getitem__)
                screen.say(
                    f"parity holds: {len(self.errors)} runs agree with float64; the largest error is "
                    f"{self.errors[worst]:.0e}, of {worst.candidate}, {worst.layer} on {worst.graph}"
                )
                for round_ in self.rounds:
                    results = self._timed(round_, screen)
                    if self.config.memory and round_[0].pass_ != "forward":
                        results = {run: self._weighed(run, result, screen, server) for run, result in results.items()}
                    self._keep(results, screen)
            except KeyboardInterrupt:
                screen.say(f"interrupted: {self.record.count} rows are in {self.record.path}")
                raise
        if self.config.nodes is None:
            screen.verdicts(graphs.verdicts(self.rows))
        warn_of_load(screen, [row.result.other_load for row in self.rows])
        screen.say(f"written: {self.record.path}, {write_config(self.config, self.record.path)}")
        return 0

    def _check(self, round_: GraphRound, screen: Screen) -> None:
        """The parity gate: raises if one run is wrong, before anything is timed."""
        problem = self.layers.Problem(round_[0])
        for run in round_:
            screen.doing(f"checking {run.candidate}, {run.layer} on {run.graph}", 1)
            if run in self.reasons:
                continue
            # Forward is checked with backward, and both are in the plan.
            whole = dataclasses.replace(run, pass_="forward_backward") if run.pass_ == "forward" else run
            if whole not in self.errors:
                self.errors[whole] = self.parity.largest_error(whole, problem)
            self.errors[run] = self.errors[whole]

    def _timed(self, round_: GraphRound, screen: Screen) -> dict[GraphRun, GraphResult]:
        problem = self.layers.Problem(round_[0])
        able = [run for run in round_ if run not in self.reasons]
        screen.doing(f"timing {round_[0].work} on {round_[0].graph}")
        calls = {run: self.layers.call_of(run, problem) for run in able}
        seconds = SECONDS if self.config.seconds is None else self.config.seconds
        others = timing.OtherLoad()
        times = timing.interleaved(calls, seconds, between=screen.keep_alive)
        load = others.share()
        screen.doing("", steps=len(round_))
        results = {run: GraphResult(note=self.reasons.get(run, "")) for run in round_}
        for run, found in times.items():
            results[run] = GraphResult(
                median_ms=found.median,
                p20_ms=found.p20,
                p80_ms=found.p80,
                repetitions=found.repetitions,
                parity_error=self.errors[run],
                other_load=load,
            )
        return graphs.with_ratios(results)

    def _weighed(
        self, run: GraphRun, result: GraphResult, screen: Screen, server: memory.MemoryServer | None
    ) -> GraphResult:
        if run in self.reasons:
            return result
        screen.doing(f"weighing {run.candidate}, {run.layer} on {run.graph}")
        peak = server.peak_mb(run) if server else "n/a: peak memory is measured on Linux alone"
        if isinstance(peak, str):
            return dataclasses.replace(result, note=peak)
        return dataclasses.replace(result, peak_mb=peak)

    def _keep(self, results: dict[GraphRun, GraphResult], screen: Screen) -> None:
        rows = [GraphRow(run, result, self.machine) for run, result in results.items()]
        self.record.write(rows)
        self.rows += rows
        screen.table(f"{rows[0].run.sizes}, {rows[0].run.work}", HEADER, [row_cells(row) for row in rows])


def row_cells(row: GraphRow) -> list[str]:
    run, result = row.run, row.result
    timed = result.median_ms is not None
    return [
        run.candidate,
        run.layer,
        milliseconds(result.median_ms) if timed else f"n/a: {result.note}",
        f"{milliseconds(result.p20_ms)}-{milliseconds(result.p80_ms)}" if timed else "",
        "" if result.ratio_to_pyg is None else f"{result.ratio_to_pyg:.2f}",
        "" if result.peak_mb is None else f"{result.peak_mb:.1f}",
        "" if result.parity_error is None else f"{result.parity_error:.0e}",
    ]
