"""lock list, run and release."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from genie.errors import LockNotFoundError, PermissionError_
from genie.model.messages.locks import (
    AcquireLock,
    BreakLock,
    ListLocks,
    LockBroken,
    LockGrant,
    LockReleased,
    LockRenewal,
    LocksReply,
    LockView,
    ReleaseLock,
    RenewLock,
)
from tests.waiting import wait_until


def make_lock_view(name: str = "checkpoint", tenant: str = "default", **fields: object) -> LockView:
    values = {
        "holder": "box (process 7)",
        "fencing_token": 12,
        "ttl_s": 15.0,
        "acquired_at": time.time() - 90.0,
        "expires_in_s": 11.0,
        "waiting": 2,
    }
    return LockView(name=name, tenant=tenant, **(values | fields))  # type: ignore[arg-type]


# --- list and release -------------------------------------------------------------------------


def test_lock_list_shows_holders_to_the_owner(genie, controller) -> None:
    controller.replies[ListLocks] = LocksReply(
        locks=(make_lock_view(), make_lock_view("data", "red", waiting=0)), more=True
    )
    ran = genie("lock", "list")
    assert ran.code == 0, ran.err
    heading, *rows = [[cell.strip() for cell in line.split("  ") if cell] for line in ran.out.splitlines()]
    assert heading == ["NAME", "TENANT", "HOLDER", "TOKEN", "AGE", "EXPIRES", "WAITING"]
    assert rows[0] == ["checkpoint", "default", "box (process 7)", "12", "90 s", "in 11 s", "2"]
    assert rows[1][:2] == ["data", "red"]
    assert "truncated" in ran.err


def test_lock_list_prints_json(genie, controller) -> None:
    controller.replies[ListLocks] = LocksReply(locks=(make_lock_view(),))
    document = json.loads(genie("lock", "list", "--json").out)
    assert document["locks"][0]["fencing_token"] == 12
    assert document["more"] is False


def test_an_empty_lock_list_is_reported(genie, controller) -> None:
    controller.replies[ListLocks] = LocksReply(locks=())
    ran = genie("lock", "list")
    assert (ran.code, ran.out) == (0, "")
    assert "no locks are held" in ran.err


def test_lock_release_requires_force(genie, controller) -> None:
    ran = genie("lock", "release", "checkpoint")
    assert ran.code == 2
    assert "its holder may still use it" in ran.err
    assert "genie lock release checkpoint --force" in ran.err
    assert controller.requests == []


def test_lock_release_rejects_an_empty_tenant(genie, controller) -> None:
    ran = genie("lock", "release", "checkpoint", "--force", "--tenant", "")
    assert (ran.code, "--tenant" in ran.err, controller.requests) == (2, True, [])


def test_lock_release_names_the_holder_that_lost_the_lock(genie, controller) -> None:
    controller.replies[BreakLock] = LockBroken(holder="box (process 7)", fencing_token=12)
    ran = genie("lock", "release", "checkpoint", "--force", "--tenant", "red")
    assert ran.code == 0, ran.err
    assert ran.out == "checkpoint: released; it was held by box (process 7) with token 12\n"
    assert controller.requests == [BreakLock(tenant="red", name="checkpoint")]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (LockNotFoundError("lock 'checkpoint' of tenant default is not held"), "is not held"),
        (PermissionError_("permission denied: user tokens cannot break locks"), "cannot break locks"),
    ],
)
def test_lock_release_reports_errors(genie, controller, error, shown) -> None:
    controller.replies[BreakLock] = error
    ran = genie("lock", "release", "checkpoint", "--force")
    assert ran.code == 1
    assert shown in ran.err


# --- run --------------------------------------------------------------------------------------


@pytest.fixture
def free_lock(controller) -> None:
    controller.replies[AcquireLock] = LockGrant(fencing_token=41)
    controller.replies[RenewLock] = LockRenewal()
    controller.replies[ReleaseLock] = LockReleased(was_held=True)


def test_a_command_gets_the_fencing_token_and_its_exit_code_is_returned(genie, controller, free_lock) -> None:
    ran = genie("lock", "run", "checkpoint", "--", "sh", "-c", "echo token $GENIE_LOCK_TOKEN; exit 3")
    assert (ran.code, ran.out) == (3, "token 41\n")
    assert [type(request) for request in controller.requests] == [AcquireLock, ReleaseLock]
    (acquire, release) = controller.requests
    assert acquire.name == "checkpoint" and acquire.ttl_s == 15.0
    assert release.acquisition_id == acquire.acquisition_id


def test_a_command_that_a_signal_ended_returns_the_code_of_shells(genie, free_lock) -> None:
    assert genie("lock", "run", "l", "--", "sh", "-c", "kill -9 $$").code == 128 + 9


def test_a_command_that_does_not_exist_releases_the_lock(genie, controller, free_lock) -> None:
    ran = genie("lock", "run", "l", "--", "/nonexistent/program")
    assert ran.code == 127
    assert "could not run '/nonexistent/program': No such file or directory" in ran.err
    assert isinstance(controller.requests[-1], ReleaseLock)


def test_a_command_waits_for_the_lock(genie, controller, free_lock) -> None:
    grants = iter([LockGrant(holder="other (process 3)")] * 2)
    controller.replies[AcquireLock] = lambda request: next(grants, LockGrant(fencing_token=41))
    ran = genie("lock", "run", "l", "--", "true")
    assert ran.code == 0, ran.err
    assert "waiting for lock l: other (process 3) holds it" in ran.err
    polls = [request for request in controller.requests if isinstance(request, AcquireLock)]
    assert [poll.wait_s > 0 for poll in polls] == [False, True, True]
    assert polls[1].acquisition_id == polls[2].acquisition_id


@pytest.mark.parametrize(("timeout", "code"), [("0", 75), ("0.2s", 124)])
def test_a_command_does_not_run_without_the_lock(genie, controller, free_lock, timeout, code) -> None:
    controller.replies[AcquireLock] = LockGrant(holder="other (process 3)")
    ran = genie("lock", "run", "l", "--timeout", timeout, "--", "echo", "ran")
    assert (ran.code, ran.out) == (code, "")
    assert "could not acquire lock 'l'" in ran.err and "other (process 3) holds it" in ran.err


def test_a_command_is_ended_when_its_lock_is_lost(genie, controller, free_lock, tmp_path: Path) -> None:
    controller.replies[RenewLock] = LockRenewal(lost_reason="it was released by the owner")
    script = f"trap 'echo ended > {tmp_path}/ended; exit 0' TERM; sleep 60 & wait"
    ran = genie("lock", "run", "l", "--ttl", "1s", "--", "sh", "-c", script)
    assert ran.code == 1
    assert "lost lock 'l' (fencing token 41): it was released by the owner" in ran.err
    assert (tmp_path / "ended").exists()


def test_a_command_that_ignores_the_end_of_its_lock_is_killed(genie, controller, free_lock) -> None:
    controller.replies[RenewLock] = LockRenewal(lost_reason="it was released by the owner")
    ran = genie("lock", "run", "l", "--ttl", "1s", "--", "sh", "-c", "trap '' TERM; sleep 60; sleep 60")
    assert ran.code == 1
    assert "was lost" in ran.err


def test_a_lease_is_renewed_while_the_command_runs(genie, controller, free_lock, tmp_path: Path) -> None:
    def renew(_request: RenewLock) -> LockRenewal:
        renewals = sum(isinstance(request, RenewLock) for request in controller.requests)
        if renewals >= 3:
            (tmp_path / "go").touch()
        return LockRenewal()

    controller.replies[RenewLock] = renew
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    assert genie("lock", "run", "l", "--ttl", "1s", "--", "sh", "-c", wait).code == 0


def test_signals_are_passed_on_to_the_command(genie, controller, free_lock, tmp_path: Path) -> None:
    def send_signal_when_running() -> None:
        wait_until((tmp_path / "running").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_signal_when_running)
    sender.start()
    code = (
        "import pathlib, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
        f"pathlib.Path({str(tmp_path / 'running')!r}).touch(); signal.pause()"
    )
    ran = genie("lock", "run", "l", "--", sys.executable, "-c", code)
    sender.join()
    assert ran.code == 5
    assert isinstance(controller.requests[-1], ReleaseLock)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("l",), "no command given"),
        (("a/b", "--", "true"), "lock name 'a/b' is not allowed"),
        (("l", "--ttl", "2h", "--", "true"), "--ttl '2h' is out of range"),
        (("l", "--ttl", "0.1s", "--", "true"), "--ttl '0.1s' is out of range"),
        (("l", "--ttl", "nan", "--", "true"), "plain seconds, from 1 s to 1 h"),
        (("l", "--timeout", "soon", "--", "true"), "--timeout 'soon' is not a duration"),
    ],
)
def test_invalid_arguments_of_lock_run_are_rejected(genie, argv, shown) -> None:
    ran = genie("lock", "run", *argv)
    assert ran.code == 2
    assert shown in ran.err
