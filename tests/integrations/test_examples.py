"""The examples of the libraries that are installed here run, and are short. (That of timm: test_timm.py.)"""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_less_than_60_lines(path):
    if path.stem == "quickstart":
        pytest.skip("draws a figure of the README")
    assert len(path.read_text().splitlines()) < 60


def test_the_encoder_learns_and_is_put_back(capsys):
    runpy.run_path(str(EXAMPLES / "transformer_encoder.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "2 of 2 attention layers have the score 'penumbral'" in printed
    right = [int(share) for share in re.findall(r"right answers (\d+)%", printed)]
    assert right[-1] > 85 > right[0]
    assert "back to the dot product: encoder.layers.0.self_attn, encoder.layers.1.self_attn" in printed


def test_the_llama_learns_to_count_and_generates_the_same_when_loaded(capsys):
    runpy.run_path(str(EXAMPLES / "llama.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "goes on: 17 20 23 2 5 8 11 14" in printed
    assert printed.rstrip().endswith("saved, loaded, and generated the same")
