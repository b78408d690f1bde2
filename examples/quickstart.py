"""What cone attention does, on a tree of 18 words: `python examples/quickstart.py`.

Nothing is trained. Every word gets two features, which draw the tree: the leaves stand side by side, with wider gaps
between larger families; an inner word stands above the middle of its leaves, and the more it spans the higher it is.
The layout is made for cones. A dot product would follow a tree from other features, and more of them; here one sees
what each score reads in the same two numbers. It shows the idea; it is no evidence that a trained model does better.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import coneheads
from coneheads.scores import Score

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"This example needs {missing.name} for its table and picture: pip install matplotlib rich")

CHILDREN = {
    "thing": ("animal", "plant", "machine"),
    "animal": ("bird", "mammal"), "bird": ("duck", "owl"), "mammal": ("cat", "dog"),
    "plant": ("oak", "rose"),
    "machine": ("vehicle", "tool"), "vehicle": ("car", "bus"), "tool": ("saw", "drill"),
}  # fmt: skip
GAPS = (9.0, 3.0, 1.0)  # between neighbouring leaves whose lowest common ancestor has depth 0, 1, 2
EFFECTIVE_KEYS = 6.0  # each score is scaled until a query attends to this many words: exp(mean entropy)
QUERIES = ("owl", "oak", "vehicle")
SHOWN: dict[str, Callable[[float], Score]] = {
    "dot": lambda scale: coneheads.DotProduct(scale=scale),
    "penumbral": lambda gamma: coneheads.Penumbral(gamma=gamma),
    "umbral": lambda gamma: coneheads.Umbral(gamma=gamma),
}
OTHERS: dict[str, Callable[[float], Score]] = {
    "laplacian": lambda gamma: coneheads.Laplacian(gamma=gamma),
    "half_space": lambda beta: coneheads.HalfSpaceDistance(beta=beta),
}
RELATIONS = {(0, 0): "itself", (1, 0): "parent", (0, 1): "child", (1, 1): "sibling", (2, 2): "cousin"}  # steps up, down

Words = tuple[str, ...]  # the words from the root to a word


def walk(path: Words) -> Iterator[Words]:
    """The paths of a word and of all below it, depth-first."""
    yield path
    for child in CHILDREN.get(path[-1], ()):
        yield from walk((*path, child))


def features_of(paths: list[Words]) -> Tensor:
    """[1, words, 2]: the features that the lift `psi` turns into the drawing of the tree."""
    leaves = [path for path in paths if path[-1] not in CHILDREN]
    steps = [0.0] + [GAPS[len(set(a) & set(b)) - 1] for a, b in itertools.pairwise(leaves)]
    place = dict(zip(leaves, itertools.accumulate(steps), strict=True))
    spans = [[place[leaf] for leaf in leaves if path[-1] in leaf] for path in paths]
    left, right = torch.tensor([[min(span), max(span)] for span in spans], dtype=torch.float64).unbind(1)
    unit = 1.8 / right.max()  # the root spans 1.8 times the height of the light
    x = (left + right - right.max()) / 2 * unit
    level = 0.02 + (right - left) / 2 * unit  # so high that its penumbral shadow just covers what it spans
    y = (level * (2 - level)).sqrt()
    return torch.stack([x / y, y.log()], -1)[None]  # the inverse of psi: y = exp(f_d), x = f[:-1] * y


def weights_at_equal_entropy(score_of: Callable[[float], Score], features: Tensor) -> Tensor:
    """The weights [words, words] at the inverse temperature where exp(mean entropy) is EFFECTIVE_KEYS."""
    low, high = 1e-3, 1e3
    for _ in range(50):
        middle = (low * high) ** 0.5
        weights = coneheads.attention_weights(features, features, score=score_of(middle))[0]
        spread = torch.special.entr(weights).sum(-1).mean().exp()
        low, high = (middle, high) if spread > EFFECTIVE_KEYS else (low, middle)
    return weights


def rank_correlation(weights: Tensor, lca_depth: Tensor) -> float:
    """Goodman and Kruskal's gamma: of two keys, does the one with the deeper common ancestor get more weight?"""
    deeper = lca_depth[:, :, None] > lca_depth[:, None, :]  # [query, key, other key]
    more = (weights[:, :, None] - weights[:, None, :]).sign()[deeper]
    return (more.sum() / more.abs().sum()).item()


def relation(query: Words, key: Words) -> str:
    """What the key is to the query. Words that share nothing but the root are unrelated."""
    shared = len(set(query) & set(key))
    if shared == 1 and min(len(query), len(key)) > 1:
        return "unrelated"
    return RELATIONS.get((len(query) - shared, len(key) - shared), "other")


def print_table(console: Console, paths: list[Words], weights: dict[str, Tensor]) -> None:
    columns = (*RELATIONS.values(), "unrelated")
    table = Table("query", "score", *columns, title="Mean attention weight of a query on a word that is its ...")
    for query, path in enumerate(paths):
        if path[-1] in QUERIES:
            for name in SHOWN:
                kin = [[i for i, key in enumerate(paths) if relation(path, key) == column] for column in columns]
                cells = [f"{weights[name][query, keys].mean():.3f}" if keys else "" for keys in kin]
                table.add_row(path[-1] if name == "dot" else "", name, *cells, end_section=name == "umbral")
    console.print(table)


def draw(paths: list[Words], lca_depth: Tensor, weights: dict[str, Tensor], correlation: dict[str, float]) -> Figure:
    """The tree, the depth of every pair's lowest common ancestor, and the weights of each score, side by side."""
    names = [path[-1] for path in paths]
    figure = Figure(figsize=(15, 4.3), layout="constrained")
    tree, truth, *maps = figure.subplots(1, 2 + len(SHOWN), width_ratios=[0.62, 1, *[1] * len(SHOWN)])
    for row, path in enumerate(paths):
        depth = len(path) - 1
        if depth:
            corner = [names.index(path[-2]) + 0.4, row, row]
            tree.plot([depth - 0.8, depth - 0.8, depth - 0.08], corner, color="0.65", linewidth=1)
        tree.text(depth, row, path[-1], va="center", fontsize=10)
    tree.set(xlim=(0, 4.0), ylim=(len(names) - 0.5, -0.5))
    tree.axis("off")
    truth.imshow(lca_depth.numpy(), cmap="Greys", aspect="auto")
    truth.set_title("what the tree says: depth of the\nlowest common ancestor", fontsize=11)
    largest = max(weights[name].max().item() for name in SHOWN)
    for axes, name in zip(maps, SHOWN, strict=True):
        image = axes.imshow(weights[name].numpy(), cmap="magma_r", vmin=0, vmax=largest, aspect="auto")
        axes.set_title(f"{name}\nrank correlation {correlation[name]:.3f}", fontsize=11)
    for axes in (truth, *maps):
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), [])
    maps[0].set_ylabel("query (the rows of the tree)")
    figure.colorbar(image, ax=maps, label="attention weight", pad=0.01)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart.png"), help="where the picture goes")
    out, console = parser.parse_args().out, Console()
    paths = list(walk(("thing",)))
    lca_depth = torch.tensor([[len(set(query) & set(key)) - 1 for key in paths] for query in paths])
    features = features_of(paths)
    weights = {name: weights_at_equal_entropy(make, features) for name, make in (SHOWN | OTHERS).items()}
    correlation = {name: rank_correlation(matrix, lca_depth) for name, matrix in weights.items()}

    print_table(console, paths, weights)
    print("Cone attention weighs a pair by the depth of its lowest common ancestor: most on the word itself (and its")
    print("children, whose common ancestor with it is the word), then parent and sibling, then cousins, then the rest.")
    print("Rank correlation of weight and that depth, over all queries (1 = never a pair in the wrong order):")
    print("   " + ", ".join(f"{name} {value:.3f}" for name, value in correlation.items()))
    print(f"All scores read the same two features, scaled to the same mean entropy ({EFFECTIVE_KEYS:g} words a query).")
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(paths, lca_depth, weights, correlation).savefig(out, dpi=110)
    print(f"Picture: {out}")


if __name__ == "__main__":
    main()
