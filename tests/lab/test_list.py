"""`coneheads list` names tasks, scores, backends and runs, and is not stopped by a broken record."""

import json

from coneheads.backends import BACKENDS, build
from coneheads.lab import cli, list
from coneheads.lab.tasks import TASKS
from coneheads.scores import BY_NAME

RECORD = {
    "status": "done",
    "config": {"task": {"name": "kin"}, "model": {"score": "umbral", "qk_dim": 4}, "seed": 2},
    "headline": "accuracy",
    "metrics": {"valid": {"loss": 0.5}, "test": {"loss": 0.4, "accuracy": 0.875}},
    "steps": 300,
    "wall_seconds": 12.5,
}


def write(folder, content):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content if isinstance(content, str) else json.dumps(content))


def printed(capsys, *arguments):
    assert cli.main(["list", *arguments]) == 0
    return capsys.readouterr().out


def test_tasks_scores_and_backends_are_named_with_what_they_are(capsys, tmp_path):
    out = printed(capsys, "--runs", str(tmp_path))
    for task in TASKS.values():
        assert f"  {task.name} " in out
        assert task.__doc__.splitlines()[0] in out
    for name in BY_NAME:
        assert f"\n  {name} " in out
    for backend in BACKENDS:
        assert f"\n  {backend.name} " in out
    assert out.endswith(f"no runs in {tmp_path}\n")


def test_runs_are_found_at_any_depth_and_broken_records_are_named(capsys, tmp_path):
    write(tmp_path / "a" / "b", RECORD)
    write(tmp_path / "c", {**RECORD, "status": "running", "metrics": {}, "steps": None})
    write(tmp_path / "broken", '{"status": "do')
    write(tmp_path / "foreign", {"status": "done"})
    write(tmp_path / "odd", [1, 2])
    out = printed(capsys, "--runs", str(tmp_path))
    rows = [line.split() for line in out[out.index(f"runs in {tmp_path}:") :].splitlines()[1:]]
    assert rows[0] == ["task", "score", "size", "seed", "status", "steps", "result", "folder"]
    assert rows[1] == ["kin", "umbral", "4", "2", "done", "300", "accuracy", "0.8750", str(tmp_path / "a" / "b")]
    assert rows[2] == ["kin", "umbral", "4", "2", "running", "-", "-", str(tmp_path / "c")]
    assert f"  {tmp_path / 'broken'}: run.json cannot be read: " in out
    assert f"  {tmp_path / 'foreign'}: run.json is not the record of a run (KeyError: 'config')" in out
    assert f"  {tmp_path / 'odd'}: run.json is not the record of a run" in out


def test_json_holds_the_same(capsys, tmp_path):
    write(tmp_path / "a", RECORD)
    write(tmp_path / "b", "no JSON")
    found = json.loads(printed(capsys, "--runs", str(tmp_path), "--json"))
    assert [*found["tasks"]] == [*TASKS]
    assert [*found["scores"]] == [*BY_NAME]
    assert [*found["backends"]] == [backend.name for backend in BACKENDS]
    good, bad = found["runs"]
    assert (good["task"], good["value"], good["wall_seconds"], good["status"]) == ("kin", 0.875, 12.5, "done")
    assert bad["folder"] == str(tmp_path / "b")
    assert "cannot be read" in bad["error"]


def test_a_backend_that_cannot_run_here_says_why(monkeypatch, tmp_path):
    reason = "no C++ compiler was found; install g++"
    monkeypatch.setattr(build, "status", lambda: build.Status(False, reason, "avx2"))
    assert f"  cpp        not here: {reason}" in list.as_text(list.facts(tmp_path), "outputs").splitlines()
