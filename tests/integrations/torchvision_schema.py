"""Makes torchvision importable beside a torch of another build, for the tests of timm, which imports it.

A package index that has a CPU build of torch and a CUDA build of torchvision gives two that do not fit: torchvision's
compiled operators do not load, and then its import fails at ``register_fake("torchvision::nms")``. timm calls none of
these operators, so that their schemas are enough.
"""

import contextlib
import functools
import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache  # keeps the library, which would take its schemas along
def define() -> torch.library.Library | None:
    """Defines the schemas, before torchvision is imported and only if its own operators do not load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    with contextlib.suppress(OSError):
        for compiled in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(compiled)
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library
