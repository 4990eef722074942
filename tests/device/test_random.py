"""Random numbers: reproducible per seed and device, and equal to those of a local device of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from tests.device.conftest import D0, D1
from tests.device.scripts import run_script
from tests.executor.process import running_executor
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("devices")


@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.rand(50, device=device),
        lambda device: torch.randn(3, 50, device=device),
        lambda device: torch.randn(7, dtype=torch.float64, device=device),
        lambda device: torch.randint(100, (20,), device=device),
        lambda device: torch.randperm(20, device=device),
        lambda device: torch.rand_like(torch.empty(5, device=device)),
        lambda device: torch.empty(9, device=device).uniform_(-1, 1),
        lambda device: torch.bernoulli(torch.full((20,), 0.5, device=device)),
        lambda device: torch.multinomial(torch.ones(10, device=device), 3),
        lambda device: torch.normal(torch.zeros(5, device=device), 1.0),
        lambda device: F.dropout(torch.ones(50, device=device), 0.5),
        lambda device: torch.nn.Linear(4, 4, device=device).weight.detach(),
    ],
)
@pytest.mark.parametrize("device", [D0, D1])
def test_seed_matches_local_cpu(draw: Callable[[str], torch.Tensor], device: str) -> None:
    torch.manual_seed(1234)
    expected = [draw("cpu"), draw("cpu")]
    torch.manual_seed(1234)
    found = [draw(device).cpu(), draw(device).cpu()]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_each_device_has_its_own_generator() -> None:
    torch.manual_seed(5)
    first = torch.rand(5, device=D0)
    torch.rand(100, device=D1)
    torch.rand(100)
    second = torch.rand(5, device=D0)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(10, device=D0).cpu(), torch.cat([first, second]).cpu())


def test_single_device_can_be_seeded() -> None:
    torch.manual_seed(5)
    with torch.remote_accelerator.device(1):
        torch.remote_accelerator.manual_seed(6)
    one, other = torch.rand(3, device=D0).cpu(), torch.rand(3, device=D1).cpu()
    assert torch.equal(one, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(other, torch.rand(3, generator=torch.Generator().manual_seed(6)))


def test_rng_state_can_be_saved_and_restored() -> None:
    state = torch.remote_accelerator.get_rng_state(D0)
    first = torch.rand(5, device=D0).cpu()
    torch.remote_accelerator.set_rng_state(state, D0)
    assert torch.equal(torch.rand(5, device=D0).cpu(), first)
    with torch.random.fork_rng(devices=[0], device_type="remote_accelerator"):
        inside = torch.rand(5, device=D0).cpu()
    assert torch.equal(torch.rand(5, device=D0).cpu(), inside)


def test_threads_may_share_a_generator(tmp_path: Path) -> None:
    with running_executor(tmp_path) as executor:
        run_script(
            """
            import sys, threading
            import torch
            from genie import device
            from tests.device.conftest import D0, remote_device

            port = int(sys.argv[1])
            device.attach([remote_device(0, lambda: port)])
            shared = torch.Generator(device=D0)
            state = shared.get_state()

            def work(seed):
                for _ in range(50):
                    shared.manual_seed(seed)
                    torch.rand(3, device=D0, generator=shared)
                    shared.set_state(shared.get_state())
                    shared.clone_state().seed()
                    torch.remote_accelerator.set_rng_state(torch.remote_accelerator.get_rng_state())

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            shared.set_state(state)
            assert torch.equal(shared.get_state(), state)
            device.detach()
            """,
            executor.port,
        )


def test_a_generator_is_freed_with_its_last_reference() -> None:
    def bytes_sent() -> int:
        return int(torch.remote_accelerator.stream_stats(0)["bytes_sent"])  # type: ignore[attr-defined]

    generator = torch.Generator(device=D0)
    torch.rand(2, device=D0, generator=generator).cpu()
    torch.remote_accelerator.synchronize(0)  # type: ignore[attr-defined]
    before = bytes_sent()
    del generator
    wait_until(lambda: bytes_sent() > before, timeout_s=10, what="the generator to be freed on the executor")
