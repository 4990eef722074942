"""Custom policies in a controller: loaded by name, disabled when they fail or hang."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller.placement.policy import make_configured_policy
from genie.controller.placement.signal_timeout import SignalTimeout
from genie.errors import ConfigError
from genie.model.job import JobSpec, JobState, Resources
from genie.scheduler.policies import IsolatedPolicy, PolicyTimeoutError
from genie.scheduler.request import JobRequest, Shape
from tests.controller.running_controller import running_controller
from tests.fakes.clock import FakeClock

POLICIES = """
import time

class LastFirst:
    def within(self, request):
        return (-request.sequence,)
    def among(self, request, scales):
        return (-request.sequence,)

class Breaks(LastFirst):
    def within(self, request):
        return (-request.sequence,) if request.name != "bad" else 1 // 0

class Hangs(LastFirst):
    def within(self, request):
        while request.name == "bad":
            try:
                time.sleep(60)
            except Exception:
                pass
        return (-request.sequence,)

class CannotBeMade:
    def __init__(self):
        raise OSError("no")

thing = LastFirst()
"""


@pytest.fixture(autouse=True)
def custom_policy_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_policies.py").write_text(POLICIES)
    (folder / "broken_policies.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)


def make_spec(name: str) -> JobSpec:
    return JobSpec(name=name, command=("true",), resources=Resources(gpus=1))


async def test_custom_policy_orders_the_queue(tmp_path: Path) -> None:
    own = "own_policies:LastFirst"
    async with running_controller(tmp_path, policy=own, policy_budget_s=1.0) as one, one.client() as owner:
        first, second = [await owner.submit_spec(make_spec(name)) for name in ("first", "second")]
        async with one.agent() as agent:
            assert (await agent.start_next()).job_id == second.job_id
            assert (await owner.job(first.job_id)).state is JobState.QUEUED
            status = await owner.status()
            assert (status.policy, status.policy_fault) == (own, "")


@pytest.mark.parametrize(
    ("name", "what"), [("Breaks", "raised ZeroDivisionError"), ("Hangs", "did not return")]
)
async def test_policy_that_fails_or_hangs_is_disabled_and_scheduling_continues(
    tmp_path: Path, name: str, what: str
) -> None:
    async with (
        running_controller(tmp_path, policy=f"own_policies:{name}", policy_budget_s=1.0) as one,
        one.client() as owner,
        one.agent(gpus=2) as agent,
    ):
        good = await owner.submit_spec(make_spec("good"))
        assert (await agent.start_next()).job_id == good.job_id
        bad = await owner.submit_spec(make_spec("bad"))
        assert (await agent.start_next()).job_id == bad.job_id
        fault = (await owner.status()).policy_fault
        assert f"policy 'own_policies:{name}' is disabled and replaced by FairShare" in fault
        assert f"within() for job {bad.job_id} {what}" in fault


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fairest", "there is no policy 'fairest'"),
        ("own_policies:Missing", "own_policies:Missing cannot be imported: AttributeError"),
        ("no_such_module:X", "no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("broken_policies:X", "cannot be imported: RuntimeError: not today"),
        ("own_policies:thing", "own_policies:thing is not a class"),
        ("own_policies:CannotBeMade", "could not create policy 'own_policies:CannotBeMade': OSError: no"),
        ("pathlib:PurePath", "has no method within"),
    ],
)
def test_unknown_policy_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"controller\.policy: ") as raised:
        make_configured_policy(ControllerConfig(policy=name), clock=FakeClock())
    assert message in str(raised.value)


def test_alarm_interrupts_only_a_policy_call_that_exceeds_its_limit() -> None:
    alarm = SignalTimeout(0.05, PolicyTimeoutError)
    with pytest.raises(PolicyTimeoutError), alarm:
        time.sleep(60)
    with alarm:
        pass
    with pytest.raises(PolicyTimeoutError), alarm:
        while True:
            pass
    order = IsolatedPolicy(_SlowPolicy(), budget_s=9.0, clock=time.monotonic, guard=alarm)
    assert order.within(JobRequest("j", "t", 1, Shape())) != (1,)
    assert "did not return" in order.disabled_reason


class _SlowPolicy:
    def within(self, request: JobRequest) -> tuple[float, ...]:
        time.sleep(60)
        return (1,)

    def among(self, request: JobRequest, scales: object) -> tuple[float, ...]:
        return (1,)
