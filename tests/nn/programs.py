"""A process of a distributed run: trains a converted encoder for a few steps, and writes down what it saw.

Run by test_distributed.py under torchrun, with a folder for the results.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from coneheads.integrations.conversion import convert

STEPS, BATCH, LENGTH, HEADS = 4, 8, 5, 3  # heads that two processes cannot share evenly


def encoder(heads=HEADS):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=12, nhead=heads, dim_feedforward=16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    convert(model, "penumbral", learn_gamma=True)
    return model


def batches():
    """The global batches: inputs, padding, targets."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, target = torch.randn(2, BATCH, LENGTH, 12, generator=generator).unbind(0)
        yield x, torch.arange(LENGTH).expand(BATCH, -1) >= 4, target


def train(model, rank=0, world=1):
    """The mean loss over all processes at each step. Every process sees its share of the same global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, padding, target in batches():
        x, padding, target = (t.chunk(world)[rank] for t in (x, padding, target))
        loss = (model(x, src_key_padding_mask=padding) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def distributed_data_parallel(rank, world, folder):
    model = encoder()
    # Without find_unused_parameters a parameter that gets no gradient is an error in the next step.
    losses = train(DistributedDataParallel(model), rank, world)
    if rank == 0:
        torch.save({"losses": losses, "state": model.state_dict()}, folder / "ddp.pt")


def fully_sharded(rank, world, folder, heads, name):
    model = encoder(heads)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    losses = train(model, rank, world)
    shares = [None] * world
    dist.all_gather_object(shares, model.layers[0].self_attn.cone.log_gamma.to_local().numel())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"losses": losses, "state": state, "shares": shares}, folder / f"{name}.pt")


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        distributed_data_parallel(rank, world, folder)
        fully_sharded(rank, world, folder, HEADS, "fsdp")
        fully_sharded(rank, world, folder, 1, "fsdp_one_head")
    if rank == 0:
        (folder / "done.json").write_text(json.dumps({"world": world, "launcher": "TORCHELASTIC_RUN_ID" in os.environ}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Without the interpreter's own end: a thread of gloo that drops its last tensor meanwhile aborts the process,
    # also after destroy_process_group (https://github.com/pytorch/pytorch/issues/190489).
    sys.stderr.flush()
    os._exit(0)
