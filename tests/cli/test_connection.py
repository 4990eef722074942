"""What a person sees when the cluster is not there, is not Genie, or does not want them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from genie.model.messages import GetStatus
from genie.runtime import wire
from tests.cli.nouns import status
from tests.cli.scripted import other_token


@pytest.fixture
def token(state_dir, monkeypatch) -> str:
    text = str(other_token())
    monkeypatch.setenv("GENIE_TOKEN", text)
    return text


@pytest.fixture
def stranger() -> Iterator[dict]:
    """Something that listens, says `greeting` to whoever comes, and closes."""
    told: dict = {"greeting": b""}
    with socket.create_server(("127.0.0.1", 0)) as server:
        told["address"] = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(told["greeting"])
                        connection.recv(4096)  # closing with something unread would be a reset
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        yield told
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_nobody_there_is_a_transport_failure(genie, token) -> None:
    ran = genie("status", "--address", f"127.0.0.1:{closed_port()}")
    assert (ran.code, ran.out) == (255, "")
    assert "nothing listens there" in ran.err and "hint: " in ran.err


def test_a_name_that_does_not_resolve_is_a_transport_failure(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_TOKEN", str(other_token(pin="p" * 43)))
    ran = genie("nodes", "--address", "no-such-host.invalid")
    assert ran.code == 255
    assert "no-such-host.invalid" in ran.err


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (wire.preface(wire.VERSION + 1), "wire version"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak Genie"),
        (b"", "without a greeting"),
        (wire.preface() + b"\xff" * 64, "frame"),
    ],
    ids=["another version", "another program", "silence", "garbage"],
)
def test_a_server_that_is_not_ours_is_a_transport_failure(genie, token, stranger, greeting, said) -> None:
    stranger["greeting"] = greeting
    ran = genie("status", "--address", stranger["address"])
    assert (ran.code, ran.out) == (255, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_wrong_token_is_refused_and_not_repeated(genie, controller, token) -> None:
    ran = genie("status")
    assert (ran.code, ran.out) == (1, "")
    assert "unknown here or its secret is wrong" in ran.err
    assert other_token().secret not in ran.err


def test_debug_does_not_show_the_token_either(genie, controller, token) -> None:
    ran = genie("--debug", "status")
    assert "Traceback" in ran.err
    assert other_token().secret not in ran.err


def test_a_text_that_is_no_token_is_refused_and_not_repeated(genie, controller, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_TOKEN", "hunter2")
    ran = genie("status")
    assert ran.code == 1
    assert "not a Genie token" in ran.err and "hunter2" not in ran.err


def test_without_a_token_the_error_says_where_to_get_one(genie) -> None:
    ran = genie("status", "--address", "127.0.0.1")
    assert ran.code == 1
    assert "no token for 127.0.0.1:5555" in ran.err and "genie token create" in ran.err


def test_the_token_can_come_from_a_file(genie, controller, state_dir, tmp_path) -> None:
    controller.answers[GetStatus] = status()
    (state_dir / "owner.token").unlink()
    file = tmp_path / "token"
    file.write_text(f"{controller.token}\n")
    assert genie("status", "--token-file", str(file)).code == 0
    assert genie("--token-file", str(file), "status").code == 0


def test_the_token_can_come_from_standard_input(genie, controller, state_dir, monkeypatch) -> None:
    import io

    controller.answers[GetStatus] = status()
    (state_dir / "owner.token").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO(str(controller.token)))
    assert genie("status", "--token-file", "-").code == 0


@pytest.mark.parametrize(("content", "code"), [(None, 2), ("", 1), ("\n \n", 1), ("junk", 1)])
def test_a_token_file_that_is_no_use_is_named(genie, controller, tmp_path, content, code) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    ran = genie("status", "--token-file", str(file))
    assert (ran.code, ran.out) == (code, "")
    assert "token" in ran.err


def test_a_token_file_that_is_binary_is_a_usage_error(genie, controller, tmp_path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
    assert genie("status", "--token-file", str(tmp_path / "token")).code == 2


@pytest.mark.parametrize("address", ["", "a b", "box:http", "box:99999", "http://box"])
def test_an_address_that_is_none_is_a_usage_error(genie, address) -> None:
    ran = genie("status", "--address", address)
    assert ran.code == 2
    assert "--address" in ran.err
