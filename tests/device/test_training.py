"""Typical programs: training loops, checkpoints and autograd features give the same results remotely as
locally."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.device.conftest import D0, D1
from tests.device.test_autograd import TransformerBlock

pytestmark = pytest.mark.usefixtures("devices")

# A data loader forks its workers from a process with threads, and warns on a machine with one core.
forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning",
    "ignore:This DataLoader will create 2 worker processes:UserWarning",
)
# torch's forward mode uses it.
scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


class Classifier(nn.Module):
    """Convolutions, then a transformer layer over the positions, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GELU(),
        )  # fmt: skip
        self.mix = TransformerBlock(16, 4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.drop(self.mix(positions)).mean(1))


def make_classifier(device: str) -> Classifier:
    """The same weights every time, created on the CPU."""
    torch.manual_seed(11)
    return Classifier().to(device)


def make_images() -> TensorDataset:
    generator = torch.Generator().manual_seed(12)
    return TensorDataset(
        torch.randn(24, 1, 8, 8, generator=generator), torch.randint(3, (24,), generator=generator)
    )


def iterate_batches(**options: Any) -> Iterator[list[torch.Tensor]]:
    """Two epochs over the images, in an order that does not depend on other random numbers."""
    loader = DataLoader(
        make_images(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(13), **options
    )
    for _ in range(2):
        yield from loader


# The keys' bias has no effect, so its gradient is rounding noise, which AdamW scales up.
ROUNDING = "mix.qkv.bias"


def train(device: str, *, accumulate: int = 1, **options: Any) -> tuple[list[float], nn.Module]:
    """The loss of every batch, and the trained module."""
    module = make_classifier(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)
    losses = []
    torch.manual_seed(14)
    for number, (x, y) in enumerate(iterate_batches(**options), start=1):
        loss = F.cross_entropy(module(x.to(device)), y.to(device), label_smoothing=0.1) / accumulate
        loss.backward()
        losses.append(loss.detach())
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses], module


def assert_equal_modules(one: nn.Module, other: nn.Module, *, but: str = "") -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - {but}:
        torch.testing.assert_close(mine[name].cpu(), theirs[name].cpu(), rtol=1e-4, atol=1e-5)


@forks
@pytest.mark.parametrize("device", [D0, D1])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_reaches_the_same_loss(device: str, workers: int) -> None:
    expected, module = train("cpu")
    found, twin = train(device, num_workers=workers)
    assert found == pytest.approx(expected, rel=1e-4)
    assert {str(x.device) for x in twin.state_dict().values()} == {device}
    assert_equal_modules(twin, module, but=ROUNDING)


def test_training_with_gradient_accumulation_matches_local() -> None:
    expected, module = train("cpu", accumulate=3)
    found, twin = train(D0, accumulate=3)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_equal_modules(twin, module, but=ROUNDING)


@pytest.mark.parametrize("workers", [0, 2])
@forks
def test_batches_of_a_data_loader_with_pinned_memory_are_right(workers: int) -> None:
    expected = [x.sum().item() for x, _ in iterate_batches()]
    found = [
        x.to(D0, non_blocking=True).sum().item()
        for x, _ in iterate_batches(pin_memory=True, num_workers=workers)
    ]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [10, 100_000])
def test_pinned_memory_can_be_changed_after_a_non_blocking_copy(count: int) -> None:
    pinned = torch.ones(count).pin_memory()
    assert pinned.is_pinned() == torch.cuda.is_available()
    there = pinned.to(D0, non_blocking=True)
    pinned.zero_()
    back = torch.zeros(count, pin_memory=True)
    back.copy_(there, non_blocking=True)
    assert back.sum().item() == count
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        there.pin_memory()


# --- states, files, copies ------------------------------------------------------------------------


def test_state_dict_round_trips() -> None:
    there, here = make_classifier(D0), Classifier()
    here.load_state_dict(there.state_dict())
    assert {str(x.device) for x in here.state_dict().values()} == {"cpu"}
    assert_equal_modules(here, there)
    for x in here.parameters():
        nn.init.normal_(x)
    there.load_state_dict(here.state_dict())
    assert {str(x.device) for x in there.state_dict().values()} == {D0}
    assert_equal_modules(here, there)


def test_moved_module_keeps_its_parameter_objects() -> None:
    """Weights stay tied, and an optimizer created before the move still updates them, as with CUDA."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    before = list(module.parameters())
    module.to(D0)
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    assert module[1].weight is module[0].weight
    assert {str(x.device) for x in module.parameters()} == {D0}
    module.to("cpu")
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))


def save_to_buffer(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("place", [None, "cpu", D0, D1, {D0: D1}, "function"])
def test_remote_checkpoint_is_loaded(place: Any) -> None:
    state = make_classifier(D0).state_dict()
    wanted = {None: D0, "function": "cpu"}.get(place if isinstance(place, str | None) else "", place)
    wanted = D1 if isinstance(wanted, dict) else wanted
    where = (lambda storage, _: storage.cpu()) if place == "function" else place
    loaded = torch.load(save_to_buffer(state), map_location=where, weights_only=True)
    assert {str(x.device) for x in loaded.values()} == {wanted}
    for name, x in loaded.items():
        assert torch.equal(x.cpu(), state[name].cpu())


def test_local_checkpoint_is_loaded_remotely() -> None:
    state = make_classifier("cpu").state_dict()
    loaded = torch.load(save_to_buffer(state), map_location=D1, weights_only=True)
    assert {str(x.device) for x in loaded.values()} == {D1}
    assert all(torch.equal(x.cpu(), state[name]) for name, x in loaded.items())


def test_saved_module_keeps_shared_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(D0)
    module[1].weight = module[0].weight
    loaded = torch.load(save_to_buffer(module), weights_only=False)
    assert loaded[1].weight is loaded[0].weight
    x = torch.ones(2, 3, device=D0)
    assert torch.equal(loaded(x).cpu(), module(x).cpu())


def test_saved_views_share_a_storage() -> None:
    base = torch.arange(6.0, device=D0)
    one, other = torch.load(save_to_buffer([base[1:5], base.view(2, 3).t()]), weights_only=True)
    one.zero_()
    assert other.cpu().tolist() == [[0, 0], [0, 0], [0, 5]]


def test_optimizer_resumes_after_a_restart() -> None:
    module = nn.Linear(4, 2, device=D0)
    optimizer = torch.optim.AdamW(module.parameters())

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.ones(3, 4, device=D0)).square().sum().backward()
        optimizer.step()

    step(module, optimizer)
    kept = torch.load(save_to_buffer([module.state_dict(), optimizer.state_dict()]), weights_only=True)
    step(module, optimizer)
    other = nn.Linear(4, 2, device=D0)
    following = torch.optim.AdamW(other.parameters())
    other.load_state_dict(kept[0])
    following.load_state_dict(kept[1])
    step(other, following)
    assert torch.equal(other.weight.detach().cpu(), module.weight.detach().cpu())


def test_deepcopied_module_is_independent() -> None:
    module = make_classifier(D0)
    twin = copy.deepcopy(module)
    assert {str(x.device) for x in twin.state_dict().values()} == {D0}
    assert_equal_modules(twin, module)
    for x in twin.parameters():
        x.data.zero_()
    assert module.head.weight.abs().sum().item() > 0
    x = torch.ones(2, device=D0, requires_grad=True)
    assert copy.deepcopy(x).requires_grad
    with pytest.raises(RuntimeError, match=r"leaves|leaf"):
        copy.deepcopy(x * 2)


# --- autograd features ----------------------------------------------------------------------------


def run_locally_and_remotely(work: Callable[[str], Any]) -> tuple[Any, Any]:
    """Results of `work` on D0 and locally, in host memory."""
    return tuple(
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), work(device))
        for device in (D0, "cpu")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_matches(reentrant: bool) -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4)).to(device)
        x = torch.linspace(-1, 1, 18).view(3, 6).to(device).requires_grad_()
        torch.manual_seed(2)
        y = checkpoint(layers, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in layers.parameters())]

    torch.testing.assert_close(*run_locally_and_remotely(work))


def make_input(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(4, 3).to(device)


def self_attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x + 1, x * 2, is_causal=True)


@scripts
@pytest.mark.parametrize(
    "work",
    [
        torch.vmap(lambda row: row.softmax(0) @ row),
        lambda x: torch.vmap(torch.outer, in_dims=(0, None))(x, x[0]),
        torch.vmap(lambda row: row.sort().values.cumsum(0), in_dims=1, out_dims=1),
        torch.vmap(lambda row: torch.where(row > 0, row, 0.0).sum()),
        torch.func.grad(lambda y: (y.sin() * y).sum()),
        lambda x: torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),)),
        lambda x: torch.func.vjp(torch.exp, x)[1](torch.ones_like(x)),
        lambda x: torch.func.jacrev(lambda y: y @ y)(x[0]),
        lambda x: torch.func.jacfwd(lambda y: y.square())(x[0]),
        lambda x: torch.func.hessian(lambda y: y.pow(3).sum())(x[0]),
        torch.vmap(torch.func.grad(lambda row: row.exp().sum())),
        torch.func.grad(lambda y: self_attention(y.view(1, 1, 4, 3)).square().sum()),
        lambda x: torch.func.functional_call(
            nn.Linear(3, 2), {"weight": x[:2], "bias": x[2, :2]}, (x,)
        ),
    ],
)  # fmt: skip
def test_function_transforms_match_local(work: Callable[[torch.Tensor], Any]) -> None:
    found, expected = run_locally_and_remotely(lambda device: work(make_input(device)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_under_vmap_match_local(randomness: str) -> None:
    def work(device: str) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.vmap(lambda row: F.dropout(row, 0.5), randomness=randomness)(make_input(device))

    torch.testing.assert_close(*run_locally_and_remotely(work))


@scripts
def test_forward_mode_gradients_through_a_module_match_local() -> None:
    def work(device: str) -> Any:
        layers = make_classifier(device).head
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(
                torch.ones(2, 16, device=device), torch.full((2, 16), 0.5, device=device)
            )
            return tuple(torch.autograd.forward_ad.unpack_dual(F.gelu(layers(x))))

    torch.testing.assert_close(*run_locally_and_remotely(work))


def test_module_and_tensor_hooks_match() -> None:
    def work(device: str) -> list[Any]:
        seen: list[Any] = []
        module = make_classifier(device).eval()
        module.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        module.head.register_forward_hook(lambda _, args, output: output * 2)
        module.head.register_full_backward_hook(lambda _, into, out: seen.extend([*into, *out]))
        module.head.weight.register_hook(lambda grad: grad * 3)
        module.head.bias.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
        y = module(torch.ones(2, 1, 8, 8, device=device))
        y.register_hook(seen.append)
        y.sum().backward()
        assert {str(x.device) for x in seen} == {device}
        return [*seen, y, module.head.weight.grad]

    torch.testing.assert_close(*run_locally_and_remotely(work))


def test_saved_tensors_can_be_offloaded() -> None:
    def work(device: str) -> torch.Tensor:
        x = torch.ones(3, device=device, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(*run_locally_and_remotely(work))


# --- mixed precision, printing --------------------------------------------------------------------


def test_autocast_bfloat16_matches_local() -> None:
    seen = {}

    def work(device: str) -> list[torch.Tensor]:
        module = make_classifier(device).eval()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            product = torch.ones(4, 4, device=device) @ torch.ones(4, 4, device=device)
            loss = F.cross_entropy(module(torch.ones(2, 1, 8, 8, device=device)).float(), torch.tensor(
                [0, 2], device=device
            ))  # fmt: skip
        seen[device] = product.dtype, module.head(torch.ones(1, 16, device=device)).dtype
        loss.backward()
        return [loss, *(x.grad for x in module.parameters() if x.grad is not None)]

    found, expected = run_locally_and_remotely(work)
    assert seen[D0] == seen["cpu"] == (torch.bfloat16, torch.float32)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(6.0, device=device).view(2, 3),
        lambda device: torch.arange(6, device=device)[::2],
        lambda device: torch.ones(2, device=device, requires_grad=True),
        lambda device: torch.ones(2, device=device, requires_grad=True) * 2,
        lambda device: torch.zeros(0, 3, device=device),
        lambda device: torch.tensor(1e-9, device=device),
        lambda device: torch.tensor([True, False], device=device),
        lambda device: torch.tensor([1 + 2j], device=device).conj(),
        lambda device: torch.linspace(-1, 1, 2000, device=device),
        lambda device: torch.ones(3, dtype=torch.bfloat16, device=device),
        lambda device: nn.Parameter(torch.ones(1, device=device)),
    ],
)
def test_tensor_repr_shows_values_and_device(make: Callable[[str], torch.Tensor]) -> None:
    def words(device: str) -> str:
        return (
            "".join(repr(make(device)).split())
            .replace(f"device='{device}',", "")
            .replace(f",device='{device}'", "")
        )

    assert words(D0) == words("cpu")
    assert f"device='{D0}'" in repr(make(D0))


def test_scalar_format_and_module_repr() -> None:
    assert f"{torch.tensor(1.5, device=D0):.3f}" == "1.500"
    assert repr(make_classifier(D0)) == repr(make_classifier("cpu"))
