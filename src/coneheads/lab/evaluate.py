"""``coneheads evaluate``: measures a trained model again."""

from __future__ import annotations

import json
from typing import Any, cast

from lightning_fabric import Fabric

from coneheads.lab.checkpoint import load_run
from coneheads.lab.commands import EvaluateConfig
from coneheads.lab.config import check_choice
from coneheads.lab.progress import Progress
from coneheads.lab.results import describe
from coneheads.lab.train import measure


def run(config: EvaluateConfig) -> int:
    trained, task, model = load_run(config.run, config.checkpoint)
    splits = config.splits or task.splits
    for split in splits:
        check_choice("splits", split, task.splits)
    fabric = Fabric(devices=1, precision=cast(Any, trained.train.precision))
    model = fabric.setup_module(model)
    found = {}
    with Progress(config.quiet, len(splits), trained.task.name, unit="splits") as progress:
        for split in splits:
            found[split] = measure(model, task, split, fabric)
            progress.advance()
    if config.json:
        print(json.dumps(found, indent=2))
    else:
        print(describe(found, task.headline, task.optimum().get(task.headline)))
    return 0
