"""The files of graph data sets, where the user has them, read by torch_geometric's classes. Nothing is downloaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from coneheads.lab.config import Failed


def planetoid(root: str, name: str) -> Any:
    """The graph of Cora, CiteSeer or PubMed: x [N, F], edge_index, y [N] and the masks of the public split."""
    datasets = _torch_geometric()
    folder = _found(root, [f"ind.{name.lower()}.{part}" for part in PLANETOID], (f"{name}/raw", f"{name.lower()}/raw"))
    return _read(datasets.Planetoid, folder, name=name)[0]


def ppi(root: str) -> dict[str, list[Any]]:
    """The graphs of PPI by split: x [N, 50], edge_index, y [N, 121]."""
    datasets = _torch_geometric()
    folder = _found(
        root, [f"{split}_{part}" for split in ("train", "valid", "test") for part in PPI], ("PPI/raw", "ppi/raw")
    )
    splits = {"train": "train", "valid": "val", "test": "test"}
    return {split: list(_read(datasets.PPI, folder, split=named)) for split, named in splits.items()}


PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
PPI = ("feats.npy", "graph_id.npy", "graph.json", "labels.npy")


def _torch_geometric() -> Any:
    try:
        from torch_geometric import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise Failed(f'this task reads its data with torch_geometric ({error}); pip install "coneheads[pyg]"') from None
    return datasets


def _found(root: str, names: list[str], places: tuple[str, ...]) -> Path:
    """The folder with all these files: root/raw, or one of the places in root."""
    folders = [Path(root) / place for place in ("raw", *places)]
    for folder in folders:
        if all((folder / name).is_file() for name in names):
            return folder
    near = next((folder for folder in folders if folder.is_dir()), folders[1])
    missing = [name for name in names if not (near / name).is_file()]
    raise Failed(
        f"--task.root: {str(Path(root))!r} has not all files of this data set. Expected in {near}: {', '.join(names)}; "
        f"missing: {', '.join(missing)}. Nothing is downloaded"
    )


def _read(dataset: Any, raw: Path, **arguments: Any) -> Any:
    """The data set of files that lie in this folder. What torch_geometric makes of them goes to one of its own."""
    with tempfile.TemporaryDirectory() as processed:
        where = {
            "raw_dir": property(lambda self: str(raw)),
            "processed_dir": property(lambda self: processed),
            "log": property(lambda self: False, lambda self, value: None),  # it would print for every run
        }
        try:
            return type(dataset.__name__, (dataset,), where)(processed, **arguments)
        except (ValueError, KeyError, IndexError, EOFError, OSError, RuntimeError, UnpicklingError) as error:
            raise Failed(f"--task.root: a file in {raw} is damaged or of another format ({error})") from None
