"""Tables on a terminal, whole lines elsewhere."""

import io

from rich.console import Console

from coneheads.lab.machine import this_machine
from coneheads.lab.speed import targets
from coneheads.lab.speed.results import Row
from coneheads.lab.speed.runs import Result, Run
from coneheads.lab.speed.screen import Screen

RUN = Run("cpp", "penumbral", 1, 2, 512, 512, 16, 64)
ROWS = [
    Row(RUN, Result(1.234, 1.2, 1.3, 9, 0.95, 3.25, 2e-6, 0.0), this_machine()),
    Row(RUN, Result(note="it has no backward on a CPU, " + 20 * "and more "), this_machine()),
]


def shown(terminal):
    out = io.StringIO()
    with Screen(3, Console(file=out, force_terminal=terminal, width=100, highlight=False)) as screen:
        screen.doing("timing", 1)
        screen.rows("title", ROWS)
        screen.verdicts([(targets.targets("cpp")[0], 1.5)])
    return out.getvalue()


def test_elsewhere_every_row_is_one_line_however_long():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "title"
    (row,) = [line for line in lines if "1.23" in line]
    assert " ".join(row.split()) == "cpp penumbral B=1 H=2 L=512 E=16 Ev=64 2t 1.23 1.2-1.3 0.95 3.2 2e-06"
    (missing,) = [line for line in lines if "n/a: it has no backward" in line]
    assert missing.endswith("and more")
    (verdict,) = [line for line in lines if "of SDPA's time" in line]
    assert verdict.split()[-3:] == ["1", "1.500", "no"]
    assert lines[-1] == "0 of 1 targets hold"
    assert not any("\x1b" in line for line in lines)


def test_a_terminal_gets_a_table():
    text = shown(terminal=True)
    assert "━" in text
    assert "1.23" in text
