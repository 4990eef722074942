"""login and logout: stored tokens, precedence and errors."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from genie.model.messages import GetStatus
from genie.model.tenant import TokenKind
from genie.runtime.credentials import LocalCluster
from genie.runtime.logins import default_login, list_logins
from genie.tenancy.access import NO_PIN, new_token, parse_token
from tests.cli.sample_messages import make_status_reply
from tests.cli.scripted_controller import ScriptedController, make_unknown_token
from tests.fakes.controller import OWNER_TOKEN


@pytest.fixture
def remote_cluster(state_dir: Path, controller: ScriptedController) -> ScriptedController:
    """A cluster that is not recorded in the local state directory."""
    (state_dir / "owner.token").unlink()
    (state_dir / "local.json").unlink()
    controller.replies[GetStatus] = make_status_reply()
    return controller


@pytest.fixture
def address(remote_cluster: ScriptedController) -> str:
    return f"127.0.0.1:{remote_cluster.port}"


@pytest.fixture
def token_file(remote_cluster: ScriptedController, tmp_path: Path) -> str:
    (tmp_path / "token").write_text(f"{OWNER_TOKEN}\n")
    return str(tmp_path / "token")


def test_commands_use_the_stored_login(genie, address, token_file, state_dir) -> None:
    assert "genie login" in genie("status").err
    ran = genie("login", address, "--token-file", token_file)
    assert (ran.code, ran.out) == (0, f"logged in to {address} with an owner token of tenant default\n")
    assert f"without an address use {address}" in ran.err
    assert genie("status").out.split()[:2] == ["address", address]
    assert genie("status", "--address", address).code == 0
    (stored,) = (state_dir / "logins").glob("*.token")
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600


def test_address_may_come_from_the_environment(genie, address, token_file, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", address)
    assert genie("login", "--token-file", token_file).code == 0
    assert genie("status").code == 0


def test_token_may_come_from_standard_input(genie, remote_cluster, address, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{OWNER_TOKEN}\n"))
    assert genie("login", address, "--token-file", "-").code == 0
    assert genie("status").code == 0


def run_and_type_token(argv: list[str], text: str) -> tuple[int, str]:
    """Run a command on a terminal, type a reply to its prompt, and return exit code and output."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "genie", *argv],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    shown = b""
    try:
        while select.select([parent], [], [], 60)[0]:
            try:
                shown += os.read(parent, 4096)
            except OSError:  # Linux raises it when the other side is closed
                break
            if text and b"not shown" in shown:
                os.write(parent, f"{text}\n".encode())
                text = ""
        return process.wait(60), shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_token_prompt_does_not_echo(remote_cluster, address, state_dir) -> None:
    code, shown = run_and_type_token(["login", address], str(OWNER_TOKEN))
    assert code == 0, shown
    assert f"Token for {address}" in shown and OWNER_TOKEN.secret not in shown
    assert [login.token for login in list_logins(state_dir)] == [OWNER_TOKEN]


def test_empty_token_is_not_stored(address, state_dir) -> None:
    code, shown = run_and_type_token(["login", address], " ")
    assert code == 1
    assert "no token entered" in shown
    assert list_logins(state_dir) == []


def test_no_prompt_without_a_terminal(genie, address, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ran = genie("login", address)
    assert ran.code == 2
    assert "not a terminal" in ran.err and "--token-file" in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hunter2", "not a Genie token"),
        (str(make_unknown_token()), "unknown here or its secret is wrong"),
        (
            str(new_token(TokenKind.JOIN, token_id="join1", secret=b"\x03" * 32, pin=NO_PIN)),
            "a join token: it admits a machine",
        ),
        (
            str(new_token(TokenKind.NODE, token_id="node1", secret=b"\x03" * 32, pin=NO_PIN)),
            "a node token: it admits a machine",
        ),
    ],
    ids=["no token", "wrong secret", "join token", "node token"],
)
def test_rejected_token_is_not_stored(genie, address, state_dir, tmp_path, text, message) -> None:
    (tmp_path / "bad").write_text(text)
    ran = genie("login", address, "--token-file", str(tmp_path / "bad"))
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err and text not in ran.err
    assert list_logins(state_dir) == []


def test_rejected_stored_login_has_a_hint(genie, remote_cluster, address, token_file) -> None:
    assert genie("login", address, "--token-file", token_file).code == 0
    remote_cluster.only_token = make_unknown_token()
    ran = genie("status")
    assert ran.code == 1
    assert f"the stored login to {address} was refused: token owner1 is unknown here" in ran.err
    assert f"genie login {address}" in ran.err


@pytest.mark.parametrize("form", ["{}", "{}:5555", "http://{}", "{}:port"])
@pytest.mark.parametrize(
    "argv", [["login"], ["logout"], ["login", "--address"], ["status", "--address"], ["join"], None]
)
def test_token_given_as_address_is_not_sent_to_dns(
    genie, remote_cluster, token_file, argv, form, monkeypatch
) -> None:
    def fail_on_name_lookup(*_: object, **__: object) -> None:
        raise AssertionError("the token went to the DNS servers")

    token = f"{new_token(TokenKind.USER, token_id='user1', secret=bytes(32), pin='p' * 43)}"
    monkeypatch.setattr(socket, "getaddrinfo", fail_on_name_lookup)
    if argv is None:
        monkeypatch.setenv("GENIE_MASTER_ADDR", form.format(token))
        ran = genie("login", "--token-file", token_file)
    else:
        ran = genie(*argv, form.format(token), "--token-file", token_file)
    assert (ran.code, "this is a token, not an address" in ran.err) == (2, True)
    assert parse_token(token).secret[:8] not in ran.err


def test_login_to_an_unreachable_address_is_a_transport_error(
    genie, remote_cluster, token_file, state_dir
) -> None:
    ran = genie("login", "127.0.0.1:1", "--token-file", token_file)
    assert ran.code == 255
    assert list_logins(state_dir) == []


def test_login_that_overrides_the_owner_token_is_noted(
    genie, remote_cluster, address, token_file, state_dir
) -> None:
    remote_cluster.announce(state_dir)
    message = genie("login", address, "--token-file", token_file).err
    assert (
        f"the cluster of this machine at {address}, this login takes precedence over the owner's" in message
    )
    assert f"'genie logout {address}'" in message
    assert genie("logout", address).code == 0


def test_sources_with_precedence_over_the_login_are_named(
    genie, remote_cluster, address, token_file, state_dir, monkeypatch
) -> None:
    LocalCluster(host="10.0.0.7", port=6000, cluster_id="c1").write(state_dir)
    message = genie("login", address, "--token-file", token_file).err
    assert "without --address, commands use the cluster of this machine at 10.0.0.7:6000" in message
    assert "genie logout" not in message
    remote_cluster.announce(state_dir)
    monkeypatch.setenv("GENIE_TOKEN", str(make_unknown_token()))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "not a terminal" in genie("login", address).err, "the variable is not what is stored"
    ran = genie("login", address, "--token-file", token_file)
    assert ran.code == 0
    assert "the token of environment variable GENIE_TOKEN takes precedence" in ran.err
    assert genie("status").code == 1, "the variable comes before the login"


def test_logout_removes_the_token(genie, address, token_file, state_dir) -> None:
    genie("login", address, "--token-file", token_file)
    assert genie("logout", address).out == f"logged out of {address}\n"
    assert genie("status").code == 2
    again = genie("logout", address)
    assert again.code == 1
    assert f"no login stored for {address}" in again.err and "no logins are stored" in again.err


def test_logout_defaults_to_the_last_login(genie, address, token_file, state_dir) -> None:
    assert genie("logout").code == 2
    genie("login", address, "--token-file", token_file)
    assert genie("logout").out == f"logged out of {address}\n"
    assert default_login(state_dir) is None


def test_login_list_hides_secrets(genie, remote_cluster, address, token_file) -> None:
    assert "no logins" in genie("login", "--list").err
    genie("login", address, "--token-file", token_file)
    ran = genie("login", "--list")
    assert ran.out.split() == ["ADDRESS", "TOKEN", "KIND", "DEFAULT", address, "owner", "yes"]
    assert json.loads(genie("login", "--list", "--json").out) == {
        "logins": [{"address": address, "kind": "owner", "default": True}]
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["login"], "no address given"),
        (["login", "a", "--address", "b"], "are mutually exclusive"),
        (["login", "a b"], "ADDRESS 'a b' is not an address"),
        (["login", "--address", "a b"], "--address 'a b' is not an address"),
        (["logout", "a:0"], "ADDRESS 'a:0': port 0 is not allowed"),
    ],
)
def test_usage_error_states_the_reason(genie, argv, message) -> None:
    ran = genie(*argv)
    assert ran.code == 2
    assert message in ran.err
