"""Reads PTX, the text that the compiler made of a kernel, into instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class Memory(NamedTuple):
    """A place in memory: the number in a register, or the place of a symbol, and a distance in bytes."""

    base: str
    offset: int


Operand = str | Memory | list[str]  # a register, number or label; a place; several registers


class Instruction(NamedTuple):
    """guard: the predicate it depends on, and whether that has to be true. line: in the text, from 1."""

    name: str
    operands: list[Operand]
    guard: tuple[str, bool] | None
    line: int
    text: str

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


@dataclass
class Program:
    """Of one kernel. registers: their bits, 1 for predicates. labels: the numbers of the instructions they stand at."""

    name: str
    threads: int
    target: str
    parameters: list[tuple[str, str]] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def read(text: str) -> Program:
    """The only kernel of a text."""
    entry = re.search(r"\.entry (\w+)\((.*?)\)\s*(.*?)\{", text, re.DOTALL)
    target = re.search(r"\.target (\w+)", text)
    if entry is None or target is None:
        raise ValueError("there is no kernel in this text")
    threads = re.search(r"\.reqntid (\d+)", entry[3])
    assert threads is not None, "a kernel says how many threads it has"
    program = Program(entry[1], int(threads[1]), target[1])
    for declared in entry[2].split(","):
        words = declared.split()
        program.parameters.append((words[-1], words[1].removeprefix(".")))
    _Reader(program, text[: entry.end()].count("\n") + 1).read(text[entry.end() :])
    return program


class _Reader:
    """Statements end with a semicolon. Braces at the start of one open a scope, whose registers have names of its own;
    elsewhere they hold several registers."""

    def __init__(self, program: Program, line: int) -> None:
        self.program, self.line = program, line
        self.scopes: list[dict[str, str]] = [{}]
        self.scopes_so_far = 0
        self.statement, self.begun_at = "", line

    def read(self, body: str) -> None:
        for text in body.split("\n"):
            code = text.split("//")[0]
            if not code.strip().startswith((".loc", ".pragma")):
                for character in code:
                    if not self._take(character):
                        return
                self._take(" ")
            self.line += 1
        raise ValueError("a kernel has no end")

    def _take(self, character: str) -> bool:
        """False at the end of the kernel."""
        begun = bool(self.statement.strip())
        if not begun:
            self.begun_at = self.line
            self.statement = ""
            if character == "{":
                self.scopes.append({})
                self.scopes_so_far += 1
                return True
            if character == "}":
                self.scopes.pop()
                return bool(self.scopes)
        if character == ";":
            self._end(self.statement.strip())
        elif character == ":" and re.fullmatch(r"\s*[$\w]+", self.statement):
            name = self.statement.strip()
            self.scopes[-1][name] = self._in_scope(name)
            self.program.labels[self.scopes[-1][name]] = len(self.program.instructions)
        else:
            self.statement += character
            return True
        self.statement = ""
        return True

    def _in_scope(self, name: str) -> str:
        return name if len(self.scopes) == 1 else f"{name}@{self.scopes_so_far}"

    def _end(self, statement: str) -> None:
        if not statement:
            return
        if statement.startswith(".reg"):
            self._declare(*statement.removeprefix(".reg").split(maxsplit=1))
            return
        guard = None
        if statement.startswith("@"):
            word, statement = statement[1:].split(maxsplit=1)
            guard = (self._named(word.lstrip("!")), not word.startswith("!"))
        name, *rest = statement.split(maxsplit=1)
        operands = [self._operand(text) for text in _split(rest[0])] if rest else []
        if name.startswith("bra") and not rest[0].startswith("$"):  # to a label of this scope, which may come later
            operands = [self._in_scope(rest[0].strip())]
        self.program.instructions.append(Instruction(name, operands, guard, self.begun_at, statement))

    def _declare(self, kind: str, names: str) -> None:
        bits = 1 if kind == ".pred" else int(kind[2:])
        for name in names.replace(" ", "").split(","):
            if many := re.fullmatch(r"(.+)<(\d+)>", name):
                self.program.registers.update({f"{many[1]}{i}": bits for i in range(int(many[2]))})
            else:
                self.scopes[-1][name] = self._in_scope(name)
                self.program.registers[self.scopes[-1][name]] = bits

    def _named(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return [self._named(name.strip()) for name in text[1:-1].split(",")]
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            return Memory(self._named(base), int(offset or "0", 0))
        return self._named(text)


def _split(text: str) -> list[str]:
    """At commas that are in no braces and no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
