"""The task ``listops``: the value of nested lists of MIN, MAX, MED and SM over digits, as in the Long Range Arena.

    [MAX 2 9 [MIN 4 7 ] 0 ]   is 9

An expression is drawn from its root down: a node is an operator with probability 0.25 and a digit otherwise; an
operator has 2 to 10 arguments, every number as likely; at the largest depth all nodes are digits, and the root, which
has depth 1, is an operator. It is taken if its length is within bounds, and drawn anew otherwise. MED is the median,
rounded down; SM the sum modulo 10. An operator with its bracket is one token, and so are a digit and a closing bracket.

The sets ``deeper`` and ``longer`` leave the distribution of the training set, each in one respect: ``deeper`` has
expressions of more depth but of the same bounds of length (up to ``long_length`` where those are hardly ever met),
``longer`` those of more length but of the same depth.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.models.encoder import Encoder
from coneheads.lab.tasks.base import EXTRA, TEST, TRAINING, VALID, WORLD, Batch, Example, Task, generator
from coneheads.lab.tasks.options import ListOpsOptions

WORDS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # by token; the digits are their own tokens
MIN, MAX, MED, SM, CLOSE = range(10, 15)
PADDING = 15
CLASSES = 10
#: bounds that fewer than this share of the draws meet are refused: drawing would take minutes
LEAST_SHARE = 1 / 2000
#: expressions in a row of which none is new, after which there are not enough different ones
PATIENCE = 1000


def value(tokens: bytes) -> int:
    """What an expression is worth.

    >>> value(bytes(WORDS.index(word) for word in "[MAX 2 [SM 8 5 ] [MED 9 4 7 6 ] ]".split()))
    6
    """
    lists: list[list[int]] = [[]]  # that are open, each behind its operator
    for token in tokens:
        if token == CLOSE:
            operator, *arguments = lists.pop()
            lists[-1].append(_applied(operator, arguments))
        elif token < MIN:
            lists[-1].append(token)
        else:
            lists.append([token])
    return lists[0][0]


def _applied(operator: int, arguments: list[int]) -> int:
    if operator == MIN:
        return min(arguments)
    if operator == MAX:
        return max(arguments)
    if operator == SM:
        return sum(arguments) % 10
    ordered, count = sorted(arguments), len(arguments)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) // 2


@dataclass(frozen=True)
class Law:
    """What expressions are drawn, and which of them are taken. Depths count nodes, from the root to the deepest."""

    p_operator: float
    max_args: int
    depths: tuple[int, int]
    lengths: tuple[int, int]

    def draw(self, source: random.Random) -> bytes | None:
        """The tokens of an expression; None if it is not to be taken, which is told as soon as it is known."""
        # Of the functions of `random` this one alone is promised to be the same in every version of Python.
        uniform = source.random
        tokens = bytearray()
        missing = [1]  # arguments yet to be drawn, of every operator that is open, with the root as the first argument
        length = deepest = 1  # so far known
        while True:
            if not missing[-1]:
                missing.pop()
                if not missing:
                    break
                tokens.append(CLOSE)
                continue
            missing[-1] -= 1
            depth = len(missing)
            if depth == 1 or (depth < self.depths[1] and uniform() < self.p_operator):
                tokens.append(MIN + int(4 * uniform()))
                missing.append(2 + int((self.max_args - 1) * uniform()))
                length += 1 + missing[-1]
                deepest = max(deepest, depth + 1)
                if length > self.lengths[1]:
                    return None
            else:
                tokens.append(int(10 * uniform()))
        return bytes(tokens) if length >= self.lengths[0] and deepest >= self.depths[0] else None

    def share(self) -> float:
        """The probability that a draw is taken, exactly: from the distribution of lengths, depth by depth."""
        taken = self._lengths(self.depths[1], 1.0)
        if self.depths[0] > 2:  # less those that end too early, where every node happens to be a digit
            taken = taken - self._lengths(self.depths[0] - 1, 1 - self.p_operator)
        return taken[self.lengths[0] :].sum().item()

    def _lengths(self, levels: int, digit: float) -> Tensor:
        """The probability of every length, of expressions of so many levels at most.

        digit: the probability that a node of the lowest level is a digit; if it is not, the expression does not count.
        """
        size = self.lengths[1] + 1
        nodes = torch.zeros(size, dtype=torch.float64)
        nodes[1] = digit
        for level in range(levels - 1, 0, -1):
            spectrum = torch.fft.rfft(nodes, 2 * size)
            arguments, power = torch.zeros_like(nodes), nodes
            for _ in range(2, self.max_args + 1):
                power = torch.fft.irfft(torch.fft.rfft(power, 2 * size) * spectrum, 2 * size)[:size]
                arguments += power / (self.max_args - 1)
            nodes = torch.zeros_like(nodes)
            nodes[2:] = arguments[:-2] * (self.p_operator if level > 1 else 1.0)
            nodes[1] = 1 - self.p_operator if level > 1 else 0.0
        return nodes


class Expressions:
    """A set of expressions: as text, as tokens [N, longest] with padding behind, and their values [N]."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        longest = max(map(len, texts))
        joined = bytearray().join(text.ljust(longest, bytes([PADDING])) for text in texts)
        self.tokens = torch.frombuffer(joined, dtype=torch.uint8).view(len(texts), longest)
        self.values = torch.tensor([value(text) for text in texts])

    def batch(self, rows: Tensor | slice) -> Batch:
        """These rows, without the columns at their end in which all have padding."""
        tokens, values = self.tokens[rows].long(), self.values[rows]
        padding = tokens == PADDING
        longest = int((~padding).sum(1).max())
        inputs = {"tokens": tokens[:, :longest], "padding": padding[:, :longest]}
        return Batch(inputs, values, torch.ones(len(values)))


class ListOps(Task):
    """See the top of this file. All sets are drawn by the seed of the task; that of the run orders the training set."""

    splits: ClassVar = ("valid", "test", "deeper", "longer")
    options: ListOpsOptions

    def __init__(self, options: ListOpsOptions, seed: int) -> None:
        super().__init__(options, seed)
        depths, lengths = (2, options.max_depth), (options.min_length, options.max_length)
        deepest = options.max_depth + 3 if options.deep_depth is None else options.deep_depth
        more_length = (lengths[1] + 1, options.long_length)
        usual = Law(options.p_operator, options.max_args, depths, lengths)
        deeper = dataclasses.replace(usual, depths=(depths[1] + 1, deepest))
        if deeper.share() < LEAST_SHARE:  # so deep an expression is hardly ever so short
            deeper = dataclasses.replace(deeper, lengths=(lengths[0], options.long_length))
        self.laws = {
            "valid": usual,
            "test": usual,
            "train": usual,
            "deeper": deeper,
            "longer": dataclasses.replace(usual, lengths=more_length),
        }
        self._sets: dict[str, Expressions] = {}
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # an epoch, and its order of the training set
        # Now rather than when a set is needed, which may be at the end of a run.
        for name, flag in (("train", "max_length"), ("deeper", "deep_depth"), ("longer", "long_length")):
            law = self.laws[name]
            if (share := law.share()) < LEAST_SHARE:
                raise WrongUse(
                    f"--task.{flag}: for the {name} set, a share of {max(share, 0):.1g} of what is drawn has depth "
                    f"{law.depths[0]} to {law.depths[1]} and length {law.lengths[0]} to {law.lengths[1]}; at least "
                    f"{LEAST_SHARE:g} is needed: take other bounds of length or depth"
                )

    def model(self, options: ModelOptions) -> nn.Module:
        return Encoder(options, len(WORDS) + 1, CLASSES, self.options.long_length, pooled=True)

    def train_batch(self, step: int, size: int) -> Batch:
        """The training set is gone through again and again, every time in an order of its own."""
        train = self.expressions("train")
        place, end, rows = step * size, (step + 1) * size, []
        while place < end:
            epoch, start = divmod(place, len(train.texts))
            if self._order[0] != epoch:
                source = generator(self.seed, TRAINING, epoch)
                self._order = (epoch, torch.randperm(len(train.texts), generator=source))
            rows.append(self._order[1][start : start + end - place])
            place += len(rows[-1])
        return train.batch(torch.cat(rows))

    def batches(self, split: str, size: int) -> Iterator[Batch]:
        found = self.expressions(split)
        for start in range(0, len(found.texts), size):
            yield found.batch(slice(start, start + size))

    def example(self) -> Example:
        """An expression of about 20 tokens, nested if there is one."""
        test = self.expressions("test")

        def unlike(row: int) -> tuple[bool, int]:
            text = test.texts[row]
            return text.count(CLOSE) < 3, abs(len(text) - 20)

        row = min(range(len(test.texts)), key=unlike)
        words = [WORDS[token] for token in test.texts[row]]
        caption = f"An expression of the test set; its value is {int(test.values[row])}."
        return Example(test.batch(slice(row, row + 1)), words, words, caption)

    def optimum(self) -> dict[str, float]:
        return {"accuracy": 1.0}

    def chance(self) -> float:
        """Of the value that occurs most often in the test set."""
        values = self.expressions("test").values
        return int(values.bincount().max()) / len(values)

    def expressions(self, name: str) -> Expressions:
        """A set by its name, ``train`` or a split: drawn when it is first asked for. None shares one with another."""
        if name not in self._sets:
            # Valid and test do not depend on the size of the training set, which leaves out what is in them.
            others = {"valid": (), "test": ("valid",), "train": ("valid", "test"), "deeper": (), "longer": ()}[name]
            known = {text for other in others for text in self.expressions(other).texts}
            self._sets[name] = Expressions(self._drawn(name, known))
        return self._sets[name]

    def _drawn(self, name: str, known: set[bytes]) -> list[bytes]:
        stream = {"valid": (VALID,), "test": (TEST,), "train": (WORLD,), "deeper": (EXTRA, 0), "longer": (EXTRA, 1)}
        flag = "examples_train" if name == "train" else "examples"
        source = random.Random(generator(self.options.seed, *stream[name]).initial_seed())
        law, count, taken, idle = self.laws[name], getattr(self.options, flag), list[bytes](), 0
        while len(taken) < count:
            text = law.draw(source)
            if text is None:
                continue
            idle += 1
            if text not in known:
                known.add(text)
                taken.append(text)
                idle = 0
            elif idle == PATIENCE:
                raise WrongUse(
                    f"--task.{flag}: there are too few different expressions for {count} in the {name} set; "
                    f"{len(taken)} were found: take fewer, or longer ones (--task.max_length)"
                )
        return taken
