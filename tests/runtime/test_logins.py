"""Stored logins: one per address, private, and the last one is the default."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.errors import StoreFullError, TokenMissingError
from genie.model.tenant import TokenKind
from genie.runtime.logins import (
    default_login,
    find_login_on_other_port,
    list_logins,
    login_name,
    read_login,
    remove_login,
    store_login,
)
from genie.tenancy.access import new_token

FIRST, SECOND = (
    new_token(TokenKind.USER, token_id=name, secret=bytes([number]) * 32, pin="p" * 43)
    for number, name in enumerate(("first1", "second"), 1)
)


def test_login_is_stored_for_its_address_only(tmp_path: Path) -> None:
    store_login(tmp_path, "gpu-box", 5555, FIRST)
    assert read_login(tmp_path, "gpu-box", 5555) == FIRST
    assert read_login(tmp_path, "gpu-box", 6000) is None
    assert read_login(tmp_path, "gpu-box.example.org", 5555) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [("GPU-Box", "gpu-box"), ("fe80::0:1", "fe80::1"), ("FE80::1", "fe80::1"), ("10.0.0.7", "10.0.0.7")],
)
def test_spellings_of_a_host_share_a_login(tmp_path: Path, one: str, other: str) -> None:
    store_login(tmp_path, one, 5555, FIRST)
    assert read_login(tmp_path, other, 5555) == FIRST
    assert len(list_logins(tmp_path)) == 1
    assert login_name(one, 5555) == login_name(other, 5555)


def test_files_are_private_and_no_temporary_file_remains(tmp_path: Path) -> None:
    store_login(tmp_path / "state", "gpu-box", 5555, FIRST)
    store_login(tmp_path / "state", "gpu-box", 5555, SECOND)
    folder = tmp_path / "state" / "logins"
    assert sorted(path.name for path in folder.iterdir()) == ["default", "gpu-box:5555.token"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_login(tmp_path / "state", "gpu-box", 5555) == SECOND


def test_last_login_is_the_default_until_logout(tmp_path: Path) -> None:
    assert default_login(tmp_path) is None
    store_login(tmp_path, "a", 5555, FIRST)
    store_login(tmp_path, "fe80::1", 6000, SECOND)
    assert default_login(tmp_path) == ("fe80::1", 6000)
    assert [(one.address, one.is_default) for one in list_logins(tmp_path)] == [
        ("[fe80::1]:6000", True),
        ("a:5555", False),
    ]
    assert remove_login(tmp_path, "fe80::1", 6000)
    assert default_login(tmp_path) is None
    assert [one.address for one in list_logins(tmp_path)] == ["a:5555"]
    assert not remove_login(tmp_path, "fe80::1", 6000)


def test_login_to_another_port_of_the_host_is_found(tmp_path: Path) -> None:
    assert find_login_on_other_port(tmp_path, "gpu-box", 5555) is None
    store_login(tmp_path, "gpu-box", 7000, FIRST)
    store_login(tmp_path, "gpu-box", 6000, FIRST)
    store_login(tmp_path, "gpu-box", 8000, FIRST)
    store_login(tmp_path, "gpu-box.example.org", 6000, FIRST)
    store_login(tmp_path, "fe80::1", 6000, FIRST)
    (tmp_path / "logins" / "gpu-box:6000.token").write_text("spoiled")
    assert find_login_on_other_port(tmp_path, "GPU-Box", 5555) == "gpu-box:7000"
    assert find_login_on_other_port(tmp_path, "fe80::0:1", 5555) == "[fe80::1]:6000"
    assert find_login_on_other_port(tmp_path, "box", 5555) is None
    store_login(tmp_path, "gpu-box", 8000, FIRST)
    assert find_login_on_other_port(tmp_path, "gpu-box", 5555) == "gpu-box:8000", "the last login"


def test_unreadable_login_error_explains_how_to_renew_it(tmp_path: Path) -> None:
    store_login(tmp_path, "a", 5555, FIRST)
    (tmp_path / "logins" / "a:5555.token").write_text("spoiled")
    with pytest.raises(TokenMissingError, match="genie login a:5555"):
        read_login(tmp_path, "a", 5555)
    assert list_logins(tmp_path)[0].token is None
    (tmp_path / "logins" / "default").write_bytes(b"\xff")
    assert default_login(tmp_path) is None
    (tmp_path / "logins" / "default").write_text("../../etc")
    assert default_login(tmp_path) is None
    (tmp_path / "logins" / "default").write_text("a" * 5000)
    assert default_login(tmp_path) is None


def test_host_name_too_long_for_a_file_name_has_no_login(tmp_path: Path) -> None:
    store_login(tmp_path, "a", 5555, FIRST)
    host = ".".join(["a" * 62] * 4)
    assert read_login(tmp_path, host, 5555) is None
    assert not remove_login(tmp_path, host, 5555)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_login_that_is_not_a_regular_file_does_not_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "logins").mkdir()
    make(tmp_path / "logins" / "a:5555.token")
    make(tmp_path / "logins" / "default")
    with pytest.raises(TokenMissingError, match="cannot be read"):
        read_login(tmp_path, "a", 5555)
    assert [one.token for one in list_logins(tmp_path)] == [None]
    assert default_login(tmp_path) is None


def test_login_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "logins" / "a:5555.token").mkdir(parents=True)
    with pytest.raises(StoreFullError, match=r"cannot remove .*a:5555\.token"):
        remove_login(tmp_path, "a", 5555)


@pytest.mark.parametrize("host", ["a", "fe80::1"])
def test_logout_removes_the_token_of_an_interrupted_login(tmp_path: Path, host: str) -> None:
    store_login(tmp_path, host, 5555, FIRST)
    folder = tmp_path / "logins"
    path = next(folder.glob("*.token"))
    (folder / f".{path.name}.123.new").write_text(str(SECOND))
    store_login(tmp_path, "b", 5555, SECOND)
    (folder / ".b:5555.token.123.new").write_text(str(SECOND))
    assert remove_login(tmp_path, host, 5555)
    assert sorted(one.name for one in folder.iterdir()) == [
        ".b:5555.token.123.new",
        "b:5555.token",
        "default",
    ]
    (folder / f".{path.name}.124.new").write_text(str(SECOND))
    assert not remove_login(tmp_path, host, 5555)
    assert not list(folder.glob("*.124.new"))
