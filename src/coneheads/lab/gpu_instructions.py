"""Instructions of a GPU kernel, as nvdisasm prints them: how many spill, and how many the loop over tiles has."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LABEL = re.compile(r"^([.$\w]+):$")
INSTRUCTION = re.compile(r"^(?:/\*[0-9a-f]+\*/)?\s*(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b([^;]*);")
TARGET = re.compile(r"`\(([.$\w]+)\)")
# What local memory is read and written with: the kernels have no arrays, so that all of it is spilled registers.
LOCAL = ("LDL", "STL")
# Every kernel takes powers of 2 of its scores in the loop over tiles, and nowhere deeper.
EXPONENTIAL = "MUFU.EX2"

Loop = set[int]  # numbers of blocks


class Instruction(NamedTuple):
    """name: with what follows its dots, MUFU.EX2. guarded: done only by threads for which a predicate holds."""

    name: str
    guarded: bool
    operands: str

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


class Block(NamedTuple):
    """Instructions that run one after the other: jumps lead to the first, and only the last is a jump."""

    label: str | None
    instructions: list[Instruction]


class TileLoop(NamedTuple):
    """How often each kind of instruction stands in the loop over tiles.

    Loops inside of it are counted apart, in ``nested``: they run over coordinates, and only near pairs in float32 need
    them. (On sm_100 they also wait for tensor cores.)
    """

    kinds: Counter[str]
    nested: int

    @property
    def instructions(self) -> int:
        return self.kinds.total()


def read_tools(cubin: bytes) -> tuple[dict[str, int], str]:
    """What cuobjdump says of the resources, by its names, and the instructions as nvdisasm prints them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, sass = (
            subprocess.run([tool.path, flag, str(file)], check=True, capture_output=True, text=True).stdout
            for tool, flag in ((knobs.nvidia.cuobjdump, "-res-usage"), (knobs.nvidia.nvdisasm, "-c"))
        )
    return {name: int(number) for name, number in re.findall(r"(REG|SHARED):(\d+)", usage)}, sass


def spills(sass: str) -> int:
    """How many instructions read or write spilled registers."""
    return sum(i.kind in LOCAL for block in blocks_of(sass) for i in block.instructions)


def multiplies_on_tensor_cores(sass: str) -> bool:
    """Whether there is any HMMA, HGMMA or UTCHMMA."""
    return any(i.kind.endswith("MMA") for block in blocks_of(sass) for i in block.instructions)


def loop_over_tiles(sass: str) -> TileLoop | None:
    """The innermost loop that takes exponentials, the largest if there are several; None if there is none."""
    blocks = blocks_of(sass)
    following = successors(blocks)

    def size(loop: Iterable[int]) -> int:
        return sum(len(blocks[i].instructions) for i in loop)

    def exponentials(loop: Loop) -> bool:
        return any(i.name.startswith(EXPONENTIAL) for b in loop for i in blocks[b].instructions)

    found, nested = None, loops(set(range(len(blocks))), following)
    while candidates := [loop for loop in nested if exponentials(loop)]:
        found = max(candidates, key=size)
        nested = loops(found - entries(found, following), following)
    if found is None:
        return None
    inside = set().union(*nested)
    own = Counter(i.kind for b in found - inside for i in blocks[b].instructions)
    return TileLoop(own, size(inside))


def blocks_of(sass: str) -> list[Block]:
    """The blocks in the order of the listing."""
    blocks = [Block(None, [])]
    for line in map(str.strip, sass.splitlines()):
        if label := LABEL.match(line):
            blocks.append(Block(label[1], []))
        elif match := INSTRUCTION.match(line):
            guard, name, operands = match.groups()
            instruction = Instruction(name, guard is not None, operands)
            blocks[-1].instructions.append(instruction)
            if instruction.kind in ("BRA", "EXIT", "RET"):
                blocks.append(Block(None, []))
    return blocks


def successors(blocks: list[Block]) -> list[set[int]]:
    """For each block the numbers of those that may run next."""
    numbers = {block.label: i for i, block in enumerate(blocks) if block.label}
    following: list[set[int]] = []
    for i, block in enumerate(blocks):
        after = {i + 1} if i + 1 < len(blocks) else set()
        last = block.instructions[-1] if block.instructions else None
        if last and last.kind in ("BRA", "EXIT", "RET"):
            target = TARGET.search(last.operands) if last.kind == "BRA" else None
            # A predicate stands before the instruction, or before the target: BRA.U UP0, `(.L_x_1)
            may_go_on = last.guarded or bool(target and "P" in last.operands[: target.start()])
            after = after if may_go_on else set()
            if target:
                after = after | {numbers[target[1]]}
        following.append(after)
    return following


def loops(nodes: Loop, following: list[set[int]]) -> list[Loop]:
    """The largest sets of blocks in each of which every block leads to every other, and to itself."""
    preceding: list[set[int]] = [set() for _ in following]
    for i, after in enumerate(following):
        for j in after:
            preceding[j].add(i)
    left, found = set(nodes), []
    while left:
        start = min(left)
        loop = _reached(start, nodes, following) & _reached(start, nodes, preceding)
        if loop:
            found.append(loop)
        left -= loop | {start}
    return found


def entries(loop: Loop, following: list[set[int]]) -> Loop:
    """The blocks through which a loop is entered: without them, only loops inside of it are left."""
    return {j for i, after in enumerate(following) if i not in loop for j in after & loop}


def _reached(start: int, nodes: Loop, edges: list[set[int]]) -> Loop:
    """The nodes that one step or more from start leads to."""
    seen: Loop = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] & nodes - seen
        seen |= new
        waiting += new
    return seen
