"""doctor: checks, suggested fixes, exit code."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from pathlib import Path

import msgspec
import pytest

from genie.cli import doctor_checks
from genie.cli.commands import doctor
from genie.cli.doctor_checks import CheckOutcome, CheckVerdict
from genie.config import load
from genie.model.messages import GetStatus
from genie.model.tenant import TokenKind
from genie.native import libraries
from genie.runtime.logins import store_login
from genie.runtime.tls import CertificateAuthority, new_key_and_csr
from genie.supervisor.process_records import ETCD, SUPERVISOR, record_process
from genie.tenancy.access import new_token
from tests.cli.sample_messages import make_status_reply
from tests.needs import require_cgroup
from tests.ports import free_port
from tests.supervisor.test_incomplete_join import INCOMPLETE, MEMBER
from tests.supervisor.test_local_server import WAITING


def index_checks_by_name(found) -> dict[str, CheckOutcome]:
    return {check.name: check for check in found}


def test_doctor_passes_without_a_cluster(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(free_port()))
    ran = genie("doctor")
    assert ran.code == 0
    assert "accelerator cpu" in ran.out and "network rdma" in ran.out
    assert "cluster             genie up" in ran.out


def test_doctor_prints_json(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(free_port()))
    document = json.loads(genie("doctor", "--json").out)
    assert document["ok"] is True
    assert {"name", "verdict", "found", "fix", "detail"} == set(document["checks"][0])
    names = {check["name"] for check in document["checks"]}
    assert {"python", "torch", "uvloop", "grpcio", "c++ compiler", "etcd", "disk space", "clock"} <= names
    assert "control groups" in names


def test_unimplemented_backend_shows_details_only_with_debug(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(free_port()))
    document = json.loads(genie("doctor", "--json").out)
    rdma = next(check for check in document["checks"] if check["name"] == "network rdma")
    assert rdma["found"] == "not implemented in this version"
    assert rdma["detail"]
    assert rdma["detail"] not in genie("doctor").out
    assert rdma["detail"] in genie("doctor", "--debug").out


def test_compiler_check_uses_the_selected_compiler(monkeypatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'print(\"compiler 12\")'")
    found = doctor_checks._check_compiler()
    assert (found.verdict, found.found) == (
        CheckVerdict.OK,
        f'{sys.executable} -c print("compiler 12"): compiler 12',
    )


def test_missing_compiler_is_reported_with_a_fix(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = doctor_checks._check_compiler()
    assert found.verdict is CheckVerdict.ABSENT
    assert "there is no C++ compiler" in found.found
    assert "g++ python3-dev" in found.fix


def test_missing_configured_compiler_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = doctor_checks._check_compiler()
    assert found.verdict is CheckVerdict.ABSENT
    assert "CXX names 'no-such-compiler', which was not found" in found.found


def test_device_library_is_compiled_for_the_installed_torch() -> None:
    found = doctor_checks._check_device_library()
    assert found.verdict is CheckVerdict.OK
    assert f"compiled for torch {libraries.TorchPlatform.from_installation().torch_version}" in found.found


def test_uncompiled_library_is_named(monkeypatch, tmp_path) -> None:
    empty = libraries.BuildCache(libraries.BuildCache.of_this_installation().source_folder, tmp_path)
    monkeypatch.setattr(libraries.BuildCache, "of_this_installation", lambda: empty)
    found = doctor_checks._check_device_library()
    assert found.verdict is CheckVerdict.ABSENT
    assert "genie_device and genie_executor not compiled for torch" in found.found
    assert found.fix == "python -m genie.native"
    scheduler = next(
        each for each in doctor_checks.check_libraries_and_system_tools() if each.name == "scheduler library"
    )
    assert scheduler.verdict is CheckVerdict.ABSENT and "half a minute" in scheduler.found
    assert scheduler.fix == "python -m genie.native genie_scheduler"


def test_device_library_is_absent_without_torch(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = doctor_checks._check_device_library()
    assert found.verdict is CheckVerdict.ABSENT
    assert "needs PyTorch" in found.found
    assert "pip install" in found.fix


def test_compiler_without_python_headers_is_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = doctor_checks._check_compiler()
    assert found.verdict is CheckVerdict.ABSENT
    assert "the Python headers are missing" in found.found


def test_cluster_address_may_contain_the_port(monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1:6001")
    assert doctor_checks._find_cluster_address(load()) == ("127.0.0.1", 6001)


def test_port_of_the_local_cluster_is_reported_as_used_by_it(genie, controller, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(controller.port))
    controller.replies[GetStatus] = make_status_reply()
    found = {check["name"]: check for check in json.loads(genie("doctor", "--json").out)["checks"]}
    assert found["cluster"]["verdict"] == "ok"
    assert found["cluster"]["found"].endswith(", 1 node")
    assert found[f"port {controller.port}"]["found"] == "in use by the local cluster"


def test_local_port_is_not_reported_as_used_by_the_cluster_of_the_last_login(monkeypatch, state_dir) -> None:
    async def reply_that_cluster_is_reachable(_settings: object) -> tuple[bool, str, str]:
        return True, "192.0.2.1 answers", ""

    port = free_port()
    token = new_token(TokenKind.USER, token_id="user1", secret=b"\x01" * 32, pin="p" * 43)
    store_login(state_dir, "192.0.2.1", port, token)
    assert doctor_checks._find_cluster_address(load()) == ("192.0.2.1", port)
    monkeypatch.setattr(
        doctor_checks, "_fetch_cluster_reachable_found_and_fix", reply_that_cluster_is_reachable
    )
    found = index_checks_by_name(doctor_checks.check_port_and_cluster(load({"controller.port": port})))
    assert (found["cluster"].found, found[f"port {port}"].found) == ("192.0.2.1 answers", "free")


def test_cluster_without_a_leader_fails(controller) -> None:
    alarm = "no leader: the store does not respond (of 3 etcd members, 2 must run: see 'genie etcd status')"
    controller.replies[GetStatus] = msgspec.structs.replace(
        make_status_reply(), leading=False, store_ok=False, has_cluster_data=True, age_s=3.0, alarms=(alarm,)
    )
    check = index_checks_by_name(doctor_checks.check_port_and_cluster(load()))["cluster"]
    assert check.verdict is CheckVerdict.FAILED
    assert check.found == f"127.0.0.1:{controller.port} is reachable, but there is {alarm}"
    assert "start the other servers with 'genie up'" in check.fix


def test_server_that_does_not_run_fails_although_another_one_responds(controller, state_dir) -> None:
    MEMBER.write(state_dir)
    controller.replies[GetStatus] = make_status_reply()
    found = index_checks_by_name(doctor_checks.check_port_and_cluster(load()))
    assert found["cluster"].verdict is CheckVerdict.OK
    check = found["local server"]
    assert (check.verdict, check.found) == (CheckVerdict.FAILED, "this server is not running")
    assert "'genie up'" in check.fix


def test_server_that_waits_for_a_majority_is_not_an_absent_cluster(state_dir) -> None:
    record_process(state_dir, SUPERVISOR, os.getpid(), missing_servers=WAITING)
    found = index_checks_by_name(doctor_checks.check_port_and_cluster(load()))
    assert found["local server"].found == f"this server is {WAITING}" and "cluster" not in found


def test_interrupted_join_is_reported_while_its_etcd_member_still_runs(state_dir) -> None:
    INCOMPLETE.write(state_dir)
    record_process(state_dir, ETCD, os.getpid())
    found = index_checks_by_name(doctor_checks.check_state_directory(load()))
    assert found["server join"].verdict is CheckVerdict.FAILED
    record_process(state_dir, SUPERVISOR, os.getpid())
    assert "server join" not in index_checks_by_name(doctor_checks.check_state_directory(load()))


def test_unreachable_configured_cluster_fails(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GENIE_MASTER_PORT", str(free_port()))
    monkeypatch.setenv("GENIE_TOKEN", f"genie.user.abcd.{'s' * 43}.-")
    ran = genie("doctor", "--json")
    assert ran.code == 1
    document = json.loads(ran.out)
    assert document["ok"] is False
    assert [c["name"] for c in document["checks"] if c["verdict"] == "failed"] == ["cluster"]


def test_port_used_by_another_program_is_a_warning(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = index_checks_by_name(doctor_checks.check_port_and_cluster(load({"controller.port": port})))
    assert found[f"port {port}"].verdict is CheckVerdict.WARNING
    assert "--port" in found[f"port {port}"].fix


def test_exception_in_a_check_is_a_warning_and_other_checks_run(monkeypatch) -> None:
    def raise_zero_division():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(doctor_checks, "check_accelerators", raise_zero_division)
    found = index_checks_by_name(doctor.run_checks(load({"controller.port": free_port()})))
    assert found["accelerators"].verdict is CheckVerdict.WARNING
    assert "ZeroDivisionError" in found["accelerators"].found
    assert "clock" in found


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, CheckVerdict.ABSENT),
        ("2.10.1", CheckVerdict.WARNING),
        ("2.11.0+cu130", CheckVerdict.OK),
        ("2.13.1", CheckVerdict.OK),
        ("2.14.0", CheckVerdict.WARNING),
    ],
)
def test_torch_version_is_checked_without_importing_torch(monkeypatch, version, verdict) -> None:
    monkeypatch.setattr(
        doctor_checks, "_find_installed_version", lambda name: version if name == "torch" else "1.0"
    )
    assert index_checks_by_name(doctor_checks.check_packages())["torch"].verdict is verdict


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("etcd Version: 3.4.23", CheckVerdict.OK),
        ("etcd Version: 3.5.1", CheckVerdict.WARNING),
        ("", CheckVerdict.WARNING),
    ],
)
def test_etcd_version_that_can_lose_data_is_rejected(monkeypatch, line, verdict) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor_checks, "_run_and_get_first_output_line", lambda argv: line)
    assert index_checks_by_name(doctor_checks.check_libraries_and_system_tools())["etcd"].verdict is verdict


def test_missing_tools_are_reported_with_their_purpose(monkeypatch) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor_checks.cgroups, "own_control_groups", list)
    found = index_checks_by_name(doctor_checks.check_libraries_and_system_tools())
    for library in ("device library", "scheduler library"):
        assert found.pop(library).verdict is CheckVerdict.OK, "what is compiled needs no compiler"
    assert {check.verdict for check in found.values()} == {CheckVerdict.ABSENT}
    assert all(check.fix for check in found.values())


def test_readable_state_directory_is_a_warning(state_dir) -> None:
    state_dir.mkdir(mode=0o755)
    state_dir.chmod(0o755)
    check = index_checks_by_name(doctor_checks.check_state_directory(load()))["state directory"]
    assert check.verdict is CheckVerdict.WARNING
    assert "chmod 700" in check.fix
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o755, "doctor changes nothing"


def test_unwritable_state_directory_fails(monkeypatch) -> None:
    monkeypatch.setattr(doctor_checks.os, "access", lambda *_args: False)
    assert (
        index_checks_by_name(doctor_checks.check_state_directory(load()))["state directory"].verdict
        is CheckVerdict.FAILED
    )


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(1, CheckVerdict.FAILED), (500 * 1024**2, CheckVerdict.WARNING), (1 << 40, CheckVerdict.OK)],
)
def test_low_disk_space_is_reported(monkeypatch, free, verdict) -> None:
    class Usage:
        pass

    Usage.free = free
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda _path: Usage)
    assert index_checks_by_name(doctor_checks.check_state_directory(load()))["disk space"].verdict is verdict


def test_clock_before_the_installation_fails(monkeypatch) -> None:
    monkeypatch.setattr(doctor_checks.time, "time", lambda: 1e9)
    (check,) = doctor_checks.check_clock()
    assert check.verdict is CheckVerdict.FAILED


@pytest.mark.parametrize(
    ("age_days", "verdict"), [(0, CheckVerdict.OK), (6.99, CheckVerdict.WARNING), (8, CheckVerdict.WARNING)]
)
def test_expired_or_expiring_certificate_is_a_warning(state_dir, age_days, verdict) -> None:
    now = time.time()
    authority = CertificateAuthority.create(now=now)
    _, csr = new_key_and_csr()
    pem = authority.issue(csr, name="box.node.genie.internal", days=7, now=now - age_days * 86400)
    folder = state_dir / "agents" / "box"
    folder.mkdir(parents=True)
    (folder / "node.pem").write_text(pem)
    assert (
        index_checks_by_name(doctor_checks.check_certificate_expiry(load()))["certificate box"].verdict
        is verdict
    )


def test_unreadable_certificate_fails(state_dir) -> None:
    (state_dir / "controller").mkdir(parents=True)
    (state_dir / "controller" / "ca.pem").write_text("junk")
    assert (
        index_checks_by_name(doctor_checks.check_certificate_expiry(load()))["certificate ca.pem"].verdict
        is CheckVerdict.FAILED
    )


def test_missing_control_groups_are_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.cgroups, "own_control_groups", list)
    found = index_checks_by_name(doctor_checks.check_libraries_and_system_tools())["control groups"]
    assert found.verdict is CheckVerdict.ABSENT
    assert "Delegate=yes" in found.fix


def test_control_group_check_names_the_parent_group() -> None:
    path = require_cgroup("genie-doctor-test", "v2")
    assert (
        index_checks_by_name(doctor_checks.check_libraries_and_system_tools())["control groups"].found
        == f"below {Path(path).parent}"
    )
