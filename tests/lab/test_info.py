"""`coneheads info` tells what is here and what each backend can do."""

import json

import torch

import coneheads
from coneheads.backends import BACKENDS, build
from coneheads.lab import cli, info


def test_json_has_versions_machine_backends_and_kernels(capsys):
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["coneheads"].startswith(coneheads.__version__)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert list(found["backends"]) == [backend.name for backend in BACKENDS]
    available = [name for name, backend in found["backends"].items() if backend["available"]]
    assert available == coneheads.available_backends()
    assert found["kernels"]["available"] == build.status().available


def test_text_names_every_backend_with_what_it_can_do(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for backend in BACKENDS:
        assert backend.summary in out
        assert backend.memory in out
    assert torch.__version__ in out
    assert info.machine.cpu_model() in out


def test_kernels_that_are_not_built_say_why(monkeypatch):
    reason = "no C++ compiler was found; install g++"
    monkeypatch.setattr(build, "status", lambda: build.Status(False, reason, "avx2"))
    text = info.as_text(info.facts())
    assert "built       no" in text
    assert reason in text


def test_kernels_that_are_built_say_from_what(monkeypatch, tmp_path):
    status = build.Status(True, None, "avx512", "g++ 12", tmp_path / "kernels.so", 3.21)
    monkeypatch.setattr(build, "status", lambda: status)
    text = info.as_text(info.facts())
    assert "yes, for avx512, just now in 3.2 s" in text
    assert "g++ 12" in text
    assert str(status.library) in text
