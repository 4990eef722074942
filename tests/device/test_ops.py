"""A broad table of ops: each gives the same result on a remote device as on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")


class InputMaker:
    """Makes the same inputs for each device, on the CPU, and moves them to the device."""

    def __init__(self, name: str, device: str) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def positive(self, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=self._generator) + 0.1).to(self.device)

    def integers(self, *shape: int, high: int = 10) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator).to(self.device)


Call = Callable[[InputMaker], Any]
CALLS: dict[str, Call] = {
    # factories
    "zeros": lambda t: torch.zeros(2, 3, device=t.device),
    "ones": lambda t: torch.ones(2, 3, dtype=torch.float64, device=t.device),
    "full": lambda t: torch.full((2,), 7.5, device=t.device),
    "full int": lambda t: torch.full((2,), 7, device=t.device),
    "arange": lambda t: torch.arange(2, 20, 3, device=t.device),
    "arange float": lambda t: torch.arange(0, 1, 0.25, device=t.device),
    "linspace": lambda t: torch.linspace(0, 1, 5, device=t.device),
    "logspace": lambda t: torch.logspace(0, 2, 3, device=t.device),
    "eye": lambda t: torch.eye(3, 4, device=t.device),
    "tensor": lambda t: torch.tensor([[1, 2], [3, 4]], device=t.device),
    "tensor scalar": lambda t: torch.tensor(3.25, device=t.device),
    "as_tensor": lambda t: torch.as_tensor([1.5, 2.5], device=t.device),
    "tril_indices": lambda t: torch.tril_indices(3, 3, device=t.device),
    "hann_window": lambda t: torch.hann_window(8, device=t.device),
    "zeros_like": lambda t: torch.zeros_like(t(2, 3)),
    "ones_like dtype": lambda t: torch.ones_like(t(2, 3), dtype=torch.int32),
    "new_full": lambda t: t(2).new_full((3,), 4.0),
    "new_tensor": lambda t: t(2).new_tensor([1, 2]),
    # arithmetic
    "add": lambda t: t(3, 4) + t(3, 4),
    "add alpha": lambda t: torch.add(t(3), t(3), alpha=2.5),
    "add number": lambda t: t(3) + 1.5,
    "radd": lambda t: 2 - t(3),
    "add cpu scalar": lambda t: t(3) + torch.tensor(2.0, dtype=torch.float64),
    "broadcast": lambda t: t(3, 1) * t(1, 4),
    "div": lambda t: t(3) / t.positive(3),
    "floor_divide": lambda t: t.integers(5) // 3,
    "remainder": lambda t: t.integers(5) % 3,
    "pow": lambda t: t.positive(3) ** 2.5,
    "rpow": lambda t: 2 ** t(3),
    "neg abs": lambda t: (-t(3)).abs(),
    "compare": lambda t: t(5) > 0,
    "eq": lambda t: t.integers(5, high=2) == 1,
    "logical": lambda t: (t(5) > 0) & (t(5) < 1) | ~(t(5) > 2),
    "shift": lambda t: t.integers(4) << 2,
    "promotion": lambda t: t.integers(3) + t(3),
    "true_divide": lambda t: t.integers(3) / 2,
    "addcmul": lambda t: torch.addcmul(t(3), t(3), t(3), value=0.5),
    "lerp": lambda t: torch.lerp(t(3), t(3), 0.3),
    "clamp": lambda t: t(6).clamp(-0.5, 0.5),
    "clamp min": lambda t: t(6).clamp(min=0),
    "where": lambda t: torch.where(t(5) > 0, t(5), 0.0),
    "maximum": lambda t: torch.maximum(t(5), t(5)),
    # functions of one tensor
    "exp log": lambda t: t.positive(4).log().exp(),
    "sqrt rsqrt": lambda t: t.positive(4).sqrt() + t.positive(4).rsqrt(),
    "sin cos tanh": lambda t: t(4).sin() + t(4).cos() + t(4).tanh(),
    "sigmoid": lambda t: t(4).sigmoid(),
    "erf": lambda t: t(4).erf(),
    "floor round": lambda t: t(8).floor() + t(8).round() + t(8).trunc(),
    "isnan": lambda t: (t(3) / 0).isfinite(),
    "nan_to_num": lambda t: (t(3) * torch.inf).nan_to_num(posinf=1.0, neginf=-1.0),
    "cumsum": lambda t: t(3, 4).cumsum(1),
    "flip roll": lambda t: t(3, 4).flip(0).roll(1, 1),
    # reductions
    "sum": lambda t: t(3, 4).sum(),
    "sum dim": lambda t: t(3, 4).sum(dim=1, keepdim=True),
    "sum ints": lambda t: t.integers(7).sum(),
    "mean": lambda t: t(3, 4).mean((0, 1)),
    "var": lambda t: t(3, 4).var(dim=0),
    "std": lambda t: t(30).std(),
    "prod": lambda t: t(5).prod(),
    "max": lambda t: t(5).max(),
    "max dim": lambda t: t(3, 4).max(dim=1),
    "argmax": lambda t: t(3, 4).argmax(1),
    "any all": lambda t: torch.stack([(t(5) > 0).any(), (t(5) > 0).all()]),
    "norm": lambda t: t(3, 4).norm(),
    "logsumexp": lambda t: t(3, 4).logsumexp(1),
    "sort": lambda t: t(6).sort(descending=True),
    "topk": lambda t: t(6).topk(3),
    "median": lambda t: t(7).median(),
    "histc": lambda t: torch.histc(t(50), bins=5, min=-1, max=1),
    "unique": lambda t: torch.unique(t.integers(20, high=4), return_counts=True),
    "bincount": lambda t: torch.bincount(t.integers(20, high=4)),
    # shapes
    "reshape": lambda t: t(3, 4).reshape(2, 6),
    "transpose": lambda t: t(3, 4).t(),
    "permute": lambda t: t(2, 3, 4).permute(2, 0, 1),
    "squeeze": lambda t: t(1, 3, 1).squeeze().unsqueeze(-1),
    "expand": lambda t: t(3, 1).expand(3, 4) + 0,
    "repeat": lambda t: t(2).repeat(3, 2),
    "cat": lambda t: torch.cat([t(2, 3), t(1, 3)]),
    "stack": lambda t: torch.stack([t(3), t(3)], dim=1),
    "split": lambda t: t(7).split(3),
    "chunk unbind": lambda t: [*t(6).chunk(2), *t(2, 3).unbind(1)],
    "diag tril": lambda t: t(3, 3).tril() + t(3).diag(),
    "unfold": lambda t: t(8).unfold(0, 3, 2),
    "pad": lambda t: F.pad(t(2, 3), (1, 2), value=9.0),
    "meshgrid": lambda t: torch.meshgrid(t(2), t(3), indexing="ij"),
    "as_strided": lambda t: t(12).as_strided((2, 3), (6, 2), 1),
    # indexing
    "index int": lambda t: t(3, 4)[1],
    "index negative": lambda t: t(3, 4)[-1, ..., -2],
    "slice step": lambda t: t(5, 6)[1:4:2, ::3],
    "index list": lambda t: t(5, 2)[[0, 3, 3]],
    "index tensor": lambda t: t(5, 2)[t.integers(4, high=5)],
    "index cpu tensor": lambda t: t(5, 2)[torch.tensor([4, 0])],
    "index mask": lambda t: torch.arange(9, device=t.device)[t(9) > 0],
    "index pair": lambda t: t(4, 4)[t.integers(3, high=4), t.integers(3, high=4)],
    "index None": lambda t: t(3)[None, :, None],
    "gather": lambda t: t(3, 4).gather(1, t.integers(3, 2, high=4)),
    "scatter": lambda t: torch.zeros(3, 5, device=t.device).scatter(1, t.integers(3, 2, high=5), 1.0),
    "index_select": lambda t: t(4, 3).index_select(0, t.integers(2, high=4)),
    "index_add": lambda t: t(4, 3).index_add(0, t.integers(2, high=4), t(2, 3)),
    "take_along": lambda t: torch.take_along_dim(t(3, 4), t.integers(3, 1, high=4), 1),
    "nonzero": lambda t: (t(8) > 0).nonzero(),
    "masked_fill": lambda t: t(5).masked_fill(t(5) > 0, -1.0),
    "searchsorted": lambda t: torch.searchsorted(t(9).sort().values, t(3)),
    # linear algebra
    "matmul": lambda t: t(3, 4) @ t(4, 5),
    "matvec": lambda t: t(3, 4) @ t(4),
    "dot": lambda t: t(4) @ t(4),
    "bmm": lambda t: t(2, 3, 4) @ t(2, 4, 5),
    "matmul broadcast": lambda t: t(2, 1, 3, 4) @ t(5, 4, 2),
    "einsum": lambda t: torch.einsum("bij,bjk->bik", t(2, 3, 4), t(2, 4, 5)),
    "outer": lambda t: torch.outer(t(3), t(4)),
    "inverse": lambda t: torch.linalg.inv(t(4, 4)),
    "cholesky": lambda t: torch.linalg.cholesky(torch.cov(t(4, 20))),
    "solve": lambda t: torch.linalg.solve(t(4, 4), t(4, 2)),
    "svdvals": lambda t: torch.linalg.svdvals(t(4, 3)),
    "det": lambda t: torch.linalg.det(t(3, 3)),
    "fft": lambda t: torch.fft.fft(t(8)).abs(),
    "stft": lambda t: torch.stft(t(64), 16, return_complex=True, window=torch.hann_window(16).to(t.device)),
    # neural networks
    "linear": lambda t: F.linear(t(2, 4), t(3, 4), t(3)),
    "relu gelu silu": lambda t: F.relu(t(5)) + F.gelu(t(5)) + F.silu(t(5)),
    "softmax": lambda t: F.softmax(t(3, 4), -1),
    "log_softmax": lambda t: F.log_softmax(t(3, 4), -1),
    "layer_norm": lambda t: F.layer_norm(t(3, 4), (4,), t(4), t(4)),
    "batch_norm": lambda t: F.batch_norm(t(5, 3), t(3), t.positive(3), training=True),
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2),
    "rms_norm": lambda t: F.rms_norm(t(3, 4), (4,)),
    "conv1d": lambda t: F.conv1d(t(2, 3, 8), t(4, 3, 3), padding=1),
    "conv2d": lambda t: F.conv2d(t(2, 3, 8, 8), t(4, 3, 3, 3), t(4), stride=2, padding=1),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 3, 4, 4), t(3, 2, 3, 3)),
    "max_pool2d": lambda t: F.max_pool2d(t(1, 2, 6, 6), 2),
    "avg_pool2d": lambda t: F.avg_pool2d(t(1, 2, 6, 6), 2),
    "adaptive_pool": lambda t: F.adaptive_avg_pool2d(t(1, 2, 6, 6), 3),
    "interpolate": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "embedding": lambda t: F.embedding(t.integers(2, 3), t(10, 4)),
    "one_hot": lambda t: F.one_hot(t.integers(4), 10),
    "attention": lambda t: F.scaled_dot_product_attention(
        t(2, 2, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4), is_causal=True
    ),
    "cross_entropy": lambda t: F.cross_entropy(t(4, 5), t.integers(4, high=5)),
    "mse": lambda t: F.mse_loss(t(4), t(4)),
    "bce": lambda t: F.binary_cross_entropy_with_logits(t(4), t.positive(4)),
    "dropout off": lambda t: F.dropout(t(4), 0.5, training=False),
    # in place
    "add_": lambda t: t(3).add_(t(3)).mul_(2).sub_(1),
    "setitem": lambda t: _apply_in_place(t(3, 4), lambda x: x.__setitem__((slice(None), 1), 5.0)),
    "setitem cpu": lambda t: _apply_in_place(t(3, 4), lambda x: x.__setitem__(0, torch.arange(4.0))),
    "setitem mask": lambda t: _apply_in_place(t(3, 4), lambda x: x.__setitem__(x > 0, 0.0)),
    "index_put": lambda t: _apply_in_place(t(5), lambda x: x.index_put_((t.integers(2, high=5),), t(2))),
    "copy_ broadcast": lambda t: torch.zeros(3, 4, device=t.device).copy_(t(4)),
    "fill_ zero_": lambda t: torch.stack([t(2).fill_(3), t(2).zero_()]),
    "t_": lambda t: t(2, 3).t_(),
    "squeeze_": lambda t: t(1, 3).squeeze_(0),
    "resize_": lambda t: t(2, 3).resize_(3, 2),
    "out": lambda t: torch.add(t(3), t(3), out=torch.empty(0, device=t.device)),
    "set_data": lambda t: _apply_in_place(t(3), lambda x: setattr(x, "data", t(4))),
    # dtypes
    "complex": lambda t: torch.complex(t(3), t(3)).conj() * 2j,
    "conj real": lambda t: torch.complex(t(3), t(3)).conj().real,
    "conj imag": lambda t: torch.complex(t(3), t(3)).conj().imag + 1,
    "conj view": lambda t: torch.complex(t(2, 3), t(2, 3)).conj()[1, 1:].resolve_conj(),
    "conj in place": lambda t: _apply_in_place(torch.complex(t(3), t(3)), lambda x: x.conj().mul_(2j)),
    "conj matmul": lambda t: torch.complex(t(3, 3), t(3, 3)).mH @ torch.complex(t(3), t(3)),
    "view_as_real": lambda t: torch.view_as_real(torch.complex(t(3), t(3))),
    "bfloat16": lambda t: t(4, 4).bfloat16() @ t(4, 4).bfloat16(),
    "half": lambda t: t(4).half() * 3,
    "uint8": lambda t: t.integers(4).to(torch.uint8) + 250,
    "bool sum": lambda t: t(9).bool().sum(),
    "view dtype": lambda t: t(4).view(torch.int32),
    "to dtype": lambda t: t(4).to(torch.int64),
}  # fmt: skip


def _apply_in_place(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    change(tensor)
    return tensor


def flatten_tensors(value: Any) -> list[torch.Tensor]:
    return (
        [value] if isinstance(value, torch.Tensor) else [x for item in value for x in flatten_tensors(item)]
    )


@pytest.mark.parametrize("name", CALLS)
def test_op_matches_cpu(name: str) -> None:
    device = D0 if zlib.crc32(name.encode()) % 4 else D1
    expected = flatten_tensors(CALLS[name](InputMaker(name, "cpu")))
    found = flatten_tensors(CALLS[name](InputMaker(name, device)))
    assert [str(x.device) for x in found] == [device] * len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
