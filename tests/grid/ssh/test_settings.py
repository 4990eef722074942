"""Settings of ~/.ssh/config and keys, and the resulting connection options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncssh
import pytest
from asyncssh.crypto import RSAPrivateKey

from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh.target import KnownHostsCache, SshTarget, resolve_ssh_target

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
def home_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


async def resolve_target_of_gpu1(settings: str, folder: Path) -> SshTarget:
    config = folder / "config"
    config.write_text(f"Host gpu1\n{settings}")
    file = parse_grid_file("nodes: [gpu1]\n", name="grid.yaml")
    return await resolve_ssh_target(file.nodes[0], file, config, trusted=KnownHostsCache())


def get_option_values_to_compare(options: asyncssh.SSHClientConnectionOptions) -> dict[str, Any]:
    pairs = options.client_keys
    shown = {name: getattr(options, name) for name in COMPARED}
    return shown | {"keys": pairs and [pair.public_data for pair in pairs]}


@pytest.mark.parametrize(
    "settings",
    [
        "  IdentityFile ~/.ssh/one\n",
        "  IdentityFile ~/.ssh/one\n  IdentityFile ~/.ssh/two\n  User ada\n  Port 2222\n",
        "  IdentityFile ~/.ssh/one\n  IdentitiesOnly yes\n  HostName 127.0.0.1\n",
        "  IdentityFile ~/.ssh/two\n  IdentitiesOnly yes\n",
        "  IdentityFile ~/.ssh/one\n  IdentityAgent none\n  ForwardAgent yes\n",
        "  IdentityFile ~/.ssh/one\n  CertificateFile ~/.ssh/one.cert\n",
        "  IdentityFile ~/.ssh/one\n  Ciphers aes128-ctr\n  KexAlgorithms curve25519-sha256\n",
        "  IdentityFile ~/.ssh/one\n  SetEnv A=1\n  Compression yes\n  RekeyLimit 1G\n",
        "  User ada\n",
    ],
)
async def test_connection_options_equal_those_of_asyncssh(home_with_keys: Path, settings: str) -> None:
    target = await resolve_target_of_gpu1(settings, home_with_keys)
    construct = asyncssh.SSHClientConnectionOptions.construct
    plain = await construct(host="gpu1", config=[str(home_with_keys / "config")])
    given = await construct(target.options, host="gpu1", config=None, **target.login_key_arguments)
    assert get_option_values_to_compare(given) == get_option_values_to_compare(plain)


async def test_missing_and_invalid_keys_are_skipped(home_with_keys: Path) -> None:
    (home_with_keys / "rubbish").write_text("hunter2")
    (home_with_keys / "folder").mkdir()
    names = ("missing", "rubbish", "folder", "rubbish/below", "one.cert", "one")
    files = "".join(f"  IdentityFile ~/.ssh/{name}\n" for name in names)
    target = await resolve_target_of_gpu1(f"{files}  CertificateFile ~/.ssh/missing.cert\n", home_with_keys)
    one = asyncssh.read_private_key(home_with_keys / "one").public_data
    assert [pair.public_data for pair in target.login_key_arguments["client_keys"]] == [one]
    assert target.login_key_arguments["agent_identities"] is None


@pytest.mark.parametrize("named", ["~/.ssh/missing", "~/.ssh/two", "none"])
@pytest.mark.parametrize("more", ["", "  IdentitiesOnly yes\n"])
async def test_default_keys_are_not_offered_with_identity_file(
    home_with_keys: Path, named: str, more: str
) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(home_with_keys / "id_ed25519")
    target = await resolve_target_of_gpu1(f"  IdentityFile {named}\n{more}", home_with_keys)
    given = await asyncssh.SSHClientConnectionOptions.construct(
        target.options, host="gpu1", config=None, **target.login_key_arguments
    )
    assert given.client_keys == []
    assert given.agent_path == str(home_with_keys.parent / "agent")


async def test_invalid_certificate_does_not_disable_its_key(home_with_keys: Path) -> None:
    asyncssh.read_private_key(home_with_keys / "one").write_public_key(home_with_keys / "other.pub")
    files = "".join(f"  CertificateFile ~/.ssh/{name}\n" for name in ("other.pub", "missing", "one.cert"))
    target = await resolve_target_of_gpu1(f"  IdentityFile ~/.ssh/one\n{files}", home_with_keys)
    one, certified = target.login_key_arguments["client_keys"]
    found = {one.public_data, certified.public_data}
    assert found == {
        asyncssh.read_private_key(home_with_keys / "one").public_data,
        asyncssh.read_certificate(home_with_keys / "one.cert").public_data,
    }


async def test_identities_only_limits_keys_of_the_agent(home_with_keys: Path) -> None:
    two = asyncssh.read_private_key(home_with_keys / "two", "word")
    two.write_public_key(home_with_keys / "two.pub")
    only = "  IdentitiesOnly yes\n"
    named = "".join(f"  IdentityFile ~/.ssh/{name}\n" for name in ("one", "two", "missing"))
    target = await resolve_target_of_gpu1(named + only, home_with_keys)
    one = asyncssh.read_private_key(home_with_keys / "one")
    assert target.login_key_arguments["agent_identities"] == [one.public_data, two.public_data]
    assert (
        await resolve_target_of_gpu1("  IdentityFile ~/.ssh/missing\n" + only, home_with_keys)
    ).login_key_arguments["agent_identities"] == [b""]
    (home_with_keys / "id_rsa.pub").write_bytes(two.export_public_key())
    assert (await resolve_target_of_gpu1(only, home_with_keys)).login_key_arguments["agent_identities"] == [
        two.public_data
    ]


async def test_rsa_keys_are_not_validated_for_every_node(
    home_with_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncssh.generate_private_key("ssh-rsa", key_size=2048).write_private_key(home_with_keys / "id_rsa")
    tested: list[bool] = []
    construct = RSAPrivateKey.construct

    def counted(*numbers: int) -> RSAPrivateKey:
        *_, skip = numbers
        tested.append(not skip)
        return construct(*numbers)

    monkeypatch.setattr(RSAPrivateKey, "construct", counted)
    target = await resolve_target_of_gpu1("  User ada\n", home_with_keys)
    assert len(target.login_key_arguments["client_keys"]) == 1
    await asyncssh.SSHClientConnectionOptions.construct(
        target.options, host="gpu1", config=None, **target.login_key_arguments
    )
    assert tested == [False]
