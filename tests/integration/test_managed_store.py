"""The store of servers with managed etcd: migration from SQLite, and restores after a lost majority."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from genie.controller.backups.backup_file import BackupReader
from genie.controller.backups.restore import read_cluster_of_backup
from genie.controller.etcd.local_member import LocalMember
from tests.integration.test_servers import Server, alarms, end_servers
from tests.needs import require_program
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

_CHANGED_BY_EVERY_START = ("node/", "controller/", "release/", "counter/", "compacted", "cluster")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    require_program("etcd", package="etcd-server")
    made = [Server(f"s{number}", f"127.0.0.{number + 1}", tmp_path / f"s{number}") for number in (1, 2, 3)]
    yield made
    end_servers(made)


def start_with_sqlite(server: Server) -> None:
    server.run(
        *("up", "--bind", server.host, "--port", str(server.ports[0]), "--detach"),
    )


def knows(server: Server, *others: Server) -> bool:
    member = LocalMember.read(server.state_dir)
    return member is not None and {f"{one.host}:{one.ports[1]}" for one in others} <= set(member.endpoints)


def fill(server: Server) -> None:
    server.run("quota", "set", "team-a", "--gpus", "3")
    server.run("token", "create", "--tenant", "team-a")
    assert server.try_submit("before")


def back_up(server: Server, path: Path) -> dict[str, bytes]:
    """The rows that a start does not change."""
    server.run("store", "backup", str(path))
    rows = dict(BackupReader(path).rows())
    return {
        key: value for key, value in rows.items() if not key.startswith((*_CHANGED_BY_EVERY_START, "cluster"))
    }


def read_generation(path: Path) -> int:
    return read_cluster_of_backup(BackupReader(path)).generation


def output_of(server: Server, *arguments: str, fails: bool = False) -> str:
    done = server.run(*arguments, check=not fails)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def start_waiting_job(server: Server, go: Path) -> str:
    script = f"echo before; while [ ! -e {go} ]; do sleep 0.05; done; echo after; exit 7"
    job_id = server.run("submit", "--", "sh", "-c", script).stdout.strip()
    wait_until(lambda: "before" in server.run("logs", job_id).stdout, timeout_s=60, what="the job runs")
    return job_id


def check_job_has_continued(server: Server, job_id: str, go: Path) -> None:
    go.touch()
    wait_until(lambda: "exit code 7" in server.run("jobs", "--all").stdout, timeout_s=60, what="its end")
    assert server.run("logs", job_id).stdout == "before\nafter\n"


def test_cluster_moves_from_sqlite_to_managed_etcd(servers: list[Server], tmp_path: Path) -> None:
    first, second, third = servers
    start_with_sqlite(first)
    fill(first)
    job_id = start_waiting_job(first, tmp_path / "go")
    before = back_up(first, tmp_path / "before")
    migrate = ("store", "migrate", "--to", "etcd", "--bind", first.host, "--port", str(first.ports[0]))
    assert "another controller is using" in output_of(first, *migrate, fails=True)
    first.run("down", "--keep-jobs")
    assert "genie store migrate --to etcd" in output_of(first, "up", "--store", "etcd", fails=True)
    assert "with --bind" in output_of(first, "store", "migrate", "--to", "etcd", fails=True)
    moved = output_of(first, *migrate)
    (kept,) = (first.state_dir / "controller").glob("store.sqlite3.replaced-*")
    assert f"the previous store is kept in {kept}" in moved
    assert "next: genie up --detach" in moved
    first.run("up", "--detach")
    assert json.loads(first.run("status", "--json").stdout)["store"] == "etcd"
    assert back_up(first, tmp_path / "after") == before
    assert read_generation(tmp_path / "after") > read_generation(tmp_path / "before")
    check_job_has_continued(first, job_id, tmp_path / "go")
    for other in (second, third):
        other.join(first.where, first.create_server_token(tmp_path / f"{other.name}.token"))
    assert [member["healthy"] for member in first.list_members()] == [True, True, True]
    for server in servers:
        assert server.try_submit(f"through {server.name}")


def test_restore_on_the_server_that_is_left_after_the_loss_of_a_majority(
    servers: list[Server], tmp_path: Path
) -> None:
    first, second, third = servers
    first.start_first()
    fill(first)
    for other in (second, third):
        other.join(first.where, first.create_server_token(tmp_path / f"{other.name}.token"))
    for server, *others in ((second, first, third), (third, first, second)):
        wait_until(partial(knows, server, *others), timeout_s=60, what="the server has stored the addresses")
    # Of the three, the one that did not create the cluster is left.
    before = back_up(third, tmp_path / "backup")
    restore = ("store", "restore", str(tmp_path / "backup"))
    assert "another controller is using" in output_of(third, *restore, fails=True)
    third.run("down")
    first.kill_everything()
    assert f"members that are running: {second.host}:{second.ports[1]}" in output_of(
        third, *restore, fails=True
    )
    second.kill_everything()
    restored = output_of(third, *restore)
    (kept,) = (third.state_dir / "etcd").glob("data.replaced-*")
    assert f"the previous store is kept in {kept}" in restored
    assert "you have removed STATE/controller, STATE/etcd and STATE/owner.token" in restored
    third.run("up", "--detach")
    assert [member["name"] for member in third.list_members()] == ["s3"]
    assert back_up(third, tmp_path / "after") == before
    assert read_generation(tmp_path / "after") > read_generation(tmp_path / "backup")
    check_previous_servers_do_not_start(third, first, second)
    check_previous_cluster_reports_the_restored_one(third, first, second)
    shutil.rmtree(first.state_dir)  # a new machine; the second one joins with the node that it was
    for name in ("controller", "etcd"):
        shutil.rmtree(second.state_dir / name)
    (second.state_dir / "owner.token").unlink()
    for lost in (first, second):
        lost.join(third.where, third.create_server_token(tmp_path / f"{lost.name}.token"))
    assert [member["healthy"] for member in third.list_members()] == [True, True, True]
    assert first.try_submit("after the restore")


def test_backups_restore_from_sqlite_into_managed_etcd_and_back(
    servers: list[Server], tmp_path: Path
) -> None:
    first, new, _ = servers
    start_with_sqlite(first)
    fill(first)
    before = back_up(first, tmp_path / "of-sqlite")
    first.run("down")
    restore = ("store", "restore", str(tmp_path / "of-sqlite"), "--store", "etcd", "--bind", new.host)
    assert "copy controller/ca.pem and controller/ca.key" in output_of(new, *restore, fails=True)
    (new.state_dir / "controller").mkdir(mode=0o700, exist_ok=True)
    for name in ("ca.pem", "ca.key"):
        shutil.copy(first.state_dir / "controller" / name, new.state_dir / "controller")
    output_of(new, *restore, "--port", str(new.ports[0]))
    new.run("up", "--detach")
    assert json.loads(new.run("status", "--json").stdout)["store"] == "etcd"
    after = back_up(new, tmp_path / "of-etcd")
    assert {key: after[key] for key in before if not key.startswith("token/")}.items() <= before.items()
    refused = output_of(new, "store", "migrate", "--to", "sqlite", fails=True)
    assert "genie store restore FILE --store sqlite" in refused
    new.run("down")
    returned = output_of(new, "store", "restore", str(tmp_path / "of-etcd"), "--store", "sqlite")
    (kept,) = new.state_dir.glob("etcd.replaced-*")
    assert f"the previous store is kept in {kept}" in returned
    assert f"next: genie up --detach --bind {new.host} --port {new.ports[0]}\n" in returned
    new.run("up", "--detach", "--bind", new.host, "--port", str(new.ports[0]))
    assert json.loads(new.run("status", "--json").stdout)["store"] == "sqlite"
    assert back_up(new, tmp_path / "again") == after


def check_previous_servers_do_not_start(restored: Server, *previous: Server) -> None:
    """They have the data of the cluster that was replaced, and would be a majority of it."""
    with ThreadPoolExecutor() as pool:
        failures = list(pool.map(lambda server: server.run("up", "--detach", check=False), previous))
    for server, failed in zip(previous, failures, strict=True):
        assert failed.returncode != 0
        assert f"the cluster as it was before a restore on {restored.host}" in failed.stderr
        for removed in ("controller", "etcd", "owner.token"):
            assert str(server.state_dir / removed) in failed.stderr
        assert "genie etcd remove" in failed.stderr
        assert not server.running_processes()
        listed = server.run("etcd", "status", "--json", check=False)
        members = {each["endpoint"]: each for each in json.loads(listed.stdout)["members"]}
        assert listed.returncode == 1
        found = members[f"{restored.host}:{restored.ports[1]}"]
        assert found["problem"] == "belongs to another etcd cluster" and not found["healthy"]


def check_previous_cluster_reports_the_restored_one(restored: Server, *previous: Server) -> None:
    """A majority that was started while the restored cluster was stopped names it when it runs again."""
    restored.run("down")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.run("up", "--detach"), previous))
    restored.run("up", "--detach")
    first = previous[0]
    expected = f"etcd member {restored.name} ({restored.host}:{restored.ports[1]}) belongs to another etcd"
    wait_until(
        lambda: any(text.startswith(expected) for text in alarms(first)),
        timeout_s=60,
        what="the member of the restored cluster is an alarm",
    )
    statuses = {each["name"]: each["problem"] for each in first.list_members()}
    assert statuses[restored.name] == "belongs to another etcd cluster"
    end_servers(previous)


def test_repeated_restores_of_one_backup_get_different_generations(
    servers: list[Server], tmp_path: Path
) -> None:
    first, _, _ = servers
    first.start_first()
    job_id = start_waiting_job(first, tmp_path / "go")
    back_up(first, tmp_path / "backup")
    first.run("down", "--keep-jobs")
    generations = [
        json.loads(first.run("store", "restore", str(tmp_path / "backup"), "--json").stdout)["generation"]
        for _ in range(3)
    ]
    assert generations == sorted(set(generations))
    repeated = ("store", "restore", str(tmp_path / "backup"), "--generation", str(generations[-1]))
    assert f"is not above {generations[-1]}" in output_of(first, *repeated, fails=True)
    first.run("up", "--detach")
    assert first.try_submit("after three restores")
    check_job_has_continued(first, job_id, tmp_path / "go")
