"""What is read of ~/.ssh/config and of keys, and what a connection then gets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncssh
import pytest

from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh_pool import KnownHosts, Target, resolve

COMPARED = [
    "username",
    "host",
    "port",
    "tunnel",
    "proxy_command",
    "family",
    "local_addr",
    "tcp_keepalive",
    "host_key_alias",
    "agent_path",
    "agent_identities",
    "agent_forward_path",
    "kex_algs",
    "encryption_algs",
    "mac_algs",
    "compression_algs",
    "env",
    "send_env",
    "public_key_auth",
    "password_auth",
    "kbdint_auth",
    "host_based_auth",
    "preferred_auth",
    "connect_timeout",
    "login_timeout",
    "rekey_bytes",
    "command",
]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two keys and their certificates; the second key has a passphrase."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    folder = tmp_path / ".ssh"
    folder.mkdir()
    authority = asyncssh.generate_private_key("ssh-ed25519")
    for name in ("one", "two"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        if name == "one":
            key.write_private_key(folder / name)
        else:
            key.write_private_key(folder / name, "pkcs8-pem", passphrase="word")
        (folder / name).chmod(0o600)
        certificate = authority.generate_user_certificate(key, name)
        certificate.write_certificate(folder / f"{name}.cert")
    return folder


async def target_of(settings: str, folder: Path) -> Target:
    config = folder / "config"
    config.write_text(f"Host gpu1\n{settings}")
    file = parse_grid_file("nodes: [gpu1]\n", name="grid.yaml")
    return await resolve(file.nodes[0], file, config, trusted=KnownHosts())


def told(options: asyncssh.SSHClientConnectionOptions) -> dict[str, Any]:
    pairs = options.client_keys
    shown = {name: getattr(options, name) for name in COMPARED}
    return shown | {"keys": pairs and [pair.public_data for pair in pairs]}


@pytest.mark.parametrize(
    ("settings", "once"),
    [
        ("  IdentityFile ~/.ssh/one\n", True),
        ("  IdentityFile ~/.ssh/one\n  IdentityFile ~/.ssh/two\n  User ada\n  Port 2222\n", True),
        ("  IdentityFile ~/.ssh/one\n  IdentitiesOnly yes\n  HostName 127.0.0.1\n", True),
        ("  IdentityFile ~/.ssh/two\n  IdentitiesOnly yes\n", False),
        ("  IdentityFile ~/.ssh/one\n  IdentityAgent none\n  ForwardAgent yes\n", True),
        ("  IdentityFile ~/.ssh/one\n  CertificateFile ~/.ssh/one.cert\n", False),
        ("  IdentityFile ~/.ssh/one\n  Ciphers aes128-ctr\n  KexAlgorithms curve25519-sha256\n", True),
        ("  IdentityFile ~/.ssh/one\n  SetEnv A=1\n  Compression yes\n  RekeyLimit 1G\n", True),
        ("  User ada\n", False),
    ],
)
async def test_what_asyncssh_is_given_is_what_was_read(keys: Path, settings: str, once: bool) -> None:
    target = await target_of(settings, keys)
    assert bool(target.keys) is once
    construct = asyncssh.SSHClientConnectionOptions.construct
    given = await construct(target.options, host="gpu1", config=None, **target.keys)
    assert told(given) == told(target.options)
