"""~/.ssh/config without the blocks of other hosts is equivalent."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import asyncssh
import pytest

from genie.errors import UsageError
from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh.config import open_config_for_host, strip_other_hosts
from genie.grid.ssh.target import KnownHostsCache, resolve_ssh_target

HOSTS = ["gpu1", "GPU1", "gpu2", "10.0.0.7"]
HEADS = [
    *("Host gpu1", "host gpu1 gpu2", "HOST\tgpu2", " Host GPU1", "Host 10.0.0.7", "Host gpu1 # no comment"),
    *("Host *", "Host gpu*", "Host gpu? x", "Host * !gpu1", "Host a,gpu1", 'Host "gpu1"', "Host=gpu2"),
    *(
        "H\\ost gpu2",
        '"Host" gpu1',
        "Ho\u017ft gpu2",
        "Hosts gpu2",
        "Host\vgpu2",
        "Host other",
        "Host no one",
    ),
    *("Match all", "match originalhost gpu*", "Match host gpu1", 'Match user "ada"', "Match final"),
    *("Match=all", "Host = gpu1"),
]
LINES = [
    *("User ada", "User=bob", 'User "a b"', "user eve", "\tUser\tann", "User x#y"),
    *("HostName 10.0.0.7", "HostName %h.org", "Port 22", "Port=23", "Port = 24", "Port\t25", "  Port 26  "),
    *("IdentityFile ~/.ssh/a", "IdentityFile ~/.ssh/%n", "identityfile b", "IdentityFile 'c d'"),
    *("Include more", "include no-such-*", 'Include "other"', "Include other more"),
    *("ProxyCommand ssh -W '%h:%p' x", "ProxyJump gpu2", "Tag blue", "SetEnv A=1 B=2", "Compression yes"),
    *("", "  ", "# Host gpu1", "#'", "Nonsense yes", "Nonsense", "CanonicalizeHostname yes", "\x0cTag red"),
]
WRONG = [
    *("Host", "Match", "Match !", "Match host", "=", "User 'open", "Nonsense 'open", "User \\", "Port"),
    *("Port x", "User a b", "HostName %", "ProxyCommand it's", "= x", "\ufeffUser eve", "Host\u00a0gpu1"),
    "Compression maybe",
]


def make_random_config(dice: random.Random) -> str:
    """Mostly valid: after an error, nothing more is read."""
    lines = dice.choices(LINES, k=dice.randrange(3))
    for _ in range(dice.randrange(1, 8)):
        lines += [dice.choice(HEADS), *dice.choices(LINES, k=dice.randrange(4))]
    if dice.random() < 0.2:
        lines.insert(dice.randrange(len(lines) + 1), dice.choice(WRONG))
    return dice.choice(["\n", "\n", "\r\n", "\r"]).join(lines) + dice.choice(["\n", ""])


OPTIONS = [
    *("User", "Hostname", "Port", "IdentityFile", "ProxyCommand", "ProxyJump", "Tag", "SetEnv"),
    *("CanonicalizeHostname", "Compression"),
]


def parse_host_settings(path: Path, host: str) -> object:
    """Returns all settings for a host, or the error."""
    try:
        options = asyncssh.SSHClientConnectionOptions(config=[str(path)], host=host, client_keys=None)
    except (ValueError, IndexError, asyncssh.Error) as error:
        return type(error), str(error).replace(str(path), "FILE")
    config = options.config
    return [config.get(name) for name in OPTIONS], config.has_match_final(), options.host, options.port


@pytest.mark.parametrize("seed", range(3))
def test_stripped_config_is_equivalent_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    dice = random.Random(seed)
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "other").write_text("Host gpu1\nUser eve\n")
    whole = folder / "config"
    shorter = 0
    for _ in range(150):
        (folder / "more").write_text(make_random_config(dice).replace("nclude", "ncluded"), newline="")
        whole.write_text(make_random_config(dice), newline="")
        host = dice.choice(HOSTS)
        with open_config_for_host(host, whole) as short:
            assert parse_host_settings(short, host) == parse_host_settings(whole, host), (
                host,
                whole.read_text(),
            )
            shorter += short != whole
    assert shorter > 20


def test_blocks_of_other_hosts_become_empty_lines() -> None:
    text = "User ada\nHost gpu1 x\n  Port 1\nHost gpu2\n  Port 2\nHost *\n  Port 3\nHost gpu3\n  User 'it'\n"
    kept = text.replace("Host gpu2\n  Port 2\n", "\n\n")
    assert strip_other_hosts(text, "gpu1") == kept
    assert strip_other_hosts(text, "GPU2") == text.replace("Host gpu1 x\n  Port 1\n", "\n\n")


def test_stripped_config_is_temporary_and_only_made_if_shorter(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "config"
    whole.write_text("Host a\nPort 1\n")
    with open_config_for_host("a", whole) as short:
        assert short == whole
    with open_config_for_host("b", whole) as short:
        assert short != whole and short.read_text() == "\n\n"
    assert not short.exists() and not short.parent.exists()
    whole.write_bytes(b"Host a\n# \xff\n")
    with open_config_for_host("b", whole) as short:
        assert short == whole


def test_original_config_is_used_if_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "config"
    whole.write_text("Host a\nPort 1\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with open_config_for_host("b", whole) as short:
        assert short == whole


async def test_error_names_the_original_file_and_line(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu2\n  Port 1\nHost gpu1\n  Port many\n")
    file = parse_grid_file("nodes: [gpu1, gpu2]\n", name="grid.yaml")
    with pytest.raises(UsageError, match=f"{config} line 4: Invalid Port"):
        await resolve_ssh_target(file.nodes[0], file, config, trusted=KnownHostsCache())
    assert (await resolve_ssh_target(file.nodes[1], file, config, trusted=KnownHostsCache())).port == 1
