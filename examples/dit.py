"""A diffusion transformer with umbral attention: converted in one line, trained, sampled, saved and loaded.

The images are 8 x 8 crosses (class 0) and frames (class 1), of various brightness.
"""

import tempfile

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
from torch.nn.functional import mse_loss

import coneheads

torch.manual_seed(0)
model = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=16, num_layers=2, in_channels=1, sample_size=8, num_embeds_ada_norm=2
)
print(coneheads.convert(model, "umbral", learn_gamma=True))

cross, frame = -torch.ones(8, 8), -torch.ones(8, 8)
cross[3:5], cross[:, 3:5] = 1, 1
frame[[0, 7]], frame[:, [0, 7]] = 1, 1
shapes = torch.stack([cross, frame])[:, None]  # [2, 1, 8, 8]

scheduler = DDIMScheduler(num_train_timesteps=100, beta_end=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(151):
    labels, times = torch.randint(2, (32,)), torch.randint(100, (32,))
    clean, noise = shapes[labels] * (0.8 + 0.2 * torch.rand(32, 1, 1, 1)), torch.randn(32, 1, 8, 8)
    predicted = model(scheduler.add_noise(clean, noise, times), timestep=times, class_labels=labels).sample
    loss = mse_loss(predicted, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")


@torch.no_grad()
def sample(model, labels):
    image = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(1))
    scheduler.set_timesteps(20)
    for time in scheduler.timesteps:
        noise = model(image, timestep=time.expand(len(labels)), class_labels=labels).sample
        image = scheduler.step(noise, time, image).prev_sample
    return image


drawn = sample(model.eval(), torch.tensor([0, 1]))
print("\n".join("".join("#" if point > 0 else "." for point in row) for row in drawn[:, 0].flatten(0, 1)))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = DiTTransformer2DModel.from_pretrained(
        folder
    )  # elsewhere: call coneheads.integrations.diffusers.register()
assert torch.equal(sample(loaded, torch.tensor([0, 1])), drawn)
