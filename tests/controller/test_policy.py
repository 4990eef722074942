"""Policies of users in a controller: taken by name, fenced off when they fail, hang or are not there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller import policy
from genie.controller.policy import make_policy
from genie.errors import ConfigError
from genie.model.job import JobSpec, JobState, Resources
from genie.runtime.alarm import Alarm
from genie.scheduler.policies import Fenced, TooLongError
from genie.scheduler.request import Request, Shape
from tests.controller.standing import standing
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
def own_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_policies.py").write_text(POLICIES)
    (folder / "broken_policies.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(policy, "HANGS_S", 0.2)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)


def job(name: str) -> JobSpec:
    return JobSpec(name=name, command=("true",), resources=Resources(gpus=1))


async def test_a_policy_of_ones_own_decides_who_comes_next(tmp_path: Path) -> None:
    own = "own_policies:LastFirst"
    async with standing(tmp_path, policy=own) as one, one.client() as owner:
        first, second = [await owner.submit_spec(job(name)) for name in ("first", "second")]
        async with one.agent() as agent:
            assert (await agent.start_next()).job_id == second.job_id
            assert (await owner.job(first.job_id)).state is JobState.QUEUED
            status = await owner.status()
            assert (status.policy, status.policy_fault) == (own, "")


@pytest.mark.parametrize(
    ("name", "what"), [("Breaks", "raised ZeroDivisionError"), ("Hangs", "did not return")]
)
async def test_a_policy_that_breaks_or_hangs_is_fenced_off_and_jobs_go_on(
    tmp_path: Path, name: str, what: str
) -> None:
    async with (
        standing(tmp_path, policy=f"own_policies:{name}", policy_budget_s=1.0) as one,
        one.client() as owner,
        one.agent(gpus=2) as agent,
    ):
        good = await owner.submit_spec(job("good"))
        assert (await agent.start_next()).job_id == good.job_id
        bad = await owner.submit_spec(job("bad"))
        assert (await agent.start_next()).job_id == bad.job_id
        fault = (await owner.status()).policy_fault
        assert f"the policy 'own_policies:{name}' is out of use, and FairShare decides" in fault
        assert f"within() for job {bad.job_id} {what}" in fault


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fairest", "there is no policy 'fairest'"),
        ("own_policies:Missing", "own_policies:Missing cannot be imported: AttributeError"),
        ("no_such_module:X", "no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("broken_policies:X", "cannot be imported: RuntimeError: not today"),
        ("own_policies:thing", "own_policies:thing is not a class"),
        ("own_policies:CannotBeMade", "cannot be made: OSError: no"),
        ("pathlib:PurePath", "has no method within"),
    ],
)
def test_a_policy_that_is_not_there_is_a_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"controller\.policy: ") as raised:
        make_policy(ControllerConfig(policy=name), clock=FakeClock())
    assert message in str(raised.value)


def test_an_alarm_interrupts_what_does_not_return_and_nothing_else() -> None:
    alarm = Alarm(0.05, TooLongError)
    with pytest.raises(TooLongError), alarm:
        time.sleep(60)
    with alarm:
        pass
    with pytest.raises(TooLongError), alarm:
        while True:
            pass
    order = Fenced(_Slow(), budget_s=9.0, clock=time.monotonic, guard=alarm)
    assert order.within(Request("j", "t", 1, Shape())) != (1,)
    assert "did not return" in order.fault


class _Slow:
    def within(self, request: Request) -> tuple[float, ...]:
        time.sleep(60)
        return (1,)

    def among(self, request: Request, scales: object) -> tuple[float, ...]:
        return (1,)
