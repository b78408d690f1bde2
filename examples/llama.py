"""A tiny Llama with cone attention: it learns to count, generates, is saved, loaded, and generates the same.

`python examples/llama.py`, some seconds on a CPU. Every head of every layer learns its own gamma.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import coneheads

WORDS, LENGTH, STEPS = 24, 16, 150


def counts(rows: int) -> torch.Tensor:
    """[rows, LENGTH]: each counts on from a random word by a random step, and wraps around."""
    start, step = torch.randint(WORDS, (rows, 1)), torch.randint(1, 4, (rows, 1))
    return (start + step * torch.arange(LENGTH)) % WORDS


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads, bos_token_id=None, eos_token_id=None))
    print(coneheads.convert(model, "penumbral", learn_gamma=True))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = counts(32)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss.item():.3f}")
    gamma = model.model.layers[0].self_attn.cone.log_gamma.exp()
    print("gamma of the heads of the first layer:", [round(value, 2) for value in gamma.tolist()])

    model.eval()
    prompt = torch.tensor([[2, 5, 8, 11, 14]])
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    words = model.generate(prompt, **ask)
    print("2 5 8 11 14 goes on:", *words[0, 5:].tolist())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder)  # in a new program: register() first
        assert torch.equal(loaded.generate(prompt, **ask), words)
    print("saved, loaded, and generated the same")


if __name__ == "__main__":
    main()
