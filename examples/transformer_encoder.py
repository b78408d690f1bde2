"""Cone attention in a model you have, in one line: `python examples/transformer_encoder.py`.

An nn.TransformerEncoder learns to look for parents. Every token is a path in a binary tree, written as bits; its label
is whether the parent of the node is among the tokens. It takes seconds and is no evidence for any score: it shows that
the encoder trains as before, what convert says, and that revert gives the old attention back.
"""

import torch
from torch import nn

import coneheads

DEPTH, TOKENS, WIDTH = 5, 12, 32


class ParentFinder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(DEPTH, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.answer = nn.Linear(WIDTH, 1)

    def forward(self, paths: torch.Tensor) -> torch.Tensor:
        return self.answer(self.encoder(self.embed(paths))).squeeze(-1)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths [size, TOKENS, DEPTH] of -1 and 1, 0 below the node, and whether the parent of each is there."""
    length = torch.randint(1, DEPTH + 1, (size, TOKENS, 1))
    paths = (torch.randint(2, (size, TOKENS, DEPTH)) * 2.0 - 1) * (torch.arange(DEPTH) < length)
    parents = paths * (torch.arange(DEPTH) < length - 1)
    return paths, (parents[:, :, None] == paths[:, None]).all(-1).any(-1).float()


def main() -> None:
    torch.manual_seed(0)
    model = ParentFinder()
    print(coneheads.convert(model, "penumbral", learn_gamma=True, probe=batch(2)[0]), end="\n\n")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(201):
        paths, labels = batch(64)
        logits = model(paths)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            right = ((logits > 0) == labels.bool()).float().mean()
            print(f"step {step:3d}   loss {loss.item():.3f}   right answers {right:.0%}")
    gamma = model.encoder.layers[0].self_attn.cone.score().gamma
    print("\ngamma of the four heads of the first layer, learned:", [round(g, 2) for g in gamma.tolist()])
    print("back to the dot product:", ", ".join(coneheads.revert(model)))


if __name__ == "__main__":
    main()
