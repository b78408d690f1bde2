"""Doctests of timm's integration are not collected where timm is not installed: it has an environment of its own."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("timm") else ["coneheads/integrations/timm.py"]
