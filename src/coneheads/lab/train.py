"""``coneheads train``: the one training loop.

Everything random is a function of (seed, step): the batch, and what dropout draws. So a run that is killed and goes on
from its last checkpoint ends with the very numbers of one that was not; and processes that share a batch (``torchrun
--nproc-per-node 2 -m coneheads train ...``) compute what one process would, to rounding.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from coneheads.lab import record, tasks
from coneheads.lab.checkpoint import Checkpoints, load_weights
from coneheads.lab.commands import TrainConfig, TrainOptions
from coneheads.lab.config import Failed, WrongUse
from coneheads.lab.models.start import resolve
from coneheads.lab.progress import Progress
from coneheads.lab.results import describe
from coneheads.lab.tasks.base import Batch, Task, mixed

Metrics = dict[str, float]
OnStep = Callable[[Metrics], None]
EVALUATED_AT_ONCE = 1024


def run(config: TrainConfig) -> int:
    """Trains as the flags say, and prints what came out."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _train_and_tell(config, Path(config.out) if config.out is not None else default_folder(config))
    _part()
    return 0


def _train_and_tell(config: TrainConfig, folder: Path) -> None:
    trainer = Trainer(config, folder)
    with Progress(config.quiet or trainer.fabric.global_rank > 0, config.train.steps, config.task.name) as progress:
        progress.say(
            f"{trainer.parameters:,} parameters; {config.model.score}, size {config.model.qk_dim}; run in {folder}"
        )
        done = trainer.fit(lambda numbers: progress.advance(1, **numbers), progress.skip)
    if trainer.fabric.global_rank == 0:
        print(describe(done["metrics"], done["headline"], done["optimum"].get(done["headline"])))
        print(f"run in {folder}")


def default_folder(config: TrainConfig) -> Path:
    return Path("outputs/train") / f"{config.task.name}-{config.model.score}-{config.model.qk_dim}-seed{config.seed}"


class Diverged(Failed):
    """The loss is no number any more."""


@dataclasses.dataclass
class Progressed:
    """What a checkpoint holds beside weights and optimizer."""

    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    least_loss: float = math.inf
    waited: int = 0  # evaluations since the best
    seconds: float = 0.0  # of training, over all its continuations


class Trainer:
    """A run in a folder: ``fit`` brings it to its end, from wherever it stands."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.options, self.folder = config, config.train, folder
        self.fabric = _fabric(config.train)
        self.task = tasks.make(config.task, config.seed)
        torch.manual_seed(config.seed)
        model = self.task.model(config.model)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = self.fabric.setup_module(model)
        self.optimizer: Any = self.fabric.setup_optimizers(_optimizer(model, config.train))
        self.at = Progressed()
        self.checkpoints = Checkpoints.of(folder)
        parts = self.fabric.world_size * self.options.accumulate
        if parts > self.options.batch:
            raise WrongUse(
                f"--train.batch: must be at least {parts} (processes x accumulate); got {self.options.batch}"
            )

    @property
    def writes(self) -> bool:
        """One process of all writes."""
        return bool(self.fabric.global_rank == 0)

    def fit(
        self, on_step: OnStep = lambda numbers: None, on_skip: Callable[[int], None] = lambda steps: None
    ) -> dict[str, Any]:
        """Trains to the end, measures the best model, and returns the record of the run.

        on_step: told the latest numbers after every step. on_skip: told how many steps were made before, or are left
        out at the end because the run stops early.
        """
        with record.opened(self.folder, self.config, writes=self.writes) as log:
            if log.finished is not None:
                on_skip(self.options.steps)
                return log.finished
            self._resume(log)
            on_skip(self.at.step)
            while self.at.step < self.options.steps and not self._patience_is_over():
                started = time.perf_counter()
                loss = self._train_step(self.at.step)
                self.at.step += 1
                self.at.seconds += time.perf_counter() - started
                on_step({"loss": loss})
                if not math.isfinite(loss):
                    raise self._diverged(log, f"the loss is {loss}")
                if self.at.step == self.options.steps or self.at.step % self.options.eval_every == 0:
                    self._evaluate(log, loss)
                elif self.at.step % self.options.save_every == 0:
                    self._save(best=False)
            on_skip(self.options.steps - self.at.step)
            return self._conclude(log)

    def _train_step(self, step: int) -> float:
        """One step of the optimizer on this process's share of the batch; the loss is that of the whole batch."""
        options, fabric = self.options, self.fabric
        self.model.train()
        _seed_dropout(mixed(self.config.seed, step, fabric.global_rank), fabric.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        whole = self.task.train_batch(step, options.batch)
        weight = float(whole.weights.sum())
        share = whole[fabric.global_rank :: fabric.world_size]
        total = torch.zeros((), dtype=torch.float64, device=fabric.device)
        for part in range(options.accumulate):
            batch = share[part :: options.accumulate].to(fabric.device)
            with fabric.no_backward_sync(self.model, enabled=part < options.accumulate - 1):
                loss = self._weighted_loss(batch)
                # processes average their gradients; the sum over the whole batch is wanted
                fabric.backward(loss * (fabric.world_size / weight))
            total += loss.detach()
        if options.clip is not None:
            fabric.clip_gradients(self.model, self.optimizer, max_norm=options.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(_summed(fabric, total)) / weight

    def _weighted_loss(self, batch: Batch) -> Tensor:
        return (self.task.losses(self.model(**batch.inputs), batch) * batch.weights).sum()

    def _evaluate(self, log: record.Log, loss: float) -> None:
        """Measures on the first split, logs it, and keeps a checkpoint if it is the best so far."""
        metrics = measure(self.model, self.task, self.task.splits[0], self.fabric)
        if not math.isfinite(metrics["loss"]):
            raise self._diverged(log, f"the loss on {self.task.splits[0]} is {metrics['loss']}")
        better = self._is_better(metrics[self.task.headline], metrics["loss"])
        rate = learning_rate(self.at.step - 1, self.options)
        log.metrics(self.at.step, "train", {"loss": loss, "lr": rate})
        log.metrics(self.at.step, self.task.splits[0], metrics)
        if better or self.at.step % self.options.save_every == 0:
            self._save(best=better)

    def _is_better(self, value: float, loss: float) -> bool:
        """Whether this is the model to keep so far; it also counts how long there was no progress."""
        if self.options.best == "metric":
            progress = better = value > self.at.best
        else:
            progress = value >= self.at.best or loss <= self.at.least_loss
            better = value >= self.at.best and loss <= self.at.least_loss
        self.at.waited = 0 if progress else self.at.waited + 1
        self.at.best, self.at.least_loss = max(value, self.at.best), min(loss, self.at.least_loss)
        if better:
            self.at.best_step = self.at.step
        return better

    def _save(self, *, best: bool) -> None:
        if self.writes:
            state = {"at": dataclasses.asdict(self.at), "optimizer": self.optimizer.state_dict()}
            self.checkpoints.save(self.at.step, _weights(self.model), state, best=best)

    def _resume(self, log: record.Log) -> None:
        if not self.checkpoints.named():
            log.rewind(0)
            return
        state = self.checkpoints.state("last")
        try:
            self.at = Progressed(**state["at"])
            load_weights(_plain(self.model), self.checkpoints.weights("last", str(self.fabric.device)), self.folder)
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, TypeError, ValueError) as error:
            raise Failed(f"the checkpoint in {self.folder} is not one of this program's ({error})") from None
        log.rewind(self.at.step)

    def _patience_is_over(self) -> bool:
        return self.options.patience is not None and self.at.waited >= self.options.patience

    def _conclude(self, log: record.Log) -> dict[str, Any]:
        """Measures the best model on every split."""
        self.fabric.barrier()  # until the one that writes has written
        load_weights(_plain(self.model), self.checkpoints.weights("best", str(self.fabric.device)), self.folder)
        metrics = {split: measure(self.model, self.task, split, self.fabric) for split in self.task.splits}
        return log.finish(self._found(metrics), _plain(self.model), self.task)

    def _found(self, metrics: dict[str, Metrics]) -> dict[str, Any]:
        """What the record says of the run."""
        return {
            "steps": self.at.step,
            "best_step": self.at.best_step,
            "wall_seconds": self.at.seconds,
            "seconds_per_step": self.at.seconds / self.at.step,
            "parameters": self.parameters,
            "start": dataclasses.asdict(resolve(self.config.model)),
            "processes": self.fabric.world_size,
            "headline": self.task.headline,
            "metrics": metrics,
            "optimum": self.task.optimum(),
            "chance": self.task.chance(),
        }

    def _diverged(self, log: record.Log, what: str) -> Diverged:
        named = self.checkpoints.named()
        kept = f"the checkpoint {named['last']} is kept" if named else "no checkpoint was written yet"
        log.diverged(self._found({}))
        return Diverged(
            f"{what} at step {self.at.step}; {kept} in {self.folder}. A smaller --train.lr or --train.clip may help"
        )


def measure(model: nn.Module, task: Task, split: str, fabric: Fabric) -> Metrics:
    """Loss and metrics over a split, each process taking its share."""
    model.eval()
    sums: dict[str, Tensor] = {}
    with torch.inference_mode():
        for whole in task.batches(split, EVALUATED_AT_ONCE):
            batch = whole[fabric.global_rank :: fabric.world_size].to(fabric.device)
            for name, values in _measured(task, model(**batch.inputs), batch):
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + values.double().sum().cpu()
    names = sorted(sums)
    totals = _summed(fabric, torch.stack([sums[name] for name in names]))
    found = dict(zip(names, totals.tolist(), strict=True))
    weight = found.pop("weight")
    return task.derived({name: value / weight for name, value in found.items()})


def _summed(fabric: Fabric, values: Tensor) -> Tensor:
    """Over all processes."""
    return cast(Tensor, fabric.all_reduce(values, reduce_op="sum"))


def _measured(task: Task, outputs: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield "weight", batch.weights
    yield "loss", task.losses(outputs, batch) * batch.weights
    for name, values in task.metrics(outputs, batch).items():
        yield name, values * batch.weights


def learning_rate(step: int, options: TrainOptions) -> float:
    """The learning rate of a step, the first of which is 0: it rises to ``lr`` over the warm-up, then decays."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    if options.decay == "constant":
        return options.lr
    if options.decay == "inverse_sqrt":
        return options.lr * math.sqrt(max(options.warmup, 1) / (step + 1))
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    left = (1 + math.cos(math.pi * done)) / 2 if options.decay == "cosine" else 1 - done
    return options.lr * (options.final_lr + (1 - options.final_lr) * left)


def _optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW, or Adam with its penalty; weight decay on matrices alone, not on biases, norms and learned numbers."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=options.lr, betas=(0.9, options.beta2), fused=True)


def _fabric(options: TrainOptions) -> Fabric:
    """One process, or one of those that torchrun started."""
    precision = cast(Any, options.precision)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Fabric(devices=1, precision=precision)
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // here
    fabric = Fabric(strategy="ddp", devices=here, num_nodes=nodes, precision=precision)
    fabric.launch()
    return fabric


def _part() -> None:
    """From the other processes, before the interpreter ends: a thread of gloo that drops its last tensor while it does
    aborts the process (https://github.com/pytorch/pytorch/issues/190489), and torchrun would call the run failed.

    The threads end with the last that holds the group, and a model of DDP does: it must be gone by now.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _seed_dropout(seed: int, device: torch.device) -> None:
    """Of this device alone: ``torch.manual_seed`` notes every call for each kind of device that is not in use yet."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _plain(model: Any) -> nn.Module:
    """The model inside of what Fabric made of it."""
    return model.module


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in _plain(model).state_dict().items()}
