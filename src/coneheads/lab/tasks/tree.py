"""The task ``tree``: leaves of a probabilistic tree grammar. What is the root, or what are the leaves that are masked?

Nothing is asked that the sequence decides for certain: the best a model can do is the posterior given the leaves it is
shown, which belief propagation computes exactly. So a result reads as a share of what can be achieved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.encoder import Encoder
from coneheads.lab.tasks.base import TEST, TRAINING, VALID, WORLD, Batch, Example, Task, generator, in_parts
from coneheads.lab.tasks.options import TreeOptions
from coneheads.lab.tasks.tree_grammar import Grammar

# sequences whose posteriors are computed at a time, so that memory stays bounded on large trees
AT_A_TIME = 512


class Tree(Task):
    """See the top of this file."""

    options: TreeOptions

    def __init__(self, options: TreeOptions, seed: int) -> None:
        super().__init__(options, seed)
        world = generator(options.seed, WORLD)
        self.grammar = Grammar.random(options.depth, options.branching, options.symbols, options.noise, world)
        self.leaves = options.branching**options.depth
        self.masked = max(1, round(options.masked * self.leaves)) if options.objective == "leaf" else 0
        self.mask = options.symbols  # the token of a masked leaf, behind those of the symbols

    def model(self, options: ModelOptions) -> nn.Module:
        symbols = self.options.symbols
        return Encoder(options, symbols + (self.masked > 0), symbols, self.leaves, pooled=not self.masked)

    def train_batch(self, step: int, size: int) -> Batch:
        return self._draw(size, generator(self.seed, TRAINING, step))

    def batches(self, split: str, size: int) -> Iterator[Batch]:
        stream = {"valid": VALID, "test": TEST}[split]
        return in_parts(self._draw(self.options.examples, generator(self.options.seed, stream)), size)

    def example(self) -> Example:
        batch = next(self.batches("test", 1))
        tokens, targets = batch.inputs["tokens"][0], batch.targets[0]
        words = [self._word(int(token)) for token in tokens]
        if self.masked:
            answers = ", ".join(self._word(int(leaf)) for leaf in targets[tokens == self.mask])
            asked = f"a masked leaf is a ?; they were {answers}"
        else:
            asked = f"the root was {self._word(int(targets))}"
        caption = f"The {self.leaves} leaves of a tree, every {self.options.branching} neighbours siblings; {asked}."
        return Example(batch, words, words, caption)

    def optimum(self) -> dict[str, float]:
        """Of the best predictor, given the test inputs: the accuracy to be expected, and the loss.

        accuracy: the mean of the largest posterior probability, since the likeliest answer is right with that
        probability. It is not the share of right answers on this very test set, which the draw of the targets
        disturbs: see ``optimum_error``. loss: the mean entropy of the posterior, in nats.
        """
        found = self._test_posterior
        return {"accuracy": found.amax(-1).mean().item(), "loss": torch.special.entr(found).sum(-1).mean().item()}

    def optimum_error(self) -> float:
        """The standard error of the share of right answers of the best predictor on the test set, or a bound of it.

        A model's accuracy can exceed the optimum by a few of these, and by no more. Answers of one sequence depend on
        each other; the bound is of the case that they are right or wrong together. One answer a sequence: exact.
        """
        right = self._test_posterior.amax(-1)  # [N, asked]
        of_sequence = (right * (1 - right)).clamp_min(0).sqrt().mean(1)
        return (of_sequence.square().sum().sqrt() / len(right)).item()

    def chance(self) -> float:
        """Of the likeliest answer if no leaf is seen: of the root, or of the leaf at the place that is asked for."""
        if not self.masked:
            return 1 / self.options.symbols
        return self.grammar.marginals().amax(-1).mean().item()

    def posterior(self, batch: Batch) -> Tensor:
        """What the best predictor says of every target: [B, q], or [B, leaves, q] with certainty at unmasked leaves."""
        tokens = batch.inputs["tokens"]
        if not self.masked:
            return self.grammar.root_posterior(tokens)
        hidden = tokens == self.mask
        return self.grammar.leaf_posterior(tokens.masked_fill(hidden, 0), hidden)

    @cached_property
    def _test_posterior(self) -> Tensor:
        """[N, asked, q]: of the targets that count, of the test set."""
        found = []
        for batch in self.batches("test", AT_A_TIME):
            posterior = self.posterior(batch)
            if self.masked:
                posterior = posterior[batch.weights > 0].unflatten(0, (len(batch), self.masked))
            found.append(posterior.view(len(batch), -1, self.options.symbols))
        return torch.cat(found)

    def _draw(self, size: int, source: torch.Generator) -> Batch:
        roots, leaves = self.grammar.sample(size, source)
        if not self.masked:
            return Batch({"tokens": leaves}, roots, torch.ones(size))
        # The same number in every sequence: so all sequences count the same, and none asks for nothing.
        places = torch.rand(leaves.shape, generator=source).topk(self.masked).indices
        hidden = torch.zeros_like(leaves, dtype=torch.bool).scatter_(1, places, True)
        return Batch({"tokens": leaves.masked_fill(hidden, self.mask)}, leaves, hidden.float())

    def _word(self, symbol: int) -> str:
        if symbol == self.mask:
            return "?"
        return chr(ord("a") + symbol) if self.options.symbols <= 26 else str(symbol)
