"""Connection losses and executor failures during work: work resumes, no op runs twice, a lost executor is
named."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from genie import device
from genie.device import capture, connection
from genie.errors import DeviceLostError
from tests.device.conftest import D0, D1, remote_device
from tests.executor.process import start_executor
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("devices", "without_shared_devices")

CUTS = 12


@contextmanager
def attached_executor(**settings: object) -> Iterator[ThreadedExecutor]:
    with executor_on_a_thread() as executor:
        device.attach([remote_device(0, lambda: executor.port)], **settings)  # type: ignore[arg-type]
        try:
            yield executor
        finally:
            device.detach()


class ConnectionCutter:
    """Drops the connection repeatedly from another thread during work."""

    def __init__(self, executor: ThreadedExecutor, seed: int) -> None:
        self._executor = executor
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for _ in range(CUTS):
            if self._stop.wait(self._chance.uniform(0.001, 0.03)):
                return
            self._executor.disconnect_client()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("seed", range(4))
def test_ops_run_exactly_once_across_connection_losses(seed: int) -> None:
    chance = random.Random(seed)
    with attached_executor() as executor:
        count = torch.zeros(8, device=D0, dtype=torch.int64)
        for step in range(1, 401):
            count += 1
            if chance.random() < 0.03:
                executor.disconnect_client()
            if chance.random() < 0.05:
                assert count[0].item() == step
            if chance.random() < 0.02:
                assert (count[count > 0] - step).abs().sum().item() == 0
        assert count.tolist() == [400] * 8
        assert torch.remote_accelerator.stream_stats()["resumes"] > 0


def test_idle_connection_is_resumed() -> None:
    """The executor drops the session after a timeout, so the client must not wait for its next op."""
    with attached_executor() as executor:
        there = torch.ones(4, device=D0)
        assert there.sum().item() == 4
        executor.disconnect_client()
        stats = torch.remote_accelerator.stream_stats
        wait_until(lambda: stats()["resumes"] == 1, what="the connection to be resumed")
        assert there.sum().item() == 4


def test_upload_completes_with_early_acknowledgement() -> None:
    """The acknowledgement may arrive before the sending thread has updated its state."""
    sent = torch.ones(2 * 1024 * 1024)
    with attached_executor(op_timeout_s=5.0):
        there = torch.zeros_like(sent, device=D0)
        for _ in range(600):
            there.copy_(sent)
        assert torch.equal(there.cpu(), sent)


def test_connection_loss_during_long_op_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy executor accepts no connection; it is not lost."""
    monkeypatch.setattr(connection, "RESUME_TIMEOUT_S", 0.1)
    with attached_executor() as executor:
        table = torch.full((1500, 1500), 2, device=D0)  # integers: torch has no fast kernel for them
        torch.remote_accelerator.synchronize()
        before = executor.session.stats()["frames_received"]
        found = table @ table
        wait_until(lambda: executor.session.stats()["frames_received"] > before, what="the op to begin")
        executor.disconnect_client()
        assert found[0, 0].item() == 4 * 1500
        assert torch.remote_accelerator.stream_stats()["resumes"] == 1


def test_large_copies_survive_connection_loss() -> None:
    sent = torch.arange(6_000_000, dtype=torch.int32)
    with attached_executor() as executor:
        for seed in range(3):
            with ConnectionCutter(executor, seed):
                there = sent.to(D0)
                back = there.cpu()
            assert torch.equal(back, sent)


def test_training_with_connection_loss_has_the_same_result() -> None:
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    data = torch.randn(32, 8), torch.randn(32, 1)

    def losses(cut: Callable[[], None]) -> list[float]:
        model = copy.deepcopy(start).to(D0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = data[0].to(D0), data[1].to(D0)
        # A reply proves that the executor serves this connection: dropping it earlier has no effect. Before
        # the later drops, loss.item() has waited for one.
        torch.remote_accelerator.synchronize()
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            cut()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with attached_executor() as executor:
        assert losses(executor.disconnect_client) == losses(lambda: None)
        assert torch.remote_accelerator.stream_stats()["resumes"] == 10


def test_captured_graph_works_after_connection_loss() -> None:
    with attached_executor() as executor:
        captured = capture(nn.Linear(2, 2).to(D0))
        before = captured(torch.ones(1, 2)).cpu()
        executor.disconnect_client()
        assert torch.equal(captured(torch.ones(1, 2)).cpu(), before)


def test_killed_executor_is_named_and_the_other_continues(tmp_path: Path) -> None:
    with ExitStack() as stack:
        victim = start_executor(tmp_path / "victim", job_id="job-7")
        stack.callback(victim.kill)
        other = stack.enter_context(executor_on_a_thread())
        victim.wait_ready()
        device.attach([remote_device(0, lambda: victim.port), remote_device(1, lambda: other.port)])
        stack.callback(device.detach)
        models = {where: nn.Linear(4, 1).to(where) for where in (D0, D1)}
        optimizers = {where: torch.optim.SGD(model.parameters(), lr=0.1) for where, model in models.items()}

        def step(where: str) -> float:
            optimizers[where].zero_grad()
            loss = models[where](torch.ones(2, 4, device=where)).square().mean()
            loss.backward()
            optimizers[where].step()
            return float(loss.item())

        first = {where: step(where) for where in models}
        models[D0].weight.register_hook(lambda grad: victim.kill())  # in the middle of backward
        with pytest.raises(DeviceLostError, match=r"remote_accelerator:0.*node-0.*job-7"):
            for _ in range(100):
                step(D0)
        with pytest.raises(DeviceLostError, match="job-7"):
            models[D0].weight.cpu()
        assert step(D1) < first[D1]


def test_closing_the_session_frees_all_executor_memory() -> None:
    with executor_on_a_thread() as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        kept = [torch.ones(1000, device=D0) for _ in range(5)]
        torch.remote_accelerator.synchronize()
        assert executor.session.stats()["bytes_allocated"] == 20_000
        device.detach()
        wait_until(lambda: executor.ended, what="the session to end")
        assert executor.session.stats()["bytes_allocated"] == 0
        with pytest.raises(DeviceLostError):
            kept[0].cpu()


def test_launch_blocking_raises_at_the_failing_line() -> None:
    with attached_executor(launch_blocking=True):
        table = torch.ones(3, 2, device=D0)
        index = torch.tensor([9], device=D0)
        with pytest.raises(IndexError, match="embedding"):
            nn.functional.embedding(index, table)
        assert table.sum().item() == 6
