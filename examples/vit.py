"""Cone attention in a vision transformer of timm, in both ways: built with it, and trained first, then converted.

    pip install "coneheads[timm]"
    python examples/vit.py

Each picture shows one of four shapes somewhere in noise, and the model has to name it. Guessing is right in 25 %.
"""

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coneheads
from coneheads.integrations.timm import attention_layer

SIZE, SHAPE = 16, 8  # pixels
SMALL = {"img_size": SIZE, "patch_size": 4, "in_chans": 1, "embed_dim": 48, "depth": 2, "num_heads": 3}


def shapes() -> Tensor:
    """[4, 8, 8]: a square, a frame, a cross and a diagonal."""
    i, j = torch.meshgrid(torch.arange(SHAPE), torch.arange(SHAPE), indexing="ij")
    frame = (i < 2) | (i > SHAPE - 3) | (j < 2) | (j > SHAPE - 3)
    cross = (i // 2 - 1.5).abs().lt(1) | (j // 2 - 1.5).abs().lt(1)
    return torch.stack([torch.ones_like(frame), frame, cross, (i - j).abs() < 2]).float()


def pictures(number: int) -> tuple[Tensor, Tensor]:
    """[number, 1, 16, 16] and the number of the shape in each."""
    images, labels = 0.3 * torch.randn(number, 1, SIZE, SIZE), torch.randint(4, (number,))
    corners = torch.randint(SIZE - SHAPE + 1, (number, 2)).tolist()
    for image, (top, left), shape in zip(images, corners, shapes()[labels], strict=True):
        image[0, top : top + SHAPE, left : left + SHAPE] += shape
    return images, labels


def train(model: nn.Module, steps: int) -> str:
    """Trains, then returns the share of 500 new pictures whose shape the model names."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        images, labels = pictures(32)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = pictures(500)
    with torch.no_grad():
        return f"{(model(images).argmax(-1) == labels).float().mean():.0%} right"


torch.manual_seed(0)
built = timm.create_model("vit_tiny_patch16_224", **SMALL, num_classes=4, attn_layer=attention_layer("penumbral"))
print(f"built with penumbral attention:   untrained {train(built, 0)}, after 120 steps {train(built, 120)}")

model = timm.create_model("vit_tiny_patch16_224", **SMALL, num_classes=4)
print(f"timm's own dot product:           untrained {train(model, 0)}, after 120 steps {train(model, 120)}")
layers = len(coneheads.convert(model, "umbral", learn_gamma=True))
print(f"the same, {layers} layers now umbral:    at once   {train(model, 0)}, after 30 more steps {train(model, 30)}")
