"""Doctests are not collected from what imports a library that is not installed.

timm has an environment of its own, and triton is there for Linux alone.
"""

import importlib.util

NEEDED_BY = {
    "timm": ["coneheads/integrations/timm.py"],
    "triton": [
        f"coneheads/backends/triton/{name}.py"
        for name in ("scores", "tiles", "forward", "backward", "blocks", "launch")
    ],
}
collect_ignore = [path for name, paths in NEEDED_BY.items() if not importlib.util.find_spec(name) for path in paths]
