"""What each command can be told: its flags, the keys of its YAML file, and its entry in a record. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from coneheads.lab.config import ALL_SCORES, DTYPES, SCORES, Config, WrongUse, option, section
from coneheads.lab.config import from_dict as from_dict  # the way back from a record to a config
from coneheads.lab.tasks import TASKS
from coneheads.lab.tasks.options import KinOptions, TaskOptions

PASSES = ("forward", "forward_backward", "backward")
READOUTS = ("height", "height_sq", "distance")
DECAYS = ("cosine", "linear", "inverse_sqrt", "constant")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true")


@dataclass(frozen=True)
class ModelOptions(Config):
    """The model. A value of null is taken from ``start``."""

    score: str = option(
        "penumbral", f"one of {', '.join(SCORES)}; on graphs concatenation too, the score of GAT", choices=ALL_SCORES
    )
    qk_dim: int = option(16, "features of a query or key, per head", least=2)
    heads: int = option(4, "attention heads", least=1)
    width: int = option(64, "features of a token between layers", least=1)
    depth: int = option(2, "layers", least=1)
    feedforward: int = option(128, "features inside the feed-forward part of a layer", least=1)
    dropout: float = option(0.0, "share of features dropped", least=0)
    start: str = option("tuned", "how attention starts: tuned, or as in the paper", choices=("tuned", "paper"))
    gamma: float | None = option(None, "the inverse temperature at the start", least=0)
    learn_gamma: bool | None = option(None, "learn it, one a head")
    light_height: float | None = option(None, "of penumbral cones, at the start", least=0)
    radius: float | None = option(None, "of umbral cones, at the start", least=0)
    learn_radius: bool | None = option(None, "learn light_height or radius, one a head")
    height_scale: float | None = option(None, "multiplies the feature that makes the height")
    readout: str | None = option(None, f"one of {', '.join(READOUTS)}", choices=READOUTS)
    qk_norm: bool | None = option(None, "normalise queries and keys per head, with a learned scale")
    qk_scale: float | None = option(
        None, "standard deviation of the features of queries and keys at the start", least=0
    )
    height_spread: float | None = option(None, "that of the feature that makes the height, relative to it", least=0)
    height_start: float | None = option(None, "the mean of the feature that makes the height, at the start")
    embedding_scale: float | None = option(
        None, "standard deviation of learned embeddings at the start; null: that of the task's model", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout >= 1:
            raise WrongUse(f"--dropout: is a share, below 1; got {self.dropout:g}")
        for name in ("gamma", "light_height", "radius"):  # which are learned as logarithms
            if getattr(self, name) == 0:
                raise WrongUse(f"--{name}: must be above 0; got 0")


@dataclass(frozen=True)
class TrainOptions(Config):
    """The training loop."""

    steps: int = option(1000, "optimizer steps", least=1)
    batch: int = option(256, "examples a step, over all processes", least=1)
    accumulate: int = option(1, "parts in which a process takes its share of a batch, to save memory", least=1)
    optimizer: str = option(
        "adamw", "adamw, or adam, whose weight decay is a term of the loss", choices=("adamw", "adam")
    )
    lr: float = option(3e-3, "the largest learning rate", least=0)
    warmup: int = option(50, "steps until the learning rate is largest", least=0)
    decay: str = option("cosine", f"one of {', '.join(DECAYS)}", choices=DECAYS)
    final_lr: float = option(0.01, "share of the learning rate that cosine and linear end with", least=0)
    weight_decay: float = option(0.0, "of weight matrices", least=0)
    beta2: float = option(0.99, "of the optimizer", least=0)
    clip: float | None = option(1.0, "the largest norm of the gradient; null: any", least=0)
    precision: str = option("32-true", f"one of {', '.join(PRECISIONS)}", choices=PRECISIONS)
    eval_every: int = option(100, "steps between evaluations", least=1)
    save_every: int = option(500, "steps between checkpoints", least=1)
    patience: int | None = option(None, "stop after so many evaluations without a better one; null: never", least=1)
    best: str = option(
        "metric",
        "the model to keep: the best metric of the task, or one that is no worse than any before in metric and loss",
        choices=("metric", "metric and loss"),
    )
    tensorboard: bool = option(False, "write TensorBoard's event files too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2 >= 1:
            raise WrongUse(f"--beta2: must be below 1; got {self.beta2:g}")


@dataclass(frozen=True)
class TrainConfig(Config):
    """Train one model on one task; metrics, checkpoints and a record go to a folder."""

    task: TaskOptions = section(KinOptions, "the task; --task.FLAG sets what it can be told", chosen_from=TASKS)
    model: ModelOptions = section(ModelOptions, "the model")
    train: TrainOptions = section(TrainOptions, "the training loop")
    seed: int = option(0, "of the weights and of the order of training examples", least=0)
    out: str | None = option(
        None, "folder of the run; null: outputs/train/ and a name made of task, score, size and seed"
    )
    resume: bool = option(False, "go on with the run in the folder, if there is one")
    threads: int | None = option(None, "of the processor; null: as many as torch takes", least=1)
    quiet: bool = option(False, "print results, and no progress", short="q")

    def __post_init__(self) -> None:
        super().__post_init__()
        _fits(self.task, "model.score", self.model.score)


def _fits(task: TaskOptions, flag: str, *scores: str) -> None:
    """An error for a score of edges in a task that has none."""
    if "concatenation" in scores and not task.on_edges:
        raise WrongUse(f"--{flag}: concatenation is a score of edges, and the task {task.name} has no graph")


@dataclass(frozen=True)
class EvaluateConfig(Config):
    """Measure a trained model again, on any split of its task."""

    run: str = option("", "folder of the run")
    checkpoint: str = option("best", "best or last", choices=("best", "last"))
    splits: tuple[str, ...] = option((), "of the task's; empty: all")
    json: bool = option(False, "print JSON")
    quiet: bool = option(False, "print results, and no progress", short="q")


@dataclass(frozen=True)
class CompareConfig(Config):
    """Train every score at every size with several seeds on one task; table, plots and a report page.

    Finished runs in the folder are reused, so that a comparison that was stopped goes on when it is called again.
    """

    task: TaskOptions = section(KinOptions, "the task; --task.FLAG sets what it can be told", chosen_from=TASKS)
    scores: tuple[str, ...] = option(
        ("dot", "laplacian", "penumbral", "umbral"),
        f"any of {', '.join(SCORES)}; on graphs concatenation too",
        choices=ALL_SCORES,
    )
    sizes: tuple[int, ...] = option((3, 4, 8), "of query and key, per head", least=2)
    seeds: tuple[int, ...] = option((0, 1, 2), "one run each", least=0)
    model: ModelOptions = section(ModelOptions, "the model", leave_out={"score": "scores", "qk_dim": "sizes"})
    train: TrainOptions = section(TrainOptions, "the training loop")
    out: str | None = option(None, "folder of the comparison; null: outputs/compare-TASK")
    jobs: int | None = option(None, "runs at a time, each on one thread; null: one a core", least=1)
    quiet: bool = option(False, "print results, and no progress", short="q")

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("scores", "sizes", "seeds"):
            values = getattr(self, flag)
            if not values:
                raise WrongUse(f"--{flag}: name at least one")
            if len(set(values)) < len(values):
                raise WrongUse(f"--{flag}: {', '.join(map(str, values))} names one twice")
        _fits(self.task, "scores", *self.scores)


@dataclass(frozen=True)
class DrawConfig(Config):
    """Draw what a trained model attends to, and where its cones put the tokens."""

    run: str = option("", "folder of the run")
    checkpoint: str = option("best", "best or last", choices=("best", "last"))
    out: str | None = option(None, "folder of the pictures; null: figures/ in the folder of the run")


@dataclass(frozen=True)
class ListConfig(Config):
    """The tasks, scores and backends there are, and the runs in a folder."""

    runs: str = option("outputs", "folder in which to look for runs")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class BenchConfig(Config):
    """Time and weigh attention: every backend beside SDPA and other ways to write it, after a check that all agree.

    Rows go to a CSV as they are measured. The preset "lengths" goes through lengths of one size and draws them; the
    preset "targets" measures what the project promises and says for each promise whether it holds. With --graph it is
    layers on graphs beside those of torch_geometric: on a graph like Cora and a large one, with the promises about
    them, or on a random graph of --nodes and --edges.
    """

    preset: str = option("lengths", "what to measure: lengths or targets", choices=("lengths", "targets"))
    scores: tuple[str, ...] = option(("penumbral",), f"any of {', '.join(SCORES)}", choices=SCORES)
    lengths: tuple[int, ...] = option((128, 256, 512, 1024), "L, and S: queries and keys", least=1)
    batch: int = option(1, "B", least=1)
    heads: int = option(2, "H", least=1)
    size: int = option(64, "E: features of a query or key; with --graph of a value, too", least=2)
    value_size: int = option(64, "Ev: features of a value; SDPA runs with E = Ev = this", least=1)
    dtype: str = option("float32", f"one of {', '.join(DTYPES)}", choices=DTYPES)
    causal: bool = option(False, "a query sees the keys up to its own place")
    passes: tuple[str, ...] = option(("forward", "forward_backward"), f"any of {', '.join(PASSES)}", choices=PASSES)
    candidates: tuple[str, ...] = option(
        (), "of sdpa, authors, plain, compiled, flex and the backends; empty: all but reference. SDPA always runs"
    )
    compiled_lengths: tuple[int, ...] = option(
        (1024,), "the lengths that compiled and flex run at: each takes half a minute to compile", least=1
    )
    graph: bool = option(False, "measure attention on graphs")
    nodes: int | None = option(None, "of a random graph; null: the graphs of the targets", least=1)
    edges: int | None = option(None, "of a random graph, each with a source and a target", least=1)
    seconds: float | None = option(
        None, "for the repetitions of a candidate in a row, of which 3 are made at least; null: 0.4, 2 for targets and "
        "5 for graphs", least=0,
    )  # fmt: skip
    threads: int | None = option(
        None, "of the processor; null: as many as torch takes, and 2 for targets and their graphs", least=1
    )
    memory: bool = option(True, "measure peak memory too (Linux)")
    plot: bool = option(True, "draw time and memory against L, if there are several lengths")
    out: str | None = option(None, "folder of the results; null: benchmarks/results in a checkout, else outputs")
    name: str | None = option(None, "name of the results; null: that of the preset, or graph")

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("scores", "lengths", "passes"):
            if not getattr(self, flag):
                raise WrongUse(f"--{flag}: name at least one")
        of_dense = ("scores", "lengths", "batch", "value_size", "dtype", "causal", "passes", "candidates",
                    "compiled_lengths")  # fmt: skip
        of_size = ("heads", "size", "threads")
        if self.preset == "targets":
            self._leave_out((*of_dense, *of_size), "the preset 'targets' measures fixed rows; leave it out")
        if not self.graph:
            self._leave_out(("nodes", "edges"), "is of a graph; add --graph")
            return
        self._leave_out(("preset", *of_dense, "plot"), "has no meaning with --graph; leave it out")
        if self.nodes is None and self.edges is None:
            self._leave_out(of_size, "--graph measures fixed graphs, unless you name --nodes and --edges")
        elif self.nodes is None or self.edges is None:
            missing = "nodes" if self.nodes is None else "edges"
            raise WrongUse(f"--{missing}: a graph has nodes and edges; name both")

    def _leave_out(self, names: tuple[str, ...], why: str) -> None:
        """Raises if one of these differs from its default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise WrongUse(f"--{name}: {why}")


@dataclass(frozen=True)
class InfoConfig(Config):
    """Versions, processor, and the backends with what each can do here and what is missing."""

    json: bool = option(False, "print JSON")
    self_test: bool = option(False, "test the kernels for GPUs on this machine, and time them")
