"""Writes the tables that come from the code into README and docs, between their markers.

    python docs/generate.py            write them
    python docs/generate.py --check    change nothing; exit 1 if one is out of date

A table NAME stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for what the tests know
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import ROOT, of_code, of_gpu, of_speed, of_studies


def with_table(text: str, name: str, table: str) -> str:
    """The text with the table of that name replaced."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no pair of markers {begin} ... {end}")
    return pattern.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


TABLES = {
    "README.md": {
        "compare": of_studies.compare_table,
        "scores": of_code.scores_table,
        "backends": of_code.backends_table,
        "speed": of_speed.speed_table,
    },
    "docs/tuning.md": {
        "starts": of_code.starts_values_table,
        "taxonomies": lambda: of_studies.scores_by_size("taxonomies", "taxonomy"),
        "paper": lambda: of_studies.scores_by_size("starts", "taxonomy and start"),
        "changes": of_studies.changes_table,
        "tree": lambda: of_studies.scores_by_size("tree", "objective and start", share=True),
        "commands": of_studies.commands_list,
    },
    "docs/backends.md": {"gpu": of_gpu.gpu_table},
    "docs/integrations.md": {"supported": of_code.supported_table, "entropy": of_code.entropy_table},
    "docs/experiments.md": {"cora": lambda: of_studies.published_table("cora")},
    "benchmarks/README.md": {"targets": of_speed.targets_table, "graphs": of_speed.graphs_table},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = []
    for file, tables in TABLES.items():
        old = new = (ROOT / file).read_text()
        for name, table in tables.items():
            try:
                new = with_table(new, name, table())
            except FileNotFoundError as missing:
                print(missing, file=sys.stderr)
                return 1
        if new != old:
            stale.append(file)
            if not check:
                (ROOT / file).write_text(new)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` or `python docs/generate.py`", file=sys.stderr)
        return 1
    print("tables are up to date" if not stale else f"wrote {', '.join(stale)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
