"""Attention on the edges of a graph: it is ``attention`` where the graph is complete, and keeps the same contracts."""

import subprocess
import sys

import pytest
import torch

import coneheads
from coneheads import SortedEdges, backends, edge_attention
from tests import plain
from tests.cases import SCORE_NAMES, needs_compiler

NAMES = [*SCORE_NAMES, "concatenation"]
BACKENDS = [backend.name for backend in backends.EDGE_BACKENDS if backend.available()]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_score = pytest.mark.parametrize("name", NAMES)


def graph(targets=20, sources=23, heads=3, size=6, values=5, edges=90, dtype=torch.float64, name="penumbral"):
    """Random nodes and edges; the last three targets are isolated, some edges are doubled."""
    size = 1 if name == "concatenation" else size
    query = torch.randn(targets, heads, size, dtype=dtype, requires_grad=True)
    key = torch.randn(sources, heads, size, dtype=dtype, requires_grad=True)
    value = torch.randn(sources, heads, values, dtype=dtype, requires_grad=True)
    index = torch.stack([torch.randint(sources, (edges,)), torch.randint(targets - 3, (edges,))])
    index[:, :3] = index[:, 3:6]
    return query, key, value, index


def one_by_one(query, key, value, edge_index, name):
    """Target after target, as the definition says; the scores of one target are a dense call."""
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    for i in range(len(query)):
        source = edge_index[0, edge_index[1] == i]
        if len(source) == 0:
            continue
        if name == "concatenation":
            scores = torch.nn.functional.leaky_relu(query[i] + key[source], 0.2).squeeze(-1).T  # [H, S]
        else:
            scores = coneheads.attention_scores(query[i][:, None], key[source].transpose(0, 1), score=name)[:, 0]
        out[i] = (scores.softmax(-1)[:, None] @ value[source].transpose(0, 1))[:, 0]
    return out


@every_backend
@every_score
def test_it_is_a_softmax_over_the_incoming_edges(name, backend):
    query, key, value, index = graph(name=name)
    tensors = (query, key, value)
    got = edge_attention(*tensors, index, score=name, backend=backend)
    want = one_by_one(*tensors, index, name)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(got)
    grads = torch.autograd.grad(got, tensors, direction)
    for grad, expected in zip(grads, torch.autograd.grad(want, tensors, direction), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-9)


@every_backend
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_on_a_complete_graph_it_is_dense_attention(name, backend):
    query, key, value, _ = graph()
    index = torch.cartesian_prod(torch.arange(23), torch.arange(20)).T
    got = edge_attention(query, key, value, index, score=name, backend=backend)
    want = coneheads.attention(*(t.transpose(0, 1) for t in (query, key, value)), score=name).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@every_backend
@pytest.mark.parametrize("name", SCORE_NAMES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
def test_error_is_at_most_twice_that_of_plain_pytorch(name, dtype, backend):
    """Contract 1, on complete graphs, against the dense formulas in the same dtype; one rounding is free."""
    index = torch.cartesian_prod(torch.arange(23), torch.arange(20)).T
    score = coneheads.scores.resolve(name).for_size(16)

    def dense(q, k, v):
        return plain.attention(*(t.transpose(0, 1) for t in (q, k, v)), score=score).transpose(0, 1)

    def outcome(tensors, direction, function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        assert out.dtype == tensors[0].dtype
        return [t.double() for t in (out, *torch.autograd.grad(out, leaves, direction.to(out.dtype)))]

    mine, theirs, exact = [], [], []
    for _ in range(4):  # of one graph alone the errors are a matter of luck
        low = [t.detach().to(dtype) for t in graph(size=16, values=8)[:3]]
        direction = torch.randn(20, 3, 8, dtype=torch.float64)
        exact.append(outcome([t.double() for t in low], direction, dense))
        theirs.append(outcome(low, direction, dense))
        attend = lambda q, k, v: edge_attention(q, k, v, index, score=score, backend=backend)  # noqa: E731
        mine.append(outcome(low, direction, attend))
    for got, other, want in zip(
        *(map(torch.stack, zip(*found, strict=True)) for found in (mine, theirs, exact)), strict=True
    ):
        assert (got - want).norm() <= 2 * (other - want).norm() + torch.finfo(dtype).eps * want.norm()


@every_backend
@every_score
def test_isolated_nodes_give_zero_and_get_no_gradient(name, backend):
    query, key, value, index = graph(name=name)
    out = edge_attention(query, key, value, index, score=name, backend=backend)
    assert (out[-3:] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    assert (grads[0][-3:] == 0).all()
    unused = ~torch.isin(torch.arange(len(key)), index[0])
    assert (grads[1][unused] == 0).all()
    assert (grads[2][unused] == 0).all()


@every_backend
def test_a_doubled_edge_counts_twice_and_a_self_loop_only_if_it_is_given(backend):
    x = torch.randn(3, 1, 4)
    weights = edge_attention(x, x, x, torch.tensor([[0, 0, 1], [2, 2, 2]]), backend=backend, return_weights=True)[1]
    assert torch.equal(weights[0], weights[1])
    single = edge_attention(x, x, x, torch.tensor([[0], [2]]), backend=backend)
    torch.testing.assert_close(single[2], x[0])
    loop = edge_attention(x, x, x, torch.tensor([[0, 1, 2], [0, 1, 2]]), backend=backend)
    torch.testing.assert_close(loop, x)


@every_backend
@every_score
def test_weights_are_those_of_the_edges_in_their_order_and_have_a_gradient(name, backend):
    query, key, value, index = graph(name=name)
    out, weights = edge_attention(query, key, value, index, score=name, backend=backend, return_weights=True)
    total = torch.zeros(20, 3, dtype=torch.float64).index_add(0, index[1], weights)
    assert torch.allclose(total[torch.isin(torch.arange(20), index[1])], torch.ones((), dtype=torch.float64))
    again = torch.zeros_like(out).index_add(0, index[1], weights[..., None] * value[index[0]])
    torch.testing.assert_close(out, again)
    direction = torch.randn_like(weights)
    got = torch.autograd.grad(weights, (query, key), direction)
    _, weights = edge_attention(query, key, value, index, score=name, backend="reference", return_weights=True)
    for grad, want in zip(got, torch.autograd.grad(weights, (query, key), direction), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: coneheads.Penumbral(gamma=p[0], light_height=p[1]),
        lambda p: coneheads.Penumbral(gamma=p[0], readout="distance", lift="exp"),
        lambda p: coneheads.Umbral(gamma=p[0], radius=p[1]),
        lambda p: coneheads.FinitePenumbral(gamma=p[0]),
        lambda p: coneheads.HalfSpaceDistance(beta=p[0], offset=p[1]),
        lambda p: coneheads.HyperboloidDistance(beta=p[0]),
        lambda p: coneheads.Laplacian(gamma=p[0]),
        lambda p: coneheads.DotProduct(scale=p[0]),
    ],
)
@pytest.mark.parametrize("shape", [(3,), ()])
@needs_compiler
def test_learned_parameters_have_the_gradient_of_the_reference(make, shape):
    query, key, value, index = graph()
    parameters = [torch.full(shape, size, dtype=torch.float64, requires_grad=True) for size in (0.7, 1.3)]
    grads = []
    for backend in BACKENDS:
        out = edge_attention(query, key, value, index, score=make(parameters), backend=backend)
        tensors = (query, key, value, *parameters)
        grads.append(torch.autograd.grad(out.sin().sum(), tensors, allow_unused=True))
    assert grads[0][3] is not None
    for got, want in zip(*grads, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@every_backend
@pytest.mark.parametrize("name", SCORE_NAMES)
def test_gradients_agree_with_differences(name, backend):
    query, key, value, index = graph(targets=5, sources=6, heads=2, size=3, values=2, edges=9)
    function = lambda *t: edge_attention(*t, index, score=name, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(function, (query, key, value), fast_mode=True)


@every_score
@needs_compiler
def test_dropout_drops_the_same_weights_in_every_backend(name):
    query, key, value, index = graph(name=name)
    found = []
    for backend in BACKENDS:
        torch.manual_seed(7)
        found.append(
            edge_attention(query, key, value, index, score=name, dropout_p=0.4, backend=backend, return_weights=True)
        )
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert 0.2 < (found[0][1] == 0).double().mean() < 0.6
    grads = [torch.autograd.grad(out.sum() + w.square().sum(), (query, key, value)) for out, w in found]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_dropout_keeps_the_mean():
    x = torch.randn(30, 2, 4, dtype=torch.float64)
    index = torch.randint(30, (2, 400))
    want = edge_attention(x, x, x, index)
    mean = sum(edge_attention(x, x, x, index, dropout_p=0.3) for _ in range(2000)) / 2000
    assert (mean - want).abs().max() < 0.15
    assert (mean - want).abs().mean() < 0.02


@every_backend
@every_score
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_finite_inputs_give_finite_outputs_and_gradients(name, size, backend):
    query, key, value, index = graph(dtype=torch.float32, name=name)
    with torch.no_grad():
        query.mul_(size)
        key.copy_(query[:1].expand_as(key) if size == 0 else key * size)
    out = edge_attention(query, key, value, index, score=name, backend=backend)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(t.isfinite().all() for t in (out, *grads))


@every_backend
@every_score
def test_nan_reaches_the_nodes_that_attend_to_it_and_no_other(name, backend):
    query, key, value, index = (t.detach() for t in graph(name=name))
    key[4, 1, 0] = torch.nan
    out = edge_attention(query, key, value, index, score=name, backend=backend)
    reached = torch.zeros(20, 3, dtype=torch.bool)
    reached[index[1, index[0] == 4], 1] = True
    assert reached.any()
    assert torch.equal(out.isnan().all(-1), reached)
    assert torch.equal(out.isnan().any(-1), reached)


def test_sorted_edges_give_the_same_and_can_be_used_again():
    query, key, value, index = graph()
    edges = SortedEdges.of(index, sources=23, targets=20)
    want = edge_attention(query, key, value, index)
    for _ in range(2):
        assert torch.equal(edge_attention(query, key, value, edges), want)
    assert len(edges) == 90


def test_the_order_of_edges_changes_nothing_but_the_order_of_weights():
    query, key, value, index = graph()
    order = torch.randperm(90)
    out, weights = edge_attention(query, key, value, index, return_weights=True)
    other, permuted = edge_attention(query, key, value, index[:, order], return_weights=True)
    torch.testing.assert_close(other, out)
    torch.testing.assert_close(permuted, weights[order])


@every_score
@needs_compiler
def test_the_number_of_threads_changes_no_bit(name):
    query, key, value, index = graph(targets=3000, sources=3000, edges=30_000, dtype=torch.float32, name=name)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = edge_attention(query, key, value, index, score=name)
            found.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@every_backend
@pytest.mark.parametrize(
    ("targets", "sources", "edges"),
    [(4, 4, 0), (0, 3, 0), (3, 0, 0), (0, 0, 0)],
    ids=["edges", "targets", "sources", "all"],
)
def test_nothing_at_all_is_fine(targets, sources, edges, backend):
    query = torch.randn(targets, 2, 4, requires_grad=True)
    key, value = (torch.randn(sources, 2, size, requires_grad=True) for size in (4, 3))
    out = edge_attention(query, key, value, torch.zeros(2, edges, dtype=torch.int64), backend=backend)
    assert torch.equal(out, torch.zeros(targets, 2, 3))
    out.sum().backward()
    assert not query.grad.any()


@every_backend
def test_strided_inputs_and_int32_edges_are_fine(backend):
    query, key, value, index = (t.detach() for t in graph())
    want = edge_attention(query, key, value, index, backend=backend)
    strided = [torch.stack([t, t + 1], -1)[..., 0] for t in (query, key, value)]
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, key, value)]
    for tensors in (strided, heads_first):
        torch.testing.assert_close(edge_attention(*tensors, index.int(), backend=backend), want)


def test_compiled_with_dynamic_shapes_it_is_the_same():
    compiled = torch.compile(edge_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for edges in (40, 90, 140):
        query, key, value, index = graph(edges=edges, dtype=torch.float32)
        edges = SortedEdges.of(index, 23, 20)
        got, want = compiled(query, key, value, edges), edge_attention(query, key, value, edges)
        torch.testing.assert_close(got, want)
        direction = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(t, (query, key, value), direction) for t in (got, want)), strict=True):
            torch.testing.assert_close(a, b)


def test_under_autocast_it_computes_in_the_dtype_of_autocast():
    query, key, value, index = graph(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = edge_attention(query, key, value, index)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), edge_attention(query, key, value, index), rtol=0.05, atol=0.05)


@needs_compiler
def test_the_operator_passes_torchs_own_checks():
    query, key, value, index = graph(targets=6, sources=7, edges=12, dtype=torch.float64)
    edges = SortedEdges.of(index.clamp_max(5), 7, 6)
    features = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (query[:6], key[:7], value[:7])]
    numbers = [1.0, 1.0, 1.0, 1.0]
    arguments = (*features, edges.by_target, edges.by_source, None, [], numbers, 2, 2, 0.0, True)
    torch.library.opcheck(torch.ops.coneheads.cpp_edge_attention.default, arguments)


@needs_compiler
def test_a_second_derivative_is_the_references():
    query, key, value, index = graph()
    out = edge_attention(query, key, value, index, backend="reference")
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    assert torch.autograd.grad(first.sum(), query)[0].isfinite().all()
    (first,) = torch.autograd.grad(edge_attention(query, key, value, index).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference', which has every derivative"):
        torch.autograd.grad(first.sum(), query)


@needs_compiler
def test_no_message_is_ever_in_memory():
    """64 heads and values of 64 features on a million edges would be 16 GB of messages; 4 GB must do."""
    code = """
import resource, torch, coneheads
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
x = torch.randn(2000, 16, 16, requires_grad=True)
value = torch.randn(2000, 16, 64, requires_grad=True)
index = torch.randint(2000, (2, 1_000_000))
coneheads.edge_attention(x, x, value, index).sum().backward()
print(bool(value.grad.isfinite().all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


X = torch.randn(4, 2, 8)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"edge_index": torch.tensor([[0, 4], [1, 1]])}, ValueError, r"edge_index\[0\] \(the source .* 0 and 3.*got 4"),
        ({"edge_index": torch.tensor([[0, 1], [1, 9]])}, ValueError, r"edge_index\[1\] \(the target .* 0 and 3.*got 9"),
        ({"edge_index": torch.tensor([[0, -1], [1, 1]])}, ValueError, r"edge_index\[0\].*got -1"),
        ({"edge_index": EDGES.T}, ValueError, r"shape \[2, edges\].*Transpose it: .T"),
        ({"edge_index": torch.tensor([])}, TypeError, "edge_index must be int64 or int32; got float32"),
        ({"edge_index": torch.tensor([[], []])}, TypeError, r"without edges it is torch.empty\(2, 0, dtype"),
        ({"edge_index": torch.tensor([], dtype=torch.int64)}, ValueError, r"shape \[2, edges\]"),
        ({"edge_index": EDGES.float()}, TypeError, "edge_index must be int64 or int32"),
        ({"edge_index": EDGES[0]}, ValueError, r"shape \[2, edges\]"),
        ({"edge_index": [[0], [1]]}, TypeError, r"edge_index must be a tensor \[2, edges\]"),
        ({"edge_index": torch.eye(4).to_sparse()}, TypeError, "flip"),
        ({"edge_index": SortedEdges.of(EDGES, 5)}, ValueError, "a graph with 5 sources and 5 targets"),
        ({"query": X[0]}, ValueError, r"query must have 3 dimensions, \[nodes, heads, size\]"),
        ({"key": X[:, :1]}, ValueError, "same number of heads"),
        ({"key": X[..., :4]}, ValueError, "same last size E"),
        ({"value": X[:3]}, ValueError, "same number of nodes"),
        ({"value": X.double()}, TypeError, "same dtype"),
        ({"query": X[..., :1], "key": X[..., :1]}, ValueError, "at least 2 .* for the score 'penumbral'"),
        ({"score": "concatenation"}, ValueError, r"one feature \(E = 1\).*got E = 8"),
        ({"score": "concat"}, ValueError, "score must be one of"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p"),
        ({"backend": "chunked"}, ValueError, "backend must be one of 'auto', 'cpp', 'reference'; got 'chunked'"),
        ({"return_weights": 1}, TypeError, "return_weights must be True or False"),
        ({"score": coneheads.Penumbral(gamma=torch.ones(3))}, ValueError, r"gamma is a tensor and must have shape"),
    ],
)
def test_a_wrong_call_gets_a_sentence(changes, error, text):
    call = {"query": X, "key": X, "value": X, "edge_index": EDGES} | changes
    with pytest.raises(error, match=text):
        edge_attention(**call)


def test_the_concatenation_is_for_edges_only():
    with pytest.raises(ValueError, match="in edge_attention"):
        coneheads.attention(X, X, X, score=coneheads.scores.Concatenation())


@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0])
def test_the_concatenation_is_that_of_gat(slope):
    torch_geometric = pytest.importorskip("torch_geometric")
    conv = torch_geometric.nn.GATConv(5, 4, heads=3, negative_slope=slope, add_self_loops=False, bias=False)
    x, index = torch.randn(12, 5), torch.randint(12, (2, 40))
    features = conv.lin(x).view(12, 3, 4)
    query = (features * conv.att_dst).sum(-1, keepdim=True)
    key = (features * conv.att_src).sum(-1, keepdim=True)
    got = edge_attention(query, key, features, index, score=coneheads.scores.Concatenation(slope))
    torch.testing.assert_close(got.flatten(1), conv(x, index))
