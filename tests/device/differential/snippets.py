"""What a snippet gets and how it is declared.

A snippet is a function of `Inputs`. Everything that it returns is compared, or the exception that it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Snippet: TypeAlias = Callable[["Inputs"], Any]
SEED = 20260213


class Inputs:
    """Makes the inputs of one run. The values depend only on the calls before, not on the device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        drawn = torch.randn(shape, dtype=torch.float64, generator=self._generator)
        return drawn.to(dtype).to(self.device).requires_grad_(grad)

    def complex(self, *shape: int, grad: bool = False) -> torch.Tensor:
        drawn = torch.randn(shape, dtype=torch.complex64, generator=self._generator)
        return drawn.to(self.device).requires_grad_(grad)

    def count(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        """0, 1, 2, ..."""
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        return numbers.to(dtype).to(self.device).requires_grad_(grad)

    def integers(self, *shape: int, below: int = 10, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(below, shape, generator=self._generator).to(dtype).to(self.device)

    def bools(self, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=self._generator) < 0.5).to(self.device)

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype, device=self.device)


class Table(dict[str, Snippet]):
    """The snippets of a topic, by name."""

    def define(self, snippet: Snippet) -> Snippet:
        """A decorator: adds a function under its name."""
        assert snippet.__name__ not in self, f"two snippets are named {snippet.__name__}"
        self[snippet.__name__] = snippet
        return snippet
