"""``python -m coneheads`` is the command ``coneheads``."""

import sys

from coneheads.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
