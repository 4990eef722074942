"""doctor: what it finds, what it recommends, and when it ends with 1."""

from __future__ import annotations

import json
import socket
import stat
import sys
import time

import pytest

from genie.cli import checks, doctor
from genie.cli.checks import Check, Verdict
from genie.config import load
from genie.model.messages import GetStatus
from genie.runtime import native
from genie.runtime.tls import CertificateAuthority, new_key_and_csr
from tests.cli.nouns import status


def by_name(found) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_a_machine_without_a_cluster_is_fine(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(_free_port()))
    ran = genie("doctor")
    assert ran.code == 0
    assert "accelerator cpu" in ran.out and "network rdma" in ran.out
    assert "start one: genie up" in ran.out


def test_doctor_gives_json(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(_free_port()))
    document = json.loads(genie("doctor", "--json").out)
    assert document["ok"] is True
    assert {"name", "verdict", "found", "fix", "detail"} == set(document["checks"][0])
    names = {check["name"] for check in document["checks"]}
    assert {"python", "torch", "uvloop", "grpcio", "c++ compiler", "etcd", "disk space", "clock"} <= names


def test_a_backend_without_a_transport_says_that_and_the_rest_on_demand(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(_free_port()))
    document = json.loads(genie("doctor", "--json").out)
    rdma = next(check for check in document["checks"] if check["name"] == "network rdma")
    assert rdma["found"] == "this version of Genie has no transport for it"
    assert rdma["detail"]
    assert rdma["detail"] not in genie("doctor").out
    assert rdma["detail"] in genie("doctor", "--debug").out


def test_the_compiler_is_the_one_that_would_be_used(monkeypatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'print(\"compiler 12\")'")
    found = checks._compiler()
    assert (found.verdict, found.found) == (
        Verdict.OK,
        f'{sys.executable} -c print("compiler 12"): compiler 12',
    )


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = checks._compiler()
    assert found.verdict is Verdict.ABSENT
    assert "there is no C++ compiler" in found.found
    assert "g++ python3-dev" in found.fix


def test_a_compiler_that_was_chosen_and_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = checks._compiler()
    assert found.verdict is Verdict.ABSENT
    assert "CXX names 'no-such-compiler', which is not there" in found.found


def test_the_devices_library_is_there_for_the_torch_that_is_installed() -> None:
    found = checks._libraries()
    assert found.verdict is Verdict.OK
    assert f"compiled for torch {native.Target.installed().torch_version}" in found.found


def test_a_library_that_is_still_to_be_compiled_is_named(monkeypatch, tmp_path) -> None:
    empty = native.Workshop(native.Workshop.of_this_installation().sources, tmp_path)
    monkeypatch.setattr(native.Workshop, "of_this_installation", lambda: empty)
    found = checks._libraries()
    assert found.verdict is Verdict.ABSENT
    assert "genie_device and genie_executor not compiled for torch" in found.found
    assert found.fix == "python -m genie.runtime.native"
    scheduler = next(each for each in checks.tools() if each.name == "scheduler library")
    assert scheduler.verdict is Verdict.ABSENT and "half a minute" in scheduler.found
    assert scheduler.fix == "python -m genie.runtime.native genie_scheduler"


def test_without_torch_there_is_no_library_to_compile(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = checks._libraries()
    assert found.verdict is Verdict.ABSENT
    assert "needs PyTorch" in found.found
    assert "pip install" in found.fix


def test_a_compiler_without_the_headers_of_python_is_not_enough(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = checks._compiler()
    assert found.verdict is Verdict.ABSENT
    assert "without the headers of Python" in found.found


def test_a_cluster_may_be_named_with_its_port(monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1:6001")
    assert checks._cluster_address(load()) == ("127.0.0.1", 6001)


def test_a_cluster_that_answers_is_ok_and_the_port_is_its_own(genie, controller, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_PORT", str(controller.port))
    controller.answers[GetStatus] = status()
    found = {check["name"]: check for check in json.loads(genie("doctor", "--json").out)["checks"]}
    assert found["cluster"]["verdict"] == "ok"
    assert found["cluster"]["found"].endswith(", 1 node")
    assert found[f"port {controller.port}"]["found"] == "used by this cluster"


def test_a_cluster_that_is_named_and_does_not_answer_fails(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GENIE_MASTER_PORT", str(_free_port()))
    monkeypatch.setenv("GENIE_TOKEN", f"genie.user.abcd.{'s' * 43}.-")
    ran = genie("doctor", "--json")
    assert ran.code == 1
    document = json.loads(ran.out)
    assert document["ok"] is False
    assert [c["name"] for c in document["checks"] if c["verdict"] == "failed"] == ["cluster"]


def test_a_port_of_another_program_is_a_warning(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = by_name(checks.cluster(load({"controller.port": port})))
    assert found[f"port {port}"].verdict is Verdict.WARNING
    assert "--port" in found[f"port {port}"].fix


def test_a_check_that_breaks_is_a_finding_and_the_others_run(monkeypatch) -> None:
    def broken():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(checks, "accelerators", broken)
    found = by_name(doctor.run_checks(load({"controller.port": _free_port()})))
    assert found["accelerators"].verdict is Verdict.WARNING
    assert "ZeroDivisionError" in found["accelerators"].found
    assert "clock" in found


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, Verdict.ABSENT),
        ("2.10.1", Verdict.WARNING),
        ("2.11.0+cu130", Verdict.OK),
        ("2.13.1", Verdict.OK),
        ("2.14.0", Verdict.WARNING),
    ],
)
def test_torch_is_looked_at_without_importing_it(monkeypatch, version, verdict) -> None:
    monkeypatch.setattr(checks, "_version", lambda name: version if name == "torch" else "1.0")
    assert by_name(checks.packages())["torch"].verdict is verdict


@pytest.mark.parametrize(
    ("line", "verdict"),
    [("etcd Version: 3.4.23", Verdict.OK), ("etcd Version: 3.5.1", Verdict.WARNING), ("", Verdict.WARNING)],
)
def test_an_etcd_that_can_lose_data_is_refused(monkeypatch, line, verdict) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(checks, "_first_line", lambda argv: line)
    assert by_name(checks.tools())["etcd"].verdict is verdict


def test_a_machine_without_tools_says_what_they_are_for(monkeypatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    found = by_name(checks.tools())
    for library in ("device library", "scheduler library"):
        assert found.pop(library).verdict is Verdict.OK, "what is compiled needs no compiler"
    assert {check.verdict for check in found.values()} == {Verdict.ABSENT}
    assert all(check.fix for check in found.values())


def test_a_state_directory_that_others_can_read_is_a_warning(state_dir) -> None:
    state_dir.mkdir(mode=0o755)
    state_dir.chmod(0o755)
    check = by_name(checks.state_directory(load()))["state directory"]
    assert check.verdict is Verdict.WARNING
    assert "chmod 700" in check.fix
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o755, "doctor changes nothing"


def test_a_state_directory_that_cannot_be_written_fails(monkeypatch) -> None:
    monkeypatch.setattr(checks.os, "access", lambda *_args: False)
    assert by_name(checks.state_directory(load()))["state directory"].verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("free", "verdict"), [(1, Verdict.FAILED), (500 * 1024**2, Verdict.WARNING), (1 << 40, Verdict.OK)]
)
def test_little_disk_space_is_told(monkeypatch, free, verdict) -> None:
    class Usage:
        pass

    Usage.free = free
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _path: Usage)
    assert by_name(checks.state_directory(load()))["disk space"].verdict is verdict


def test_a_clock_before_the_installation_fails(monkeypatch) -> None:
    monkeypatch.setattr(checks.time, "time", lambda: 1e9)
    (check,) = checks.clock()
    assert check.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("age_days", "verdict"), [(0, Verdict.OK), (6.99, Verdict.WARNING), (8, Verdict.WARNING)]
)
def test_certificates_are_looked_at(state_dir, age_days, verdict) -> None:
    now = time.time()
    authority = CertificateAuthority.create(now=now)
    _, csr = new_key_and_csr()
    pem = authority.issue(csr, name="box.node.genie.internal", days=7, now=now - age_days * 86400)
    folder = state_dir / "agents" / "box"
    folder.mkdir(parents=True)
    (folder / "node.pem").write_text(pem)
    assert by_name(checks.certificates(load()))["certificate box"].verdict is verdict


def test_a_certificate_that_cannot_be_read_fails(state_dir) -> None:
    (state_dir / "controller").mkdir(parents=True)
    (state_dir / "controller" / "ca.pem").write_text("junk")
    assert by_name(checks.certificates(load()))["certificate ca.pem"].verdict is Verdict.FAILED


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
