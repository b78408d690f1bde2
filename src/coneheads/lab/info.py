"""``coneheads info``: what is installed, what this machine is, and which backends serve here, or why not.

With ``--self-test`` it tests the kernels for GPUs instead: see self_test.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from typing import Any

import torch

from coneheads.backends import BACKENDS, Backend, build
from coneheads.functional import available_backends
from coneheads.lab import machine
from coneheads.lab.commands import InfoConfig
from coneheads.lab.config import WrongUse

Facts = dict[str, Any]


def run(config: InfoConfig) -> int:
    if config.self_test:
        if config.json:
            raise WrongUse("--json: the self-test prints tables; leave one of the two out")
        from coneheads.lab import self_test  # which needs more of the lab than the rest

        return self_test.run()
    found = facts()
    print(json.dumps(found, indent=2) if config.json else as_text(found))
    return 0


def facts() -> Facts:
    here = machine.this_machine()
    memory = machine.memory_bytes()
    return {
        "versions": {
            "coneheads": here.coneheads + (f" (commit {here.commit})" if here.commit else ""),
            "torch": here.torch,
            "python": here.python,
            "triton": installed("triton"),
        },
        "machine": {
            "cpu": here.cpu,
            "level": here.level,
            "cores": here.cores,
            "threads": torch.get_num_threads(),
            "memory_gb": None if memory is None else round(memory / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "backends": {backend.name: declared(backend) for backend in BACKENDS},
        "kernels": kernels(),
    }


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared(backend: Backend) -> Facts:
    """What the table of backends says, and whether it can run here."""
    return {
        "available": backend.name in available_backends(),
        "summary": backend.summary,
        "memory": backend.memory,
        "second_derivative": backend.second_derivative,
        "torch_func": backend.transforms,
        "onnx": backend.onnx,
        "devices": list(backend.devices) or ["every"],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in backend.dtypes],
    }


def kernels() -> Facts:
    """Whether the C++ kernels are built, with what, or why not. This builds them if they are not."""
    found = dataclasses.asdict(build.status())
    return {
        name: value if value is None or isinstance(value, (bool, float)) else str(value)
        for name, value in found.items()
    }


def as_text(found: Facts) -> str:
    lines = [_line(name, value or "not installed") for name, value in found["versions"].items()]
    here = found["machine"]
    lines += [
        _line("processor", f"{here['cpu']}, {here['level']}, {here['cores']} cores, {here['threads']} threads in use"),
        _line("memory", "unknown" if here["memory_gb"] is None else f"{here['memory_gb']} GB"),
        _line("GPU", here["gpu"] or "none that torch sees"),
        "",
        'backends, in the order in which "auto" prefers them:',
    ]
    for name, backend in found["backends"].items():
        able = [
            f"memory {backend['memory']}",
            "second derivative" if backend["second_derivative"] else "no second derivative",
            "torch.func" if backend["torch_func"] else "no torch.func",
            "ONNX" if backend["onnx"] else "no ONNX",
            f"devices: {', '.join(backend['devices'])}",
            ", ".join(backend["dtypes"]),
        ]
        lines += [_line(name, backend["summary"] if backend["available"] else f"not here: {backend['summary']}")]
        lines += [_line("", "; ".join(able))]
    lines += ["", "C++ kernels of the backend cpp:", *_kernel_lines(found["kernels"])]
    return "\n".join(lines)


def _kernel_lines(status: Facts) -> list[str]:
    if not status["available"]:
        return [_line("built", "no"), _line("why not", status["reason"])]
    took = "" if status["built_seconds"] is None else f", just now in {status['built_seconds']:.1f} s"
    return [
        _line("built", f"yes, for {status['level']}{took}"),
        _line("compiler", status["compiler"] or "none here: the library came from the cache"),
        _line("library", status["library"]),
    ]


def _line(name: str, value: object) -> str:
    return f"  {name:<12}{value}"
