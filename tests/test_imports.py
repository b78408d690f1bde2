"""`import coneheads` needs torch alone, and no module imports one that stands above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import coneheads
from coneheads.backends import BACKENDS

SOURCE = Path(coneheads.__file__).parent

# What each part may import, besides torch and the standard library. Never upward.
ALLOWED = {
    "geometry": {"geometry"},
    "_checks": set(),
    "_version": set(),
    "scores": {"scores", "geometry", "_checks"},
    "backends": {"backends", "scores", "geometry", "_checks"},
    "functional": {"backends", "scores", "_checks"},
    "nn": {"nn", "functional", "backends", "scores", "geometry", "_checks"},
    "integrations": {"integrations", "nn", "functional", "backends", "scores", "geometry", "_checks"},
    "lab": {"lab", "integrations", "nn", "functional", "backends", "scores", "geometry", "_checks", "_version"},
    "__init__": {"functional", "scores", "_version", "nn", "integrations"},
    "__main__": {"lab"},
}
NEEDS_TORCH_ALONE = {"geometry", "_checks", "_version", "scores", "backends", "functional", "nn", "__init__"}


def modules():
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports; a name imported from a package counts as its submodule."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_imports_nothing_above_it(path):
    part = part_of(path)
    for name in imports(path):
        if name.split(".")[0] == "coneheads":
            assert name.split(".")[1] in ALLOWED[part], f"{part} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_needs_torch_alone(path):
    of_no_library = ("conversion.py", "layers.py", "probing.py", "torch_nn.py")
    if part_of(path) not in NEEDS_TORCH_ALONE and path.name not in of_no_library:
        pytest.skip("an extra")
    # The kernels are written in triton; what is imported with coneheads, the __init__.py beside them, is not.
    also = {"triton"} if path.parent.name == "triton" and path.name != "__init__.py" else set()
    for name in imports(path):
        top = name.split(".")[0]
        assert top in {"coneheads", "torch"} | also or top in sys.stdlib_module_names, f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "integrations").glob("*.py")), ids=lambda path: path.name)
def test_a_file_of_an_integration_stays_short(path):
    assert len(path.read_text().splitlines()) < 200


def test_backends_never_import_one_another():
    names = [backend.name for backend in BACKENDS]
    for name in names:
        others = {f"coneheads.backends.{other}" for other in names if other != name}
        files = [SOURCE / "backends" / f"{name}.py", *(SOURCE / "backends" / name).glob("*.py")]
        found = {i for path in files if path.exists() for i in imports(path)}
        assert found
        assert not [i for i in found if any(i == other or i.startswith(other + ".") for other in others)]


def test_cold_import_works_with_every_optional_package_blocked():
    code = """
import sys
blocked = ["numpy", "matplotlib", "rich", "triton", "transformers", "timm", "diffusers", "torch_geometric",
           "jsonargparse", "lightning", "lightning_fabric", "sacrebleu", "tokenizers", "safetensors", "tensorboard"]
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import warnings
warnings.filterwarnings("ignore")  # torch warns that numpy is not there
import torch, coneheads
q = torch.randn(1, 2, 3, 4, requires_grad=True)
for name in ("penumbral", "umbral", "dot"):
    coneheads.attention(q, q, q, score=name).sum().backward()
x = torch.randn(2, 3, 8)
coneheads.ConeMultiheadAttention(8, 2, batch_first=True)(x, x, x)[0].sum().backward()
assert len(coneheads.convert(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))) == 1
extra = [name for name in sys.modules if name.split(".")[0] in blocked]
assert not extra, extra
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


def test_public_names_are_the_documented_ones():
    assert set(coneheads.__all__) == {
        "__version__", "attention", "attention_scores", "attention_weights", "available_backends",
        "Penumbral", "Umbral", "FinitePenumbral", "FiniteUmbral", "HalfSpaceDistance", "HyperboloidDistance",
        "Laplacian", "DotProduct", "ConeMultiheadAttention", "Conversion", "convert", "revert",
        "SortedEdges", "edge_attention",
    }  # fmt: skip
    assert all(hasattr(coneheads, name) for name in coneheads.__all__)
