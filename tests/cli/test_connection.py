"""Errors for unreachable clusters, foreign servers and rejected tokens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from genie.model.messages import GetStatus
from genie.model.release import OWN_RELEASE, ProtocolVersions
from genie.runtime import wire
from tests.cli.sample_messages import make_status_reply
from tests.cli.scripted_controller import make_unknown_token
from tests.ports import free_port


@pytest.fixture
def unknown_token(state_dir, monkeypatch) -> str:
    text = str(make_unknown_token())
    monkeypatch.setenv("GENIE_TOKEN", text)
    return text


@pytest.fixture
def foreign_server() -> Iterator[dict]:
    """A server that sends `greeting` to each client and closes the connection."""
    server_info: dict = {"greeting": b""}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server_info["address"] = f"127.0.0.1:{server.getsockname()[1]}"

        def send_greeting_to_clients() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(server_info["greeting"])
                        connection.recv(4096)  # closing with something unread would be a reset
            except OSError:
                return

        thread = threading.Thread(target=send_greeting_to_clients)
        thread.start()
        yield server_info
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_unreachable_cluster_is_a_transport_error(genie, unknown_token) -> None:
    ran = genie("status", "--address", f"127.0.0.1:{free_port()}")
    assert (ran.code, ran.out) == (255, "")
    assert "nothing listens there" in ran.err and "hint: " in ran.err


@pytest.mark.parametrize(("minor_versions", "code"), [(1, 0), (2, 255)])
def test_controller_of_a_release_that_is_too_new_is_rejected_by_name(
    genie, controller, minor_versions: int, code: int
) -> None:
    controller.version = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + minor_versions}.0"
    controller.replies[GetStatus] = make_status_reply()
    ran = genie("status")
    assert ran.code == code
    if code:
        assert f"runs Genie {controller.version}, this side runs" in " ".join(ran.err.split())
        assert "upgrade this side first" in " ".join(ran.err.split())


def test_unresolvable_name_is_a_transport_error(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_TOKEN", str(make_unknown_token(pin="p" * 43)))
    ran = genie("nodes", "--address", "no-such-host.invalid")
    assert ran.code == 255
    assert "no-such-host.invalid" in ran.err


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (wire.make_preface(ProtocolVersions(lowest=8, highest=9)), "of the Genie protocol, this side"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak the Genie protocol"),
        (b"", "disconnected before the handshake"),
        (wire.make_preface() + b"\xff" * 64, "frame"),
    ],
    ids=["another version", "another program", "silence", "garbage"],
)
def test_foreign_server_is_a_transport_error(genie, unknown_token, foreign_server, greeting, message) -> None:
    foreign_server["greeting"] = greeting
    ran = genie("status", "--address", foreign_server["address"])
    assert (ran.code, ran.out) == (255, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_unknown_token_is_rejected_and_not_printed(genie, controller, unknown_token) -> None:
    ran = genie("status")
    assert (ran.code, ran.out) == (1, "")
    assert "unknown here or its secret is wrong" in ran.err
    assert make_unknown_token().secret not in ran.err


def test_debug_does_not_print_the_token(genie, controller, unknown_token) -> None:
    ran = genie("--debug", "status")
    assert "Traceback" in ran.err
    assert make_unknown_token().secret not in ran.err


def test_malformed_token_is_rejected_and_not_printed(genie, controller, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_TOKEN", "hunter2")
    ran = genie("status")
    assert ran.code == 1
    assert "not a Genie token" in ran.err and "hunter2" not in ran.err


def test_missing_token_error_has_a_hint(genie) -> None:
    ran = genie("status", "--address", "127.0.0.1")
    assert ran.code == 1
    assert "no token for 127.0.0.1:5555" in ran.err and "genie token create" in ran.err


def test_token_is_read_from_a_file(genie, controller, state_dir, tmp_path) -> None:
    controller.replies[GetStatus] = make_status_reply()
    (state_dir / "owner.token").unlink()
    file = tmp_path / "token"
    file.write_text(f"{controller.only_token}\n")
    assert genie("status", "--token-file", str(file)).code == 0
    assert genie("--token-file", str(file), "status").code == 0


def test_token_is_read_from_standard_input(genie, controller, state_dir, monkeypatch) -> None:
    import io

    controller.replies[GetStatus] = make_status_reply()
    (state_dir / "owner.token").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO(str(controller.only_token)))
    assert genie("status", "--token-file", "-").code == 0


@pytest.mark.parametrize(("content", "code"), [(None, 2), ("", 1), ("\n \n", 1), ("junk", 1)])
def test_unusable_token_file_is_named(genie, controller, tmp_path, content, code) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    ran = genie("status", "--token-file", str(file))
    assert (ran.code, ran.out) == (code, "")
    assert "token" in ran.err


def test_binary_token_file_is_a_usage_error(genie, controller, tmp_path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
    assert genie("status", "--token-file", str(tmp_path / "token")).code == 2


@pytest.mark.parametrize("address", ["", "a b", "box:http", "box:99999", "http://box"])
def test_invalid_address_is_a_usage_error(genie, address) -> None:
    ran = genie("status", "--address", address)
    assert ran.code == 2
    assert "--address" in ran.err
