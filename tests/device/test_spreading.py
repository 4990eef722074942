"""A model without device placement is spread over several devices, and computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from genie.device import spread
from genie.errors import UsageError
from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")


class ImageEncoder(nn.Module):
    """Shaped like a ViT: patches, a class token of its own, transformer layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]


class TextEncoder(nn.Module):
    """Shaped like BERT: embeddings of words and positions, transformer layers with a padding mask."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.register_buffer("positions", torch.randn(6, width))
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(2)]
        )

    def forward(self, words: torch.Tensor, *, padding: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x[:, 0]


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = ImageEncoder()
        self.text = TextEncoder()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(32, 3)

    def forward(
        self, images: torch.Tensor, words: torch.Tensor, padding: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        features = [self.image(images), self.text(words, padding=padding)]
        return {"logits": self.head(torch.cat(features, dim=1)) * self.scale}


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(20, (2, 6), generator=generator)
    return torch.randn(2, 3, 8, 8, generator=generator), words, torch.arange(6).repeat(2, 1) > 3


def assert_same_training(model: nn.Module, twin: nn.Module) -> None:
    """One step of both, from inputs in host memory."""
    outputs = [each(*make_inputs())["logits"] for each in (model, twin)]
    torch.testing.assert_close(outputs[0].detach().cpu(), outputs[1].detach())
    for each, output in zip((model, twin), outputs, strict=True):
        output.square().sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_branches_are_placed_whole() -> None:
    torch.manual_seed(0)
    model = Multimodal()
    twin = copy.deepcopy(model)
    placement = spread(model)
    placed = {name: str(device) for name, device in placement.device_by_module.items()}
    assert placed.keys() == {"image", "text", "head"}
    assert {placed["image"], placed["text"]} == {D0, D1}
    assert str(placement.output_device) == placed["head"] == str(model.scale.device)
    assert {str(each.device) for each in model.image.parameters()} == {placed["image"]}
    assert str(model(*make_inputs())["logits"].device) == placed["head"]
    assert_same_training(model, twin)


def test_branches_are_split_if_there_are_more_devices() -> None:
    torch.manual_seed(0)
    model = Multimodal()
    twin = copy.deepcopy(model)
    placement = spread(model, [D0, D1, D0, D1])
    assert any("." in name for name in placement.device_by_module)
    assert {str(each.device) for each in model.parameters()} == {D0, D1}
    assert_same_training(model, twin)


def test_layers_of_a_chain_stay_in_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())))
    twin = copy.deepcopy(model)
    placement = spread(model)
    assert {name: str(device) for name, device in placement.device_by_module.items()} == {
        "0": D0, "2": D0, "4": D1, "6": D1,
    }  # fmt: skip
    x = torch.ones(2, 4)
    assert str(model(x).device) == D1 == str(placement.output_device)
    torch.testing.assert_close(model(x).detach().cpu(), twin(x).detach())


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(UsageError, match="no device"):
        spread(nn.Linear(2, 2), [])
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(UsageError, match="'0' and '1' share the weight 'weight'"):
        spread(tied)
    single = nn.Linear(2, 2)
    assert {str(device) for device in spread(single).device_by_module.values()} == {D0}
    with pytest.raises(UsageError, match="spread already"):
        spread(single)
