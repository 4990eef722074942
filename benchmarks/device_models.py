"""Models and the cluster of bench_device.py. Weights are random; only their shapes matter."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from genie.config import Settings
from genie.supervisor import local_cluster

VOCABULARY_SIZE = 1000


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward_expand, self.feed_forward_contract = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def project_to_heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def add_attention_and_feed_forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_output(attended.transpose(1, 2).reshape(x.shape))
        return x + self.feed_forward_contract(
            functional.gelu(self.feed_forward_expand(self.feed_forward_norm(x)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project_to_heads(x)
        return self.add_attention_and_feed_forward(
            x, functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        )


class Transformer(nn.Module):
    """About fifty operations per layer."""

    def __init__(self, width: int, layers: int, *, last_only: bool) -> None:
        super().__init__()
        self.returns_last_only = last_only
        self.embed = nn.Embedding(VOCABULARY_SIZE, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1] if self.returns_last_only else x))


class DecodeStep(nn.Module):
    """Computes the logits for one token; keys and values of all positions are kept in buffers."""

    def __init__(self, width: int, layers: int, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads = width // 64
        self.embed = nn.Embedding(VOCABULARY_SIZE, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY_SIZE)
        shape = (layers, 1, heads, positions, 64)
        self.register_buffer("keys", torch.zeros(shape, dtype=dtype))
        self.register_buffer("values", torch.zeros(shape, dtype=dtype))
        self.register_buffer("positions", torch.arange(positions))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        visible = (self.positions <= position).view(1, 1, 1, -1)
        for number, block in enumerate(self.blocks):
            query, key, value = block.project_to_heads(x)
            self.keys[number].index_copy_(2, position, key)
            self.values[number].index_copy_(2, position, value)
            scores = query @ self.keys[number].transpose(-1, -2) / 8.0
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            x = block.add_attention_and_feed_forward(x, weights @ self.values[number])
        return self.head(self.norm(x[:, -1]))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def make_convnet(stages: tuple[int, ...], width: int) -> nn.Module:
    """Has the shape of ResNet-50 for stages (3, 4, 6, 3) and width 64."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            parts.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def make_captured_models(large: bool) -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Yields name, model and CPU inputs of each captured model."""
    dtype = torch.float16 if large else torch.float32
    width, layers = (1024, 12) if large else (64, 2)
    torch.manual_seed(0)
    for name, batch, length in (("transformer", 8, 512 if large else 16), ("transformer_short", 1, 128)):
        ids = torch.randint(0, VOCABULARY_SIZE, (batch, length))
        yield name, Transformer(width, layers, last_only=True).to(dtype), (ids,)
    side = 224 if large else 32
    for count in (1, 32) if large else (1,):
        model = make_convnet((3, 4, 6, 3), 64) if large else make_convnet((1, 1), 16)
        yield f"convnet_{count}", model.to(dtype), (torch.randn(count, 3, side, side).to(dtype),)
    step = DecodeStep(width, layers, 1024 if large else 32, dtype).to(dtype)
    yield "decode_step", step, (torch.tensor([[7]]), torch.tensor([5]))


@contextmanager
def run_cluster(settings: Settings) -> Iterator[None]:
    """Runs a cluster on this machine in a separate thread, because torch blocks the calling one."""
    ready, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def host() -> None:
        async with local_cluster.run_local_cluster(
            settings, progress=lambda text: print(text, file=sys.stderr)
        ):
            ready.set()
            await asyncio.to_thread(done.wait)

    def run() -> None:
        try:
            asyncio.run(host())
        except BaseException as error:  # raised again in the calling thread
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    try:
        ready.wait()
        if failed:
            raise failed[0]
        yield
    finally:
        done.set()
        thread.join()
