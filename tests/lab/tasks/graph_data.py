"""Small graphs in the files of Cora and PPI, byte for byte of their formats."""

import json
import pickle
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

CLASSES, WORDS = 3, 30


def write_planetoid(root: Path, name: str = "Cora", train: int = 12, others: int = 520, test: int = 40) -> None:
    """Papers of three subjects: words of their own, and citations within a subject, nine times of ten.

    The files have the first ``train`` papers in x, those and the ``others`` in allx, and the test papers, in the order
    of test.index, in tx.
    """
    random = np.random.default_rng(0)
    known, total = train + others, train + others + test
    subject = np.arange(total) % CLASSES
    likely = np.where(np.arange(WORDS) % CLASSES == subject[:, None], 0.5, 0.1)
    words = (random.random((total, WORDS)) < likely).astype(np.float32)
    labels = np.eye(CLASSES, dtype=np.int32)[subject]
    graph = {i: [] for i in range(total)}
    for i in range(total):
        for _ in range(3):
            same = np.flatnonzero((subject == subject[i]) if random.random() < 0.9 else (subject != subject[i]))
            j = int(random.choice(same))
            graph[i].append(j)
            graph[j].append(i)
    order = known + random.permutation(test)
    parts = {
        "x": csr_matrix(words[:train]), "y": labels[:train], "allx": csr_matrix(words[:known]), "ally": labels[:known],
        "tx": csr_matrix(words[order]), "ty": labels[order], "graph": graph,
    }  # fmt: skip
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for part, content in parts.items():
        (raw / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(content, protocol=2))
    (raw / f"ind.{name.lower()}.test.index").write_text("".join(f"{i}\n" for i in order))


def write_ppi(root: Path, functions: int = 5, features: int = 8) -> None:
    """Graphs of 20 to 30 proteins whose functions follow from the features of their neighbours."""
    random = np.random.default_rng(0)
    raw = root / "PPI" / "raw"
    raw.mkdir(parents=True)
    mixing = random.standard_normal((features, functions))
    first = 0
    for split, graphs in (("train", 4), ("valid", 2), ("test", 2)):
        feats, labels, numbers, links, start = [], [], [], [], 0
        for graph in range(graphs):
            size = int(random.integers(20, 31))
            x = random.standard_normal((size, features))
            adjacent = np.triu(random.random((size, size)) < 0.2, 1)
            adjacent[np.arange(size - 1), np.arange(1, size)] = True
            links += [{"source": int(i) + start, "target": int(j) + start} for i, j in np.argwhere(adjacent)]
            around = adjacent + adjacent.T + np.eye(size)
            feats.append(x)
            labels.append((around @ x @ mixing > 0).astype(np.int64))
            numbers.append(np.full(size, first + graph + 1))
            start += size
        first += graphs
        nodes = [{"id": i} for i in range(start)]
        text = {"directed": False, "multigraph": False, "graph": {}, "nodes": nodes, "links": links}
        (raw / f"{split}_graph.json").write_text(json.dumps(text))
        np.save(raw / f"{split}_feats.npy", np.concatenate(feats))
        np.save(raw / f"{split}_labels.npy", np.concatenate(labels))
        np.save(raw / f"{split}_graph_id.npy", np.concatenate(numbers))
