"""The task ``kin``: of a set of members of a taxonomy, whose value is that of the query's nearest kin?

The nearest kin is the member with the deepest common ancestor. An example is made so that there is just one: first a
depth is drawn, evenly among those that are possible for the query, then a kin whose lowest common ancestor with the
query has that depth, then the others, all of less deep ancestors. So near and far kin are asked for equally often.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.config import WrongUse
from coneheads.lab.models.kin import KinModel
from coneheads.lab.tasks import taxonomy
from coneheads.lab.tasks.base import TEST, TRAINING, VALID, WORLD, Batch, Example, Task, generator, in_parts
from coneheads.lab.tasks.options import KinOptions


class Kin(Task):
    """See the top of this file."""

    options: KinOptions

    def __init__(self, options: KinOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.taxonomy = taxonomy.from_options(options, generator(options.seed, WORLD))
        self.set_size, self.values = options.set_size, options.values
        self.drawn: dict[str, Batch] = {}  # splits that were asked for
        self.others = options.set_size - 1
        kinship = self.taxonomy.kinship.clone()  # [M, M], the depth of the lowest common ancestor
        deepest = int(kinship.max())
        kinship.fill_diagonal_(deepest + 1)  # a member is not its own kin: behind all others
        # For every member all members by kinship, and how many have less than each depth: drawing is then a look-up.
        self.by_kinship = kinship.argsort(dim=1, stable=True).int()
        self.below = torch.stack([(kinship < depth).sum(1) for depth in range(deepest + 2)], 1)  # [M, depths + 1]
        self.count = self.below.diff(dim=1)  # [M, depths]
        self.possible = (self.count > 0) & (self.below[:, :-1] >= self.others)
        self.queries = self.possible.any(1).nonzero().squeeze(1)
        if not len(self.queries):
            raise WrongUse(
                f"--task.set_size: the taxonomy has {len(kinship)} members, too few or too much alike for sets of "
                f"{self.set_size} with one nearest kin; take a smaller set or a larger taxonomy"
            )

    def model(self, options: ModelOptions) -> nn.Module:
        for name, only in (("depth", 1), ("feedforward", ModelOptions().feedforward), ("dropout", 0.0)):
            if (given := getattr(options, name)) != only:
                raise WrongUse(
                    f"--model.{name}: the model of kin is one layer of attention and nothing else, so this cannot be "
                    f"set; leave it out (it is {only}); got {given}"
                )
        return KinModel(options, len(self.taxonomy.members), self.values)

    def train_batch(self, step: int, size: int) -> Batch:
        return self._draw(size, generator(self.seed, TRAINING, step))

    def batches(self, split: str, size: int) -> Iterator[Batch]:
        if split not in self.drawn:
            stream = {"valid": VALID, "test": TEST}[split]
            self.drawn[split] = self._draw(self.options.examples, generator(self.options.seed, stream))
        return in_parts(self.drawn[split], size)

    def example(self) -> Example:
        """The one of the test set whose members are most closely related to the query: the easiest to get wrong."""
        whole = next(self.batches("test", self.options.examples))
        related = self.taxonomy.kinship[whole.inputs["query"].unsqueeze(1), whole.inputs["members"]]
        hardest = int(related.sum(1).argmax())
        batch = whole[hardest : hardest + 1]
        query, members = int(batch.inputs["query"][0]), batch.inputs["members"][0]
        order = self.taxonomy.kinship[query, members].argsort(stable=True, descending=True)  # the kin first
        inputs = {"query": batch.inputs["query"]} | {
            name: batch.inputs[name][:, order] for name in ("members", "values")
        }
        names = self.taxonomy.members
        depths = self.taxonomy.kinship[query, members[order]].tolist()
        words = [f"{names[int(member)]} ({depth})" for member, depth in zip(members[order], depths, strict=True)]
        caption = (
            f"Query {names[query]}; keys from nearest to farthest kin, with the depth of the common ancestor. "
            "The first key, framed, is the answer."
        )
        return Example(Batch(inputs, batch.targets, batch.weights), [names[query]], words, caption, answer=0)

    def optimum(self) -> dict[str, float]:
        return {"accuracy": 1.0}

    def chance(self) -> float:
        """Of the value that occurs most often in the set: what a model says that knows nothing of kin."""
        right = total = 0.0
        for batch in self.batches("test", 4096):
            counts = nn.functional.one_hot(batch.inputs["values"], self.values).sum(1)
            ties = (counts == counts.amax(1, keepdim=True)).float()
            right += float((ties / ties.sum(1, keepdim=True)).gather(1, batch.targets.unsqueeze(1)).sum())
            total += len(batch)
        return right / total

    def _draw(self, size: int, source: torch.Generator) -> Batch:
        query = self.queries[torch.randint(len(self.queries), (size,), generator=source)]
        depth = torch.multinomial(self.possible[query].float(), 1, generator=source).squeeze(1)
        less, equal = self.below[query, depth], self.count[query, depth]
        kin = self.by_kinship[query, less + _below(equal, source)]
        others = self.by_kinship[query.unsqueeze(1), _distinct(less, self.others, source)]
        members = torch.cat([kin.unsqueeze(1), others], 1).long()
        values = torch.randint(self.values, members.shape, generator=source)
        place = torch.randint(self.set_size, (size, 1), generator=source)  # where the kin stands
        members = _swapped(members, place)
        answer = values.gather(1, place).squeeze(1)
        inputs = {"query": query, "members": members, "values": values}
        return Batch(inputs, answer, torch.ones(size))


def _below(bound: Tensor, source: torch.Generator) -> Tensor:
    """A whole number from 0 to below each bound."""
    return _scaled(torch.rand(bound.shape, generator=source, dtype=torch.float64), bound)


def _scaled(draws: Tensor, bound: Tensor) -> Tensor:
    return (draws * bound).long()


def _distinct(bound: Tensor, count: int, source: torch.Generator) -> Tensor:
    """[B, count] distinct whole numbers below each of the bounds [B], every set equally likely (Floyd's algorithm)."""
    chosen = torch.full((len(bound), count), -1)
    draws = torch.rand(count, len(bound), generator=source, dtype=torch.float64)
    for i in range(count):
        largest = bound - count + i
        drawn = _scaled(draws[i], largest + 1)
        taken = (chosen == drawn.unsqueeze(1)).any(1)
        chosen[:, i] = torch.where(taken, largest, drawn)
    return chosen


def _swapped(members: Tensor, place: Tensor) -> Tensor:
    """The first member of every row exchanged with the one at ``place`` [B, 1]."""
    first = members[:, :1].clone()
    return members.clone().index_copy_(1, torch.tensor([0]), members.gather(1, place)).scatter_(1, place, first)
