"""A model in three parts on three accelerators: vision on one, text on another, fusion on a third.

    python examples/multimodal.py [--steps 60]

Uses the configured cluster (`genie up` starts one); with fewer than three accelerators, parts share them.
Weights are random and the data is synthetic: the label of a pair is whether the text names the bright half of
the image. A few steps are enough to see the loss fall.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import torch
from torch import nn
from torch.nn import functional

import genie

WORDS = ("left", "right", "bright", "dark", "is", "the", "side", "of", "picture", "here")
SIZE = 16
LENGTH = 6
WIDTH = 32


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, WIDTH),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), WIDTH)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(words)).mean(1)


class Fusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def forward(self, vision_features: torch.Tensor, text_features: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([vision_features, text_features], dim=1))


class Multimodal(nn.Module):
    """Each branch runs on its own device; their outputs are copied to the third device."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self.devices = devices
        self.vision = Vision().to(devices[0])
        self.text = Text().to(devices[1])
        self.fusion = Fusion().to(devices[2])

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        vision_features = self.vision(images.to(self.devices[0]))
        text_features = self.text(words.to(self.devices[1]))
        return self.fusion(vision_features.to(self.devices[2]), text_features.to(self.devices[2]))


def pairs(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, texts, and labels: whether they match."""
    images = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    bright_right = torch.rand(count, generator=generator) < 0.5
    images[bright_right, :, :, SIZE // 2 :] += 1.0
    images[~bright_right, :, :, : SIZE // 2] += 1.0
    text_right = torch.rand(count, generator=generator) < 0.5
    words = torch.randint(2, len(WORDS), (count, LENGTH), generator=generator)
    words[:, 0] = text_right.long()
    return images, words, (bright_right == text_right).long()


def train(steps: int) -> tuple[float, float]:
    """Trains and returns the first and the last loss."""
    count = torch.remote_accelerator.device_count()
    devices = [f"remote_accelerator:{number % count}" for number in range(3)]
    print(f"vision on {devices[0]}, text on {devices[1]}, fusion on {devices[2]}")
    torch.manual_seed(0)
    model = Multimodal(devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        images, words, labels = pairs(64, generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images, words), labels.to(devices[2]))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:  # item() waits for the result
            losses.append(loss.item())
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    print(f"{steps} steps in {time.perf_counter() - start:.1f} s")
    return losses[0], losses[-1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    await genie.init()
    try:
        if not torch.remote_accelerator.is_available():
            raise SystemExit("the cluster has no accelerators (try: genie nodes)")
        train(given.steps)
    finally:
        await genie.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
