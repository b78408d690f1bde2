"""``coneheads bench``: check that all candidates agree, time them in turns, weigh them, keep the record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml  # type: ignore[import-untyped]

from coneheads.lab import machine
from coneheads.lab.commands import BenchConfig
from coneheads.lab.speed import formulations, memory, parity, targets, timing
from coneheads.lab.speed.candidates import Candidate, call_of, candidates, chosen, fastest_backend
from coneheads.lab.speed.results import Row, Writer
from coneheads.lab.speed.runs import YARDSTICK, Result, Round, Run, with_yardsticks
from coneheads.lab.speed.screen import Screen

# Below this the load of other programs is that of a machine at rest.
QUIET = 0.1
# for the repetitions of a candidate in a row, unless told
SECONDS = {"lengths": 0.4, "targets": 2.0}


class Plan(NamedTuple):
    rounds: list[Round]
    weighed: list[Run]  # runs whose memory is measured
    promised: list[targets.Target[Run]]


def run(config: BenchConfig) -> int:
    # Compilers otherwise keep helper processes, which would take part in what is measured.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    threads_before = torch.get_num_threads()
    try:
        if config.graph:
            from coneheads.lab import bench_graph  # which needs what other benchmarks do not

            return bench_graph.GraphBench(config).run()
        return Bench(config).run()
    finally:
        torch.set_num_threads(threads_before)


def plan_of(config: BenchConfig, known: dict[str, Candidate]) -> Plan:
    if config.preset == "targets":
        promised = targets.targets(fastest_backend())
        return Plan(targets.rounds(promised), targets.memory_runs(promised) if config.memory else [], promised)
    threads = config.threads or torch.get_num_threads()
    rounds = []
    for length in config.lengths:
        able = [c.name for c in known.values() if not c.compiles or length in config.compiled_lengths]
        sizes = (config.batch, config.heads, length, length, config.size, config.value_size)
        for pass_ in config.passes:
            runs = [
                Run(name, score, *sizes, config.dtype, config.causal, pass_, threads)
                for score in config.scores
                for name in able
            ]
            rounds.append(with_yardsticks(tuple(run.yardstick if run.candidate == YARDSTICK else run for run in runs)))
    return Plan(rounds, [run for round_ in rounds for run in round_] if config.memory else [], [])


class Bench:
    """One benchmark from its plan to its record."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.candidates = candidates() if config.preset == "targets" else chosen(config.candidates)
        self.plan = plan_of(config, self.candidates)
        self.machine = machine.this_machine()
        self.record = Writer(results_folder(config) / f"{config.name or config.preset}.csv")
        self.rows: list[Row] = []
        self.draw: Callable[[list[Row], Path], None] | None = None
        if config.plot and not self.plan.promised and len(set(config.lengths)) > 1:
            from coneheads.lab.speed import plot  # matplotlib takes a second, and not every run draws

            self.draw = plot.draw
        self.errors: dict[Run, float] = {}
        self.reasons: dict[Run, str] = {}

    def run(self) -> int:
        runs = list(dict.fromkeys(run for round_ in self.plan.rounds for run in round_))
        with contextlib.ExitStack() as stack:
            if any(self.candidates[run.candidate].compiles for run in runs):
                stack.enter_context(formulations.compiling_every_size())
            screen = stack.enter_context(Screen(steps=2 * len(runs) + len(self.plan.weighed)))
            weigh = bool(self.plan.weighed) and memory.supported()
            server = stack.enter_context(memory.MemoryServer()) if weigh else None
            try:
                self._check(runs, screen)
                self._measure(screen, server)
            except KeyboardInterrupt:
                screen.say(f"interrupted: {self.record.count} rows are in {self.record.path}")
                raise
        self._conclude(screen)
        return 0

    def _check(self, runs: list[Run], screen: Screen) -> None:
        """The parity gate: raises if one candidate is wrong, before anything is timed."""
        self.reasons = {run: reason for run in runs if (reason := self.candidates[run.candidate].why_not(run))}
        able = [run for run in runs if run not in self.reasons]
        self.errors, failures = parity.check(
            able, self.candidates, lambda run: screen.doing(f"checking {run.candidate}, {run.score}, L={run.L}", 1)
        )
        self.reasons |= failures
        worst = max(self.errors, key=self.errors.__getitem__)
        screen.say(
            f"parity holds: {len(self.errors)} runs agree with float64; the largest error is "
            f"{self.errors[worst]:.0e}, of {worst.candidate} on {worst.score}"
        )

    def _measure(self, screen: Screen, server: memory.MemoryServer | None) -> None:
        weighed = set(self.plan.weighed)
        for round_ in self.plan.rounds:
            results = self._timed(round_, screen)
            for run in round_:
                if run in weighed and run not in self.reasons:
                    results[run] = self._weighed(run, results[run], screen, server)
            self._keep(results, screen)
        alone = [run for run in self.plan.weighed if run not in {row.run for row in self.rows}]
        results = {run: self._weighed(run, Result(), screen, server) for run in alone}
        results |= targets.extrapolated(self.plan.promised, results)
        if results:
            self._keep(results, screen)

    def _timed(self, round_: Round, screen: Screen) -> dict[Run, Result]:
        able = [run for run in round_ if run not in self.reasons]
        seconds = self.config.seconds
        screen.doing(f"timing {round_[0].setting}")
        others = timing.OtherLoad()
        times = timing.interleaved(
            {run: call_of(self.candidates[run.candidate], run) for run in able},
            seconds if seconds is not None else SECONDS[self.config.preset],
            between=screen.keep_alive,
        )
        load = others.share()
        screen.doing("", steps=len(round_))
        results = {}
        for run in round_:
            if run not in times:
                results[run] = Result(note=self.reasons[run])
                continue
            found = times[run]
            results[run] = Result(
                median_ms=found.median,
                p20_ms=found.p20,
                p80_ms=found.p80,
                repetitions=found.repetitions,
                ratio_to_sdpa=found.median / times[run.yardstick].median,
                parity_error=self.errors[run],
                other_load=load,
            )
        return results

    def _weighed(self, run: Run, result: Result, screen: Screen, server: memory.MemoryServer | None) -> Result:
        screen.doing(f"weighing {run.candidate}, {run.score}, L={run.L}", 1)
        peak = server.peak_mb(run) if server else "n/a: peak memory is measured on Linux alone"
        if isinstance(peak, str):
            return dataclasses.replace(result, note=peak)
        return dataclasses.replace(result, peak_mb=peak)

    def _keep(self, results: dict[Run, Result], screen: Screen) -> None:
        rows = [Row(run, result, self.machine) for run, result in results.items()]
        self.record.write(rows)
        self.rows += rows
        first = rows[0].run
        screen.rows(first.setting if rows[0].result.median_ms is not None else "peak memory", rows)

    def _conclude(self, screen: Screen) -> None:
        if self.plan.promised:
            screen.verdicts(targets.verdicts(self.rows))
        warn_of_load(screen, [row.result.other_load for row in self.rows])
        written = [self.record.path, write_config(self.config, self.record.path)]
        if self.draw:
            written.append(self.record.path.with_suffix(".png"))
            self.draw(self.rows, written[-1])
        screen.say(f"written: {', '.join(str(path) for path in written)}")


def results_folder(config: BenchConfig) -> Path:
    """Where ``--out`` says; else beside the published results if this is the checkout, and ./outputs elsewhere."""
    if config.out is not None:
        return Path(config.out)
    return Path("benchmarks/results") if machine.in_checkout(Path.cwd()) else Path("outputs")


def warn_of_load(screen: Screen, loads: list[float | None]) -> None:
    """Says that the machine was not at rest, if it was not."""
    busiest = max((load or 0.0 for load in loads), default=0.0)
    if busiest > QUIET:
        screen.say(f"other programs kept up to {busiest:.0%} of the processors busy: measure again on a quiet machine")


def write_config(config: BenchConfig, record: Path) -> Path:
    """The YAML file beside a record that repeats the run."""
    path = record.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False))
    return path


def _plain(config: dict[str, object]) -> dict[str, object]:
    """Tuples as lists, which YAML knows."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
