"""README and docs say what the code does: tables are current, links lead somewhere, code blocks and the example run."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import coneheads

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(PYTHON_BLOCK.findall(page.read_text()))
    if "import timm" not in block  # tests/integrations/test_timm.py runs it, in the environment of timm
]


def load(path: Path) -> ModuleType:
    """A file as a module that can be found again by its name, as the fused operators find a score."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def forget_modules():
    """Modules that a test loads are gone after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("docs_"):
            del sys.modules[name]


def test_generated_tables_are_up_to_date():
    generate = load(ROOT / "docs/generate.py")
    for file, tables in generate.TABLES.items():
        text = (ROOT / file).read_text()
        for name, table in tables.items():
            assert generate.with_table(text, name, table()) == text, f"{file}: {name}; run python docs/generate.py"


def test_measured_tables_are_there():
    text = (ROOT / "docs/numerics.md").read_text()
    for name in ("errors", "memory", "time", "setting"):
        body = re.search(f"<!-- generated: {name} -->\n(.*?)<!-- end: {name} -->", text, re.DOTALL)
        assert body is not None, name
        assert body[1].strip(), f"{name} is empty; run python docs/measure_errors.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_images_exist(page):
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {link}, but its headings are {anchors}"


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, forget_modules):
    path = tmp_path / "docs_block.py"
    path.write_text(block)
    load(path)


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])  # the fused kernels know the built-in scores only
def test_worked_example_of_a_new_score_serves_every_backend(backend, tmp_path, forget_modules):
    (block,) = [b for b in PYTHON_BLOCK.findall((ROOT / "docs/contributing.md").read_text()) if "# score:" in b]
    path = tmp_path / "docs_gaussian.py"
    path.write_text(block)
    gaussian = load(path).Gaussian
    query, key, value = (torch.randn(2, 3, n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 9, 9))
    gamma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    leaves = [query, key, value, gamma]

    out = coneheads.attention(query, key, value, score=gaussian(gamma=gamma), backend=backend)
    distance_sq = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    expected = torch.softmax(-gamma[:, None, None] * distance_sq, -1) @ value
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    for got, truth in zip(
        torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(got, truth)


def test_quickstart_runs_and_its_cones_follow_the_tree(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "folder" / "quickstart.png"
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(picture)])
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(f"Picture: {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = dict(re.findall(r"(\w+) (\d\.\d{3})", printed.partition("Rank correlation")[2]))
    assert float(found["penumbral"]) > 0.99 > float(found["dot"])
    assert float(found["umbral"]) > 0.99


@pytest.mark.parametrize("figure", ["quickstart", "four_cones"])
def test_figures_are_small_enough_for_a_repository(figure):
    assert (ROOT / f"docs/figures/{figure}.png").stat().st_size < 300_000
