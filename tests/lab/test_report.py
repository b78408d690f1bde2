"""The report: what its sentences claim, and that its page is whole, safe and readable."""

import dataclasses
import io
import math
import re
import shutil
import subprocess
from html import escape

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from coneheads.lab.report import findings, screen_table, write_report
from coneheads.lab.results import Comparison, RunResult

MEANS = {  # by score and size, much like a real comparison
    "dot": {3: 0.74, 4: 0.83, 8: 0.935},
    "laplacian": {3: 0.955, 4: 0.972, 8: 0.99},
    "penumbral": {3: 0.91, 4: 0.95, 8: 0.94},
    "umbral": {3: 0.962, 4: 0.978, 8: 0.993},
}
MACHINE = {"date": "2026-01-31", "commit": "0123456789ab", "torch": "2.13.0", "cpu": "A processor", "cores": 2}


def telemetry(score, source, heads=2, layers=1, queries=1, keys=16):
    cones = score in ("penumbral", "umbral")

    def levels():
        return np.sort(source.uniform(0, 1, 7)).round(4).tolist() if cones else None

    def head():
        found = {"parameters": {"gamma": float(source.uniform(3, 9))}, "entropy": float(source.uniform(0.2, 1.2))}
        found |= {
            "relative_entropy": float(source.uniform(0.05, 0.4)),
            "query_levels": levels(),
            "key_levels": levels(),
        }
        common = 1.0 if score == "umbral" else float(source.uniform(0.3, 0.9))
        return found | {"common_ancestor": common if cones else None,
                        "related": float(source.uniform(0, 0.3)) if cones else None}  # fmt: skip

    def weights():
        scores = source.normal(size=(queries, keys)) * 2 - 0.6 * np.arange(keys)
        return (np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)).round(4).tolist()

    return {
        "examples": 256,
        "quantiles": [0, 5, 25, 50, 75, 95, 100],
        "layers": [{"name": "score", "score": score, "heads": [head() for _ in range(heads)]} for _ in range(layers)],
        "example": {
            "queries": [f"query{i}" if queries > 1 else "2.0.3.1.1" for i in range(queries)],
            "keys": [f"2.0.{i % 4}.{i % 3}.{i} ({max(0, 4 - i // 3)})" for i in range(keys)],
            "caption": "Query 2.0.3.1.1; keys from nearest to farthest kin. The first key is the answer.",
            "answer": 0 if queries == 1 else None,
            "maps": [[weights() for _ in range(heads)] for _ in range(layers)],
        },
    }  # fmt: skip


def comparison(scores=tuple(MEANS), sizes=(3, 4, 8), seeds=(0, 1, 2), **changes):
    source = np.random.default_rng(0)
    shape = {name: changes.pop(name) for name in ("heads", "layers", "queries", "keys") if name in changes}
    runs = []
    for score in scores:
        for size in sizes:
            for seed in seeds:
                value = min(0.999, float(MEANS[score][size] + 0.008 * source.normal()))
                steps = range(100, 1100, 100)
                noise = 0.01 * source.normal(size=10)
                curve = [(step, float(0.17 + (value - 0.17) * (1 - math.exp(-step / 250)) + n))
                         for step, n in zip(steps, noise, strict=True)]  # fmt: skip
                seconds = float(0.005 * (1 + 0.1 * source.uniform()))
                runs.append(RunResult(score, size, seed, value, {"test": {"accuracy": value}}, 66_000 + 130 * size,
                                      seconds, curve, telemetry(score, source, **shape)))  # fmt: skip
    config = {"task": {"name": "kin", "branching": 4, "depth": 5}, "scores": scores, "sizes": sizes, "seeds": seeds}
    made = Comparison(config, "kin", "accuracy", runs, 1.0, 0.17, MACHINE, "coneheads compare --task kin")
    return dataclasses.replace(made, **changes)


def replaced(made, score, size, **changes):
    """The comparison with other values in the runs of one score and size, each a list of one a seed."""
    runs = []
    for run in made.runs:
        if (run.score, run.size) == (score, size):
            run = dataclasses.replace(run, **{name: values[run.seed] for name, values in changes.items()})
        runs.append(run)
    return dataclasses.replace(made, runs=runs)


def sentence_with(made, *words):
    (found,) = [sentence for sentence in findings(made) if all(word in sentence for word in words)]
    return found


def said_of(made, score):
    (found,) = [sentence for sentence in findings(made) if sentence.startswith(f"{score} is ")]
    return found


def text_of(path):
    return path.read_text(encoding="utf-8")


# what is said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.9, 0.91, 0.9], "umbral is better than dot at size 3 (+0.153)."),
        ([0.5, 0.51, 0.52], "umbral is worse than dot at size 3 (-0.240)."),
        ([0.7, 0.8, 0.75], "umbral is within noise of dot at size 3 (0.000)."),
    ],
)
def test_a_score_is_better_worse_or_within_noise(values, words):
    made = replaced(comparison(sizes=(3,)), "dot", 3, value=[0.75] * 3)
    assert words in findings(replaced(made, "umbral", 3, value=values))


def test_the_number_of_runs_and_seeds_the_guess_and_the_optimum_are_said():
    said = findings(comparison())[0]
    for words in ("sizes 3, 4 and 8", "3 seeds each", "36 runs", "A guess reaches 0.170", "can reach is 1.000"):
        assert words in said


def test_few_seeds_and_many_comparisons_are_admitted():
    said = findings(comparison())[-1]
    assert "3 seeds are few" in said
    assert "Of 9 differences" in said
    many = findings(comparison(seeds=tuple(range(12)), sizes=(3,)))[-1]
    assert "few" not in many


def test_one_seed_proves_nothing():
    said = findings(comparison(seeds=(0,)))
    assert not any("better than dot" in sentence or "worse than dot" in sentence for sentence in said)
    assert "compared by a single seed, which proves nothing" in said_of(comparison(seeds=(0,)), "umbral")
    assert "run more seeds" in said[-1]


def test_a_score_without_cones_that_wins_is_named():
    made = comparison(sizes=(3,))
    made = replaced(made, "laplacian", 3, value=[0.99, 0.991, 0.992])
    for cone in ("umbral", "penumbral"):
        made = replaced(made, cone, 3, value=[0.9, 0.901, 0.903])
    assert "is worse than laplacian (0.991)" in sentence_with(made, "best score without cones")


def test_a_model_that_only_guesses_is_named():
    made = replaced(comparison(), "dot", 4, value=[0.16, 0.17, 0.18])
    assert sentence_with(made, "guess:") == "Not told apart from a guess: dot at size 4."


def test_diverged_runs_are_named_and_not_judged(tmp_path):
    made = comparison(("dot", "umbral"), (3, 4), heads=1)
    made = replaced(made, "umbral", 3, value=[math.nan, 0.96, 0.97], telemetry=[{}, {}, {}])
    made = replaced(made, "umbral", 4, curve=[[], [(100, math.nan)], [(100, 0.5)]])
    assert "1 of 3 of umbral at size 3" in sentence_with(made, "diverged")
    assert said_of(made, "umbral").startswith("umbral is better than dot at size 4 ")
    page = text_of(write_report(made, tmp_path))
    assert "2 of 3" in page
    assert "nan" not in re.sub(r"<[^>]*>", " ", page).lower().split()


def test_an_unknown_optimum_is_called_that(tmp_path):
    made = comparison(("dot", "umbral"), (3,), heads=1, optimum=None, chance=None)
    assert "the optimum is not known" in sentence_with(made, "highest means")
    page = text_of(write_report(made, tmp_path))
    assert "% of optimum" not in page
    assert "guess" not in page


def test_no_runs_at_all_are_said(tmp_path):
    made = dataclasses.replace(comparison(), runs=[])
    assert findings(made) == ["There are no finished runs."]
    assert "There are no finished runs." in text_of(write_report(made, tmp_path))


# the table on a terminal


def printed(made, width=80):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen_table(made))
    return out.getvalue()


def test_the_table_fits_a_terminal_of_80_columns():
    lines = printed(comparison()).splitlines()
    assert not any("…" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 80
    (line,) = [line for line in lines if "within noise" in line]
    assert line.split()[0] == "penumbral"
    assert "n = 3" in "".join(lines[:4])


def test_the_table_says_how_many_runs_count_where_some_diverged():
    text = printed(replaced(comparison(), "umbral", 3, value=[math.nan, 0.96, 0.97]), width=100)
    (line,) = [line for line in text.splitlines() if "diverged" in line]
    assert "(2 of 3)" in line


# the page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(comparison(), tmp_path_factory.mktemp("report"))


def test_the_page_holds_all_its_parts_in_order(report):
    titles = re.findall(r"<h2>(.*?)</h2>", text_of(report))
    assert titles == ["What was found", "Table", "Size of query and key", "Learning curves", "Attention maps",
                      "What the cones do", "How to repeat it"]  # fmt: skip
    assert text_of(report).count("<svg") == 2 + 3 + 2 + 5  # sizes, curves, heads, telemetry
    for part in ("coneheads compare --task kin", "branching: 4", "A processor", "2.0.1.1.1 (4)", "mean ± standard"):
        assert part in text_of(report)


def test_every_picture_is_a_file_too(report):
    names = sorted(path.name for path in (report.parent / "figures").iterdir())
    assert names == ["cones.png", "curves.png", "maps.png", "sizes.png"]
    for name in names:
        assert imread(report.parent / "figures" / name)[..., :3].std() > 0.02


def test_the_same_comparison_gives_the_same_files(tmp_path):
    first, again = (write_report(comparison(("dot", "umbral"), (3,), heads=1), tmp_path / name) for name in "ab")
    for path in (first, *(first.parent / "figures").iterdir()):
        assert path.read_bytes() == (again.parent / path.relative_to(first.parent)).read_bytes()


def outside_references(page):
    found = re.findall(r"""(?:src|href|action|poster|data)\s*=\s*["']?([^"'\s>]+)|url\(\s*["']?([^"')]+)""", page)
    return [one or other for one, other in found if not (one or other).startswith(("#", "data:"))]


def test_the_page_asks_for_nothing_outside_of_itself(report):
    page = text_of(report)
    assert outside_references(page) == []
    assert outside_references('<img src="https://a.b/c.png"><i style="background: url(x.png)">') == [
        "https://a.b/c.png",
        "x.png",
    ]
    assert "@import" not in page
    assert "<script" not in page
    assert "<link" not in page


def test_all_text_is_escaped(tmp_path):
    evil = "</style><script>alert(1)</script>&$x$\"'"
    made = comparison(
        ("umbral",), (3,), (0,), task=evil, headline=evil, command=evil, machine={evil: evil}, config={evil: [evil]}
    )
    runs = []
    for run in made.runs:
        example = run.telemetry["example"] | {"queries": [evil], "keys": [evil] * 16, "caption": evil}
        runs.append(dataclasses.replace(run, telemetry=run.telemetry | {"example": example}))
    page = text_of(write_report(dataclasses.replace(made, runs=runs), tmp_path))
    assert "<script" not in page
    assert page.count("</style>") == 1 + page.count("<svg")  # the page's own, and one in each picture
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": ("dot", "umbral"), "sizes": (3, 8), "seeds": (0,), "heads": 1},
        {"scores": ("umbral",), "sizes": (3,), "heads": 1},
        {"scores": ("dot",), "sizes": (3,), "seeds": (5,), "optimum": None, "chance": None},
        {"scores": ("dot", "umbral"), "sizes": (4,), "seeds": (0, 1), "layers": 2, "queries": 5, "keys": 7},
        {"scores": ("dot",), "sizes": (3,), "seeds": (0,), "queries": 60, "keys": 90},
    ],
    ids=["one seed", "no baseline", "one run of dot", "one size, layers and queries", "many words"],
)
def test_reports_of_every_kind_of_comparison_are_written(tmp_path, changes):
    page = text_of(write_report(comparison(**changes), tmp_path))
    assert page.endswith("</html>\n")
    assert "<svg" in page


def test_words_of_any_script_are_drawn(tmp_path):
    made = comparison(scores=("dot",), sizes=(3,), seeds=(0,))
    run = made.runs[0]
    example = run.telemetry["example"] | {"keys": ["犬", "кошка", "🐕"] + ["x" * 50] * 13}
    made = dataclasses.replace(made, runs=[dataclasses.replace(run, telemetry=run.telemetry | {"example": example})])
    page = text_of(write_report(made, tmp_path))
    assert "犬" in page
    assert "x" * 17 + "…" in page


# in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    profile = tmp_path_factory.mktemp("profile")

    def run(page, *flags):
        done = subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
             "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}", "--virtual-time-budget=3000", *flags,
             page.as_uri()],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_the_page_is_drawn_by_a_browser_without_a_word_of_complaint(report, browser, tmp_path):
    picture = tmp_path / "page.png"
    done = browser(report, "--window-size=1200,2400", f"--screenshot={picture}")
    assert "CONSOLE" not in done.stderr
    pixels = imread(picture)[..., :3]
    assert pixels.shape[1] == 1200
    thirds = np.array_split(pixels, 3)
    assert all(part.std() > 0.05 for part in thirds)  # no third of it is blank


def test_a_page_with_a_fault_would_be_noticed(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><script>undefined_function()</script>")
    assert "CONSOLE" in browser(page, "--dump-dom").stderr


def test_on_a_phone_nothing_sticks_out(report, browser, tmp_path):
    # A window cannot be this narrow, but a frame can; and srcdoc lets the script see into it.
    wrapper = tmp_path / "phone.html"
    wrapper.write_text(
        f'<!doctype html><iframe id=f width=360 height=800 srcdoc="{escape(text_of(report))}"></iframe>'
        "<pre id=found></pre><script>"
        "onload = () => { const page = document.getElementById('f').contentDocument;"
        "const width = page.documentElement.clientWidth;"
        "const out = [...page.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('svg')"
        " && e.getBoundingClientRect().right > width + 1).map(e => e.tagName);"
        "document.getElementById('found').textContent = ['width', width, 'scrolls', page.documentElement.scrollWidth,"
        " 'svgs', page.querySelectorAll('svg').length, 'out', ...out].join(' '); };"
        "</script>",
        encoding="utf-8",
    )
    found = re.search(r"<pre id=.found.>(.*?)</pre>", browser(wrapper, "--dump-dom").stdout)[1].split()
    width, scrolls = int(found[1]), int(found[3])
    assert 340 <= width <= 360
    assert scrolls <= width
    assert int(found[5]) > 5
    assert found[6:] == ["out"]
