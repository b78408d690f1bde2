"""Contract 6: `torch.compile(fullgraph=True)` with dynamic shapes, and `torch.export`."""

import pytest
import torch
from torch.export import Dim

import coneheads
from tests.cases import BACKEND_NAMES, SCORE_NAMES, needs_compiler

BACKENDS = ["auto", *BACKEND_NAMES]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(batch, length, keys, *, heads=4, kv_heads=2):
    shapes = ((batch, heads, length, 5), (batch, kv_heads, keys, 5), (batch, kv_heads, keys, 3))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def check_same(compiled, eager, inputs, leaves):
    got, want = compiled(*inputs), eager(*inputs)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, weight) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# The first differ from one another and from the sizes that stay: the compiler takes equal sizes for the same one.
SIZES = ((6, 7, 11), (3, 9, 6), (2, 13, 17))


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_compile_whole(name):
    def attend(query, key, value, mask):
        return coneheads.attention(query, key, value, mask, score=name, enable_gqa=True)

    leaves = tensors(2, 7, 11)
    mask = torch.rand(2, 1, 7, 11) > 0.3
    check_same(torch.compile(attend, fullgraph=True, backend="aot_eager"), attend, (*leaves, mask), leaves)


@pytest.mark.parametrize("name", ["penumbral", "dot"])
def test_compile_whole_with_dynamic_shapes(name):
    def attend(query, key, value, mask):
        return coneheads.attention(query, key, value, mask, score=name, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in SIZES:
        leaves = tensors(*sizes)
        mask = torch.rand(sizes[0], 1, sizes[1], sizes[2]) > 0.3
        check_same(compiled, attend, (*leaves, mask), leaves)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_compile_compiles_once_for_all_sizes(backend):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def attend(query, key, value):
        return coneheads.attention(query, key, value, enable_gqa=True, is_causal=True, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for sizes in SIZES:
        inputs = [t.detach() for t in tensors(*sizes)]
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    assert len(graphs) == 1


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_compile_with_inductor(backend):
    gamma = torch.rand(4, requires_grad=True)
    bias = torch.randn(7, 11, requires_grad=True)

    def attend(query, key, value, gamma, bias):
        score = coneheads.Penumbral(gamma=gamma)
        out, lse = coneheads.attention(
            query, key, value, bias, score=score, enable_gqa=True, backend=backend, return_lse=True
        )
        return out + lse[..., None]

    leaves = [*tensors(2, 7, 11), gamma, bias]
    check_same(torch.compile(attend, fullgraph=True), attend, leaves, leaves)


def test_compile_of_weights_and_scores():
    def both(query, key):
        weights = coneheads.attention_weights(query, key, is_causal=True, enable_gqa=True, score="umbral")
        return weights + coneheads.attention_scores(query, key, enable_gqa=True, score="hyperboloid")

    leaves = tensors(2, 7, 11)[:2]
    check_same(torch.compile(both, fullgraph=True, backend="aot_eager"), both, leaves, leaves)


def test_compile_under_autocast():
    def attend(query, key, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return coneheads.attention(query, key, value, enable_gqa=True)

    leaves = tensors(2, 7, 11)
    check_same(torch.compile(attend, fullgraph=True, backend="aot_eager"), attend, leaves, leaves)


def test_compile_with_dropout_gives_what_its_seed_gives():
    def attend(query, key, value):
        return coneheads.attention(query, key, value, dropout_p=0.5, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = tensors(2, 7, 11)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(compiled(*inputs))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


class Model(torch.nn.Module):
    """Attention with learned parameters, as a model would hold it."""

    def __init__(self, name, backend):
        super().__init__()
        self.name, self.backend = name, backend
        self.gamma = torch.nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, query, key, value, mask):
        score = coneheads.Umbral(gamma=self.gamma) if self.name == "umbral" else self.name
        return coneheads.attention(query, key, value, mask, score=score, enable_gqa=True, backend=self.backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["penumbral", "umbral", "dot"])
def test_export_with_dynamic_shapes(name, backend, tmp_path):
    model = Model(name, backend)
    batch, length, keys = Dim("batch"), Dim("length"), Dim("keys")
    shapes = ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch, 2: length, 3: keys})
    example = (*tensors(2, 7, 11), torch.rand(2, 1, 7, 11) > 0.3)
    program = torch.export.export(model, example, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for sizes in SIZES:
        inputs = (*tensors(*sizes), torch.rand(sizes[0], 1, *sizes[1:]) > 0.3)
        torch.testing.assert_close(loaded(*inputs), model(*inputs))


@pytest.mark.parametrize("name", SCORE_NAMES)
def test_operators_pass_the_checks_of_torch_library(name):
    from coneheads.backends import ops
    from coneheads.scores import resolve

    score = resolve(name).for_size(5)
    query, key, value = tensors(2, 3, 4)
    q, q_level = score.points(query.detach())
    k, k_level = score.points(key.detach())
    points = [None if t is None else t.requires_grad_() for t in (q, q_level, k, k_level)]
    parameters = [p.requires_grad_() for p in ops.pair_parameters(score, q)]
    arguments = (*points, parameters, score.spec())
    mask = torch.randn(2, 1, 3, 4, requires_grad=True)
    rest = (value, torch.zeros(2, 2, 4, dtype=torch.bool), mask, torch.tensor(5), False, 0.25)
    torch.library.opcheck(torch.ops.coneheads.pair_scores.default, arguments)
    torch.library.opcheck(torch.ops.coneheads.chunked_attention.default, (*arguments, *rest))


@pytest.mark.skipif("cpp" not in BACKEND_NAMES, reason="no C++ compiler on this machine")
def test_operator_of_the_cpp_kernels_keeps_what_it_declares():
    query, key, value = (torch.randn(2, 2, n, 5, requires_grad=True) for n in (3, 4, 4))
    mask = torch.randn(2, 1, 3, 4, requires_grad=True)
    gamma = torch.rand(1, 2, 1, 1, requires_grad=True)
    light = torch.ones(1, 1, 1, 1, requires_grad=True)
    for tensors in ([], [light, gamma]):
        arguments = (query, key, value, mask, torch.tensor(5), tensors, [1.0, 1.0, 1.0, 1.0], 2, 2, False, 0.25)
        torch.library.opcheck(torch.ops.coneheads.cpp_attention.default, arguments)
