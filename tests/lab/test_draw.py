"""``coneheads draw``: on real runs, and what its pictures show."""

import math
import shutil

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from coneheads.lab import draw
from coneheads.lab.commands import DrawConfig, ModelOptions, TrainConfig, TrainOptions
from coneheads.lab.config import Failed, WrongUse
from coneheads.lab.tasks.base import Batch, Example
from coneheads.lab.tasks.options import KinOptions, TreeOptions
from coneheads.lab.telemetry import Call, cone_points
from coneheads.lab.train import Trainer
from coneheads.scores import FiniteUmbral, Penumbral, Umbral

KIN = KinOptions(branching=2, depth=4, set_size=5, examples=32)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Trains a model for a moment; returns the folder of the run."""

    def train(score, size=2, task=KIN, depth=1, **options):
        folder = tmp_path_factory.mktemp("runs") / score
        model = ModelOptions(score=score, qk_dim=size, heads=2, width=8, depth=depth, **options)
        config = TrainConfig(task=task, model=model, train=TrainOptions(steps=2, batch=8), threads=1)
        Trainer(config, folder).fit()
        return folder

    return train


def names_of(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("score", "size"), [("penumbral", 2), ("umbral", 5), ("umbral_finite", 3)])
def test_a_run_with_cones_gets_its_maps_its_points_and_its_levels(run_of, capsys, score, size):
    folder = run_of(score, size)
    assert draw.run(DrawConfig(run=str(folder))) == 0
    assert names_of(folder / "figures") == ["attention.png", "levels.png", "points.png"]
    assert capsys.readouterr().out.split() == [
        str(folder / "figures" / name) for name in ("attention.png", "points.png", "levels.png")
    ]
    for path in (folder / "figures").iterdir():
        assert imread(path)[..., :3].std() > 0.05  # not blank


def test_a_run_without_cones_gets_its_maps_alone_in_the_folder_that_is_named(run_of, tmp_path, capsys):
    folder = run_of("dot")
    assert draw.run(DrawConfig(run=str(folder), out=str(tmp_path / "out"), checkpoint="last")) == 0
    assert names_of(tmp_path / "out") == ["attention.png"]
    assert not (folder / "figures").exists()


def test_every_layer_of_an_encoder_is_drawn(run_of, capsys):
    folder = run_of("penumbral", 3, task=TreeOptions(depth=2, examples=32), depth=2, feedforward=8)
    assert draw.run(DrawConfig(run=str(folder))) == 0
    assert names_of(folder / "figures") == ["attention.png", "levels.png", "points.png"]


def test_a_folder_that_is_no_run_is_refused_by_the_name_of_the_flag(tmp_path):
    for run in ("", str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(WrongUse, match="--run"):
            draw.run(DrawConfig(run=run))


def test_a_run_without_a_checkpoint_says_so(run_of, tmp_path):
    folder = shutil.copytree(run_of("dot"), tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(Failed, match="checkpoint"):
        draw.run(DrawConfig(run=str(folder)))


def test_a_folder_that_cannot_be_written_is_told_by_the_name_of_the_flag(run_of, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Failed, match="--out"):
        draw.run(DrawConfig(run=str(run_of("dot")), out=str(tmp_path / "file" / "below")))


def test_the_main_direction_is_that_of_the_largest_spread():
    steps = np.linspace(-1, 1, 9)[:, None]
    found = draw.main_direction(steps * np.array([[-3.0, 4.0]]) + 7)
    assert found == pytest.approx([-0.6, 0.8])
    assert draw.main_direction(np.zeros((3, 2))) == pytest.approx(draw.main_direction(np.ones((4, 2))))


def call_of(score, query, key):
    query, key = torch.tensor([[query]]), torch.tensor([[key]])
    return Call("", query, key, torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool), score)


def test_heights_are_those_of_the_lifted_points():
    call = call_of(Penumbral(light_height=2.0), [[0.0, 0.0]], [[0.0, 3.0]])
    points = cone_points(call)
    assert draw.heights(points, points.q_level[0, 0].double(), 0) == pytest.approx([1.0])
    assert draw.heights(points, points.k_level[0, 0].double(), 0) == pytest.approx([2 / (1 + math.exp(-3))])
    points = cone_points(call_of(Umbral(radius=torch.tensor([0.3])), [[0.0, 0.5]], [[0.0, 0.0]]))
    assert draw.heights(points, points.q_level[0, 0].double(), 0) == pytest.approx([math.exp(0.5)])
    points = cone_points(call_of(FiniteUmbral(), [[1.0, 0.0, 0.5]], [[1.0, 0.0, 0.0]]))
    assert draw.heights(points, points.q_level[0, 0].double(), 0) == pytest.approx(points.q_level[0, 0].numpy())


def lines_of(call, queries, keys):
    nothing = Batch({}, torch.zeros(1), torch.zeros(1))
    panel = draw.points_panel("", call, cone_points(call), 0, Example(nothing, queries, keys))
    axes = Figure().subplots()
    panel.draw(axes)
    return axes


def test_a_line_joins_an_ancestor_and_its_descendant_and_no_others():
    # positions have two coordinates: no shadows are drawn, only lines of relation
    call = call_of(Umbral(radius=1.0), [[0.0, 0.0, 0.0]], [[0.0, 0.0, -1.0], [50.0, 0.0, -1.0]])
    axes = lines_of(call, ["q"], ["below", "far"])
    (line,) = axes.get_lines()
    assert line.get_ydata() == pytest.approx([1.0, math.exp(-1.0)])
    assert {text.get_text() for text in axes.texts} == {"q", "below", "far"}


def test_a_shadow_ends_where_its_descendants_end():
    # a plane: the shadow of the query at height 1 reaches sinh r to each side on the ground
    call = call_of(Umbral(radius=1.0), [[0.0, 0.0]], [[50.0, -1.0]])
    widest = max(np.max(np.abs(line.get_xdata())) for line in lines_of(call, ["q"], ["k"]).get_lines()[:2])
    assert widest == pytest.approx(math.sinh(1.0))


def test_heights_that_differ_much_are_drawn_on_a_logarithmic_scale():
    wide = lines_of(call_of(Umbral(), [[0.0, 0.0]], [[0.0, -9.0]]), ["q"], ["k"])
    near = lines_of(call_of(Umbral(), [[0.0, 0.0]], [[0.0, -1.0]]), ["q"], ["k"])
    assert (wide.get_yscale(), near.get_yscale()) == ("log", "linear")
    assert wide.yaxis.get_major_formatter()(0.01) == "0.01"  # plain: words are not read as formulas
