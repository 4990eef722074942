"""quota list, set and remove."""

from __future__ import annotations

import json

import pytest

from genie.errors import PermissionError_, QuotaNotFoundError
from genie.model.messages import Done, ListQuotas, QuotasReply, QuotaView, RemoveQuota, SetQuota
from genie.model.tenant import QuotaRecord


def make_quota_view(tenant: str = "lab", held_gpus: float = 2.5, **fields: object) -> QuotaView:
    return QuotaView(quota=QuotaRecord(tenant=tenant, **fields), held_gpus=held_gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize("argv", [("quota",), ("quota", "list")])
def test_quota_without_subcommand_lists_quotas(genie, controller, argv) -> None:
    controller.replies[ListQuotas] = QuotasReply(
        quotas=(
            make_quota_view(gpus=4.0, borrow_gpus=8.0, weight=2.0),
            make_quota_view("new", 0.0),
            make_quota_view("old", 1.0, gpus=0.5),
        )
    )
    ran = genie(*argv)
    assert ran.code == 0, ran.err
    heading, *rows = [[cell.strip() for cell in line.split("  ") if cell] for line in ran.out.splitlines()]
    assert heading == ["TENANT", "GPU QUOTA", "BORROW LIMIT", "GPUS IN USE", "WEIGHT"]
    assert rows == [
        ["lab", "4", "8", "2.5", "2"],
        ["new", "unlimited", "-", "0", "1"],
        ["old", "0.5", "unlimited", "1", "1"],
    ]


@pytest.mark.parametrize("argv", [("quota", "--json"), ("quota", "list", "--json")])
def test_quota_list_prints_json(genie, controller, argv) -> None:
    controller.replies[ListQuotas] = QuotasReply(quotas=(make_quota_view(gpus=4.0),))
    document = json.loads(genie(*argv).out)
    assert document["quotas"][0]["quota"]["gpus"] == 4.0
    assert document["quotas"][0]["held_gpus"] == 2.5


def test_empty_quota_list_is_reported(genie, controller) -> None:
    controller.replies[ListQuotas] = QuotasReply(quotas=())
    ran = genie("quota")
    assert (ran.code, ran.out) == (0, "")
    assert "no quotas" in ran.err


def test_quota_help_shows_the_subcommands(genie) -> None:
    ran = genie("quota", "--help")
    assert ran.code == 0
    assert "remove" in ran.out and "set" in ran.out


@pytest.mark.parametrize(
    ("argv", "quota"),
    [
        (["--gpus", "16"], QuotaRecord(tenant="lab", gpus=16.0)),
        (
            ["--gpus", "0.5", "--borrow", "0", "--weight", "3"],
            QuotaRecord(tenant="lab", gpus=0.5, borrow_gpus=0.0, weight=3.0),
        ),
        (["--gpus", "all", "--weight", "0.5"], QuotaRecord(tenant="lab", weight=0.5)),
    ],
)
def test_quota_set_sends_the_given_limits(genie, controller, argv, quota) -> None:
    controller.replies[SetQuota] = Done()
    ran = genie("quota", "set", "lab", *argv)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("lab: quota ")
    assert controller.requests == [SetQuota(quota=quota)]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["lab"], "--gpus"),
        (["--gpus", "1"], "TENANT"),
        (["a b", "--gpus", "1"], "TENANT"),
        (["lab", "--gpus", "-1"], "--gpus"),
        (["lab", "--gpus", "many"], "--gpus"),
        (["lab", "--gpus", "1", "--borrow", "x"], "--borrow"),
        (["lab", "--gpus", "1", "--weight", "0"], "--weight"),
        (["lab", "--gpus", "1", "--weight", "1001"], "--weight"),
    ],
)
def test_invalid_option_is_named(genie, controller, argv, named) -> None:
    ran = genie("quota", "set", *argv)
    assert (ran.code, controller.requests) == (2, [])
    assert named in ran.err


@pytest.mark.parametrize("argv", [["--gpus", "x"], ["--gpus", "1", "--borrow", "x"]])
def test_hint_for_an_invalid_limit_mentions_all(genie, controller, argv) -> None:
    assert "or 'all' for no limit" in genie("quota", "set", "lab", *argv).err


def test_quota_remove_sends_the_tenant(genie, controller) -> None:
    controller.replies[RemoveQuota] = Done()
    assert genie("quota", "remove", "lab") == (0, "lab: quota removed\n", "")
    assert controller.requests == [RemoveQuota(tenant="lab")]


def test_permission_error_is_shown(genie, controller) -> None:
    controller.replies[SetQuota] = PermissionError_(
        "permission denied: user tokens cannot set quotas", hint="contact the owner"
    )
    ran = genie("quota", "set", "lab", "--gpus", "1")
    assert (ran.code, ran.out) == (1, "")
    assert "user tokens cannot set quotas" in ran.err


def test_borrow_with_unlimited_quota_is_rejected(genie, controller) -> None:
    ran = genie("quota", "set", "lab", "--gpus", "all", "--borrow", "3")
    assert ran.code == 2
    assert "--borrow has no effect with --gpus all" in ran.err
    assert controller.requests == []


def test_removing_an_unknown_quota_fails(genie, controller) -> None:
    controller.replies[RemoveQuota] = QuotaNotFoundError("tenant 'nobody' has no quota", hint="look")
    ran = genie("quota", "remove", "nobody")
    assert (ran.code, ran.out) == (1, "")
    assert "'nobody' has no quota" in ran.err
