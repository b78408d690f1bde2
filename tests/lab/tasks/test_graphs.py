"""The tasks on graphs: their files, their models, and that graph attention learns them."""

import dataclasses

import pytest
import torch

from coneheads.lab import cli, tasks
from coneheads.lab.commands import CompareConfig, ModelOptions, TrainConfig
from coneheads.lab.config import Failed, WrongUse, from_dict
from coneheads.lab.models.gat import GAT, SparseFeatures, dropout
from coneheads.lab.tasks.options import GAT_SCORES, CoraOptions, PPIOptions
from coneheads.lab.train import Trainer
from tests.lab.tasks.graph_data import write_planetoid, write_ppi

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch_geometric")
SMALL = {"heads": 2, "qk_dim": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("Cora", "CiteSeer", "PubMed"):
        write_planetoid(folder, name)
    write_ppi(folder)
    return folder


def config(root, task="cora", score="penumbral", **train):
    batch = 2 if task == "ppi" else 12
    return from_dict(
        TrainConfig,
        {
            "task": {"name": task, "root": str(root)},
            "model": {"score": score, **SMALL},
            "train": {"batch": batch, **train},
        },
    )


@pytest.mark.parametrize("task", ["cora", "citeseer", "pubmed"])
def test_the_public_split_is_read(root, task):
    found = tasks.make(config(root, task).task, seed=0)
    sizes = {split: len(nodes) for split, nodes in found.nodes.items()}
    assert sizes == {"train": 12, "valid": 500, "test": 40}
    loops = (found.graph.edges.edge_index[0] == found.graph.edges.edge_index[1]).sum()
    assert loops == 572
    x = found.graph.x
    total = torch.zeros(572).index_add(
        0, torch.repeat_interleave(torch.arange(572), x.rows.start.diff(append=torch.tensor([len(x.values)]))), x.values
    )
    assert torch.allclose(total[total > 0], torch.ones(()))  # every row is divided by its sum
    assert found.chance() == pytest.approx(14 / 40)


@pytest.mark.parametrize("score", GAT_SCORES)
def test_graph_attention_learns_the_subjects(root, tmp_path, score):
    done = Trainer(config(root, score=score, steps=60, patience=None), tmp_path / "run").fit()
    assert done["metrics"]["test"]["accuracy"] > 0.7 > done["chance"]


@pytest.mark.parametrize("score", ["concatenation", "penumbral"])
def test_graph_attention_learns_several_functions_of_unseen_graphs(root, tmp_path, score):
    done = Trainer(config(root, "ppi", score, steps=60, eval_every=10, lr=0.02), tmp_path / "run").fit()
    assert done["headline"] == "micro_f1"
    assert set(done["metrics"]["test"]) == {"loss", "micro_f1"}
    assert done["metrics"]["test"]["micro_f1"] > 0.67  # of a model that says yes to all
    assert done["metrics"]["test"]["loss"] < 0.67  # a coin has log 2


def test_micro_f1_is_that_of_all_proteins_and_functions(root):
    task = tasks.make(config(root, "ppi").task, seed=0)
    (batch,) = task.batches("test", 1024)
    outputs = torch.randn_like(batch.targets)
    means = {
        name: float((value * batch.weights).sum() / batch.weights.sum())
        for name, value in task.metrics(outputs, batch).items()
    }
    said, true = (outputs > 0) & (batch.weights[..., None] > 0), batch.targets > 0.5
    want = 2 * (said & true).sum() / (said.sum() + true.sum())
    assert task.derived(means)["micro_f1"] == pytest.approx(float(want), rel=1e-5)


def test_a_graph_of_a_batch_says_what_it_says_alone(root):
    task = tasks.make(config(root, "ppi").task, seed=0)
    model = task.model(ModelOptions(score="umbral", depth=3, **SMALL)).eval()
    batch = task._batch(task.numbers["valid"])
    together = model(**batch.inputs)
    for i in range(2):
        alone = model(**batch[i : i + 1].inputs)
        torch.testing.assert_close(together[i : i + 1], alone)


def test_every_graph_is_trained_on_once_before_one_is_again(root):
    task = tasks.make(config(root, "ppi").task, seed=3)
    seen = torch.cat([task.train_batch(step, 3).inputs["graphs"] for step in range(4)])
    for start in (0, 4, 8):
        assert sorted(seen[start : start + 4].tolist()) == [0, 1, 2, 3]


def test_sparse_features_are_the_dense_ones():
    dense = torch.randn(7, 5) * (torch.rand(7, 5) < 0.3)
    weight = torch.randn(5, 4, requires_grad=True)
    got = SparseFeatures.of(dense).times(weight, 0.0, True)
    torch.testing.assert_close(got, dense @ weight)
    (grad,) = torch.autograd.grad(got.square().sum(), weight)
    torch.testing.assert_close(grad, torch.autograd.grad((dense @ weight).square().sum(), weight)[0])


def test_dropout_keeps_its_share_and_the_mean_and_zeros_stay_zeros():
    x = torch.ones(200_000)
    torch.manual_seed(0)
    got = dropout(x, 0.6, True)
    assert set(got.unique().tolist()) == {0.0, torch.tensor(1 / 0.4).item()}
    assert got.mean().item() == pytest.approx(1, abs=0.02)
    assert dropout(x, 0.6, False) is x
    assert dropout(x, 0.0, True) is x
    assert dropout(x, 1.0, True).count_nonzero() == 0
    assert dropout(torch.zeros(9), 0.6, True).count_nonzero() == 0


def test_the_concatenation_network_is_pygs_gat():
    from torch_geometric.nn import GATConv

    options = ModelOptions(score="concatenation", depth=2, heads=3, qk_dim=4)
    ours = GAT(options, 6, 5).eval()
    first, second = GATConv(6, 4, heads=3), GATConv(12, 5)
    for conv, layer in zip((first, second), ours.layers, strict=True):
        conv.lin.weight.data = layer.weight.data.T
        conv.att_src.data, conv.att_dst.data = layer.att_source.data[None], layer.att_target.data[None]
        conv.bias.data = layer.bias.data.normal_()
    x, index = torch.randn(9, 6), torch.randint(9, (2, 30))
    index = index[:, index[0] != index[1]]
    want = second(torch.nn.functional.elu(first(x, index)), index)
    from coneheads import SortedEdges
    from coneheads.lab.tasks.planetoid import with_self_loops

    torch.testing.assert_close(ours(x, SortedEdges.of(with_self_loops(index, 9), 9)), want)


def test_a_killed_run_goes_on_to_the_same_numbers(root, tmp_path):
    whole = Trainer(config(root, steps=25, patience=None), tmp_path / "whole").fit()
    Trainer(config(root, steps=25, patience=None), tmp_path / "cut")  # nothing done yet
    cut = Trainer(config(root, steps=25, patience=None), tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        cut.fit(lambda numbers: (_ for _ in ()).throw(KeyboardInterrupt) if cut.at.step == 12 else None)
    resumed = dataclasses.replace(config(root, steps=25, patience=None), resume=True)
    done = Trainer(resumed, tmp_path / "cut").fit()
    assert done["metrics"] == whole["metrics"]
    assert done["best_step"] == whole["best_step"]


def test_the_model_to_keep_is_no_worse_than_any_before_in_metric_and_loss(root, tmp_path):
    trainer = Trainer(config(root, steps=5, best="metric and loss"), tmp_path / "run")
    found = []
    for step, (value, loss) in enumerate([(0.5, 1.0), (0.6, 1.1), (0.5, 0.9), (0.6, 0.9), (0.6, 0.8), (0.4, 2.0)], 1):
        trainer.at.step = step
        found.append((trainer._is_better(value, loss), trainer.at.best_step, trainer.at.waited))
    assert found == [(True, 1, 0), (False, 1, 0), (False, 1, 0), (True, 4, 0), (True, 5, 0), (False, 5, 1)]


def test_compare_takes_the_scores_of_graphs_from_the_recipe(root):
    found = from_dict(CompareConfig, {"task": {"name": "cora"}})
    assert found.scores == GAT_SCORES
    assert found.sizes == (8,)
    assert found.train.optimizer == "adam"
    assert CoraOptions.published["umbral"] == 0.836
    assert set(PPIOptions.published) == set(GAT_SCORES)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--task", "cora", "--task.root", "nowhere"], 1, "has not all files of this data set. Expected in"),
        (["--task", "ppi", "--task.root", "nowhere"], 1, "train_graph.json"),
        (["--task", "kin", "--model.score", "concatenation"], 2, "concatenation is a score of edges"),
        (["--task", "cora", "--train.batch", "7"], 2, "a batch is the whole training set, 12 nodes; got 7"),
        (["--task", "cora", "--model.feedforward", "7"], 2, "--model.feedforward: a graph attention network has none"),
    ],
)
def test_wrong_use_gets_a_sentence(root, tmp_path, capsys, arguments, code, text):
    given = arguments if "kin" in arguments or "nowhere" in arguments else [*arguments, "--task.root", str(root)]
    given = [*given, "--out", str(tmp_path / "run"), "-q"]
    if "--train.batch" not in given and "kin" not in given:
        given += ["--train.batch", "12"]
    assert cli.main(["train", *given]) == code
    assert text in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path):
    write_planetoid(tmp_path)
    (tmp_path / "Cora/raw/ind.cora.allx").write_bytes(b"not a pickle")
    with pytest.raises(Failed, match=r"a file in .*raw is damaged"):
        tasks.make(CoraOptions(root=str(tmp_path)), seed=0)


def test_drawing_a_graph_says_that_there_is_no_map(root, tmp_path, capsys):
    Trainer(config(root, steps=2), tmp_path / "run").fit()
    assert cli.main(["draw", "--run", str(tmp_path / "run")]) == 1
    assert "is on a graph" in capsys.readouterr().err


def test_the_score_of_edges_is_refused_by_compare_on_other_tasks():
    with pytest.raises(WrongUse, match="the task kin has no graph"):
        CompareConfig(scores=("concatenation",))
