"""Errors for key files that are not private keys or have a passphrase."""

from __future__ import annotations

import subprocess
from pathlib import Path

import asyncssh
import pytest

from genie.errors import LoginRefusedError, UsageError
from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh.keys import list_key_files, passphrase_hint
from genie.grid.ssh.pool import SshPool
from tests.grid.testbed import SshTestbed
from tests.needs import require_program

KEY = asyncssh.generate_private_key("ssh-ed25519")
CERTIFICATE = asyncssh.generate_private_key("ssh-ed25519").generate_user_certificate(KEY, "ada")


async def connect_with_key(testbed: SshTestbed, key_file: Path | None = None) -> None:
    named = f"ssh: {{key_file: '{key_file}'}}" if key_file is not None else ""
    file = parse_grid_file(f"nodes: [gpu1]\n{named}", name="f.yaml")
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool, pool.connect("gpu1", timeout_s=20):
        pass


def write_key_with_passphrase(path: Path, form: str = "openssh") -> Path:
    if form == "openssh":
        KEY.write_private_key(path)
        path.chmod(0o600)
        require_program("ssh-keygen", package="openssh-client")
        lock = ["ssh-keygen", "-q", "-p", "-N", "a phrase", "-P", "", "-f", str(path)]
        subprocess.run(lock, check=True, timeout=30)
    else:
        key = KEY if form == "pkcs8-pem" else asyncssh.generate_private_key("ecdsa-sha2-nistp256")
        key.write_private_key(path, form, passphrase="a phrase")
    return path


@pytest.mark.parametrize("only", ["IdentitiesOnly yes", "IdentitiesOnly no"])
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("key", b"", "'.*/key' is empty.*set it to a private key"),
        ("key", b"\n \n", "is empty"),
        ("key.pub", KEY.export_public_key(), r"key\.pub' is a public key.*set it to '.*/key', or remove it"),
        ("key", KEY.export_public_key(), "'.*/key' is a public key.*set it to a private key"),
        ("key-cert.pub", CERTIFICATE.export_certificate(), "is a certificate"),
        ("key", b"hunter2\n", "is not a private key: Invalid private key"),
        ("key", bytes(range(256)), "is not a private key"),
        ("key", KEY.export_private_key()[:80], "is not a private key: Missing PEM footer"),
    ],
    ids=["empty", "blank", "public", "public without .pub", "certificate", "text", "bytes", "cut short"],
)
async def test_key_file_that_is_not_a_private_key_is_rejected(
    own_testbed: SshTestbed, name: str, data: bytes, words: str, only: str
) -> None:
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(text.replace("IdentitiesOnly yes", only))
    file = own_testbed.folder / name
    file.write_bytes(data)
    with pytest.raises(UsageError, match=rf"^ssh\.key_file .*{words}"):
        await connect_with_key(own_testbed, file)


async def test_unreadable_key_file_is_rejected(own_testbed: SshTestbed) -> None:
    with pytest.raises(UsageError, match=r"could not read ssh\.key_file '/proc/self/mem': .* error"):
        await connect_with_key(own_testbed, Path("/proc/self/mem"))


@pytest.mark.parametrize("form", ["openssh", "pkcs1-pem", "pkcs8-pem"])
async def test_key_file_with_a_passphrase_is_named_only_when_the_login_fails(
    own_testbed: SshTestbed, form: str
) -> None:
    locked = write_key_with_passphrase(own_testbed.folder / "my key", form)
    await connect_with_key(own_testbed, locked)
    own_testbed.key.write_bytes(KEY.export_private_key())
    with pytest.raises(LoginRefusedError) as caught:
        await connect_with_key(own_testbed, locked)
    assert f"{locked} has a passphrase and is usable only through ssh-agent" in caught.value.hint
    assert f"(ssh-add '{locked}')" in caught.value.hint
    assert str(own_testbed.key) not in caught.value.hint


async def test_openssh_key_with_a_passphrase_is_skipped_and_named_when_the_login_fails(
    own_testbed: SshTestbed,
) -> None:
    locked = write_key_with_passphrase(own_testbed.folder / "locked")
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(f"Host *\n  IdentityFile {locked}\n{text}")
    await connect_with_key(own_testbed)
    write_key_with_passphrase(own_testbed.key, "pkcs8-pem")
    with pytest.raises(LoginRefusedError) as caught:
        await connect_with_key(own_testbed)
    both = f"{locked}, {own_testbed.key} have a passphrase and are usable only through ssh-agent"
    assert f"{both} (ssh-add {locked} {own_testbed.key})" in caught.value.hint


def test_default_keys_are_used_without_identity_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = asyncssh.SSHClientConnectionOptions(config=None, client_keys=None)
    files = list_key_files(options, own=None)
    assert passphrase_hint(files) == "a key with a passphrase must be added to ssh-agent (ssh-add)"
    (tmp_path / ".ssh").mkdir()
    locked = write_key_with_passphrase(tmp_path / ".ssh/id_ed25519")
    assert f"{locked} has a passphrase" in passphrase_hint(files)
    assert str(locked) not in passphrase_hint(list_key_files(options, own=str(tmp_path / "another")))
