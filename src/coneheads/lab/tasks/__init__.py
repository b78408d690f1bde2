"""The tasks of the lab: what each is called, what it can be told, where it lives. No torch: ``--help`` reads this."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from coneheads.lab.tasks.options import (
    CiteSeerOptions,
    CoraOptions,
    KinOptions,
    ListOpsOptions,
    PPIOptions,
    PubMedOptions,
    TaskOptions,
    TreeOptions,
)

if TYPE_CHECKING:
    from coneheads.lab.tasks.base import Task

#: a task is an options class here, and a class of the name ``options.task_class`` in the module ``tasks.<name>``
TASKS: dict[str, type[TaskOptions]] = {
    options.name: options
    for options in (
        KinOptions, TreeOptions, ListOpsOptions, CoraOptions, CiteSeerOptions, PubMedOptions, PPIOptions,
    )
}  # fmt: skip


def make(options: TaskOptions, seed: int) -> Task:
    """The task that the options describe, for a run of this seed."""
    module = importlib.import_module(f"coneheads.lab.tasks.{options.module or options.name}")
    return getattr(module, options.task_class)(options, seed)
