"""The grid file: its keys and defaults, and the errors for invalid files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from genie.errors import ConfigError, NoNodeError
from genie.grid.grid_file import GridNode, parse_grid_file, parse_node, read_grid_file

FULL = """\
nodes:
  - gpu1
  - alice@gpu2:2222
  - name: gpu3
    user: bob
    port: 23
    weight: 2
    labels: {zone: a, kind: h100}
remote_root: /srv/grid/
ssh: {timeout: 1, connect_timeout: 2.5, max_retries: 0, pool_size: 30, key_file: ~/.ssh/grid}
health_check: {timeout: 4, max_workers: 50, cpu_weight: 0.5, gpu_weight: 2.0, refresh_interval: 0}
sync:
  exclude_patterns: [.git, venv]
  use_checksums: false
  follow_symlinks: true
  max_parallel_transfers: 7
ray: {dashboard_port: 9000, redis_port: 7000, head_bind_all: false, namespace: x, log_level: debug}
"""


def test_parse_reads_every_key() -> None:
    file = parse_grid_file(FULL, name="f.yaml")
    assert file.nodes == (
        GridNode(name="gpu1"),
        GridNode(name="gpu2", user="alice", port=2222),
        GridNode(name="gpu3", user="bob", port=23, weight=2.0, labels={"zone": "a", "kind": "h100"}),
    )
    assert file.remote_root == "/srv/grid"
    assert (file.ssh.connect_timeout, file.ssh.pool_size, file.ssh.key_file) == (2.5, 30, "~/.ssh/grid")
    assert (file.health_check.cpu_weight, file.health_check.refresh_interval) == (0.5, 0)
    assert file.sync.exclude_patterns == (".git", "venv")
    assert not file.sync.use_checksums
    assert file.sync.follow_symlinks
    assert (file.ray.redis_port, file.ray.head_bind_all, file.ray.log_level) == (7000, False, "debug")


def test_defaults_match_the_documentation() -> None:
    file = parse_grid_file("nodes: [gpu1]", name="f.yaml")
    assert file.remote_root == "~/grid_workspace"
    ssh, health, ray = file.ssh, file.health_check, file.ray
    assert (ssh.timeout, ssh.connect_timeout, ssh.max_retries, ssh.pool_size, ssh.key_file) == (
        10,
        5,
        3,
        10,
        None,
    )
    assert (health.timeout, health.max_workers, health.refresh_interval) == (3, 20, 60)
    assert (health.cpu_weight, health.gpu_weight) == (1.0, 3.0)
    assert file.sync.exclude_patterns == (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next")
    assert (file.sync.use_checksums, file.sync.follow_symlinks, file.sync.max_parallel_transfers) == (
        True,
        False,
        5,
    )
    assert (ray.dashboard_port, ray.redis_port, ray.head_bind_all) == (8265, 6379, None)
    assert (ray.namespace, ray.log_level) == ("default", "info")


def test_null_value_keeps_the_default() -> None:
    file = parse_grid_file("nodes: [gpu1]\nssh:\n  timeout:\n  key_file: null\nsync:\n", name="f.yaml")
    assert (file.ssh.timeout, file.ssh.key_file) == (10, None)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("nodes: [gpu1]\nssh:\n  timout: 3\n", 3, ["'timout'", "ssh", "did you mean timeout?"]),
        ("nodes: [gpu1]\nshs: {}\n", 2, ["'shs'", "did you mean ssh?"]),
        ("nodes: [gpu1]\nssh:\n  pool_size: 0\n", 3, ["ssh.pool_size = 0", "from 1 to 1024"]),
        ("nodes: [gpu1]\nssh:\n  pool_size: many\n", 3, ["'many'", "an integer"]),
        ("nodes: [gpu1]\nssh:\n  timeout: .nan\n", 3, ["'.nan'", "a number from"]),
        ("nodes: [gpu1]\nray:\n  log_level: loud\n", 3, ["'loud'", "allowed: debug, info, warning, error"]),
        ("nodes: [gpu1]\nsync:\n  use_checksums: 1\n", 3, ["use_checksums", "true or false"]),
        ("nodes: [gpu1]\nsync:\n  exclude_patterns: .git\n", 3, ["exclude_patterns", "list"]),
        ("nodes: [gpu1]\nssh: 3\n", 2, ["ssh", "name: value"]),
        ("nodes:\n  - gpu1\n  - gpu1\n", 3, ["'gpu1'", "line 2"]),
        ("nodes:\n  - -oProxyCommand=x\n", 2, ["-oProxyCommand=x", "not allowed"]),
        ("nodes:\n  - 'a; touch x'\n", 2, ["a; touch x", "not allowed"]),
        ("nodes:\n  - ../../etc/x\n", 2, ["../../etc/x"]),
        ("nodes:\n  - a..b\n", 2, ["a..b"]),
        ("nodes:\n  - -x@gpu1\n", 2, ["node.user = '-x'"]),
        ("nodes:\n  - gpu1:99999\n", 2, ["'99999'", "1 to 65535"]),
        ("nodes:\n  - gpu1:+22\n", 2, ["'gpu1:+22'", "USER@NAME:PORT"]),
        ("nodes: [gpu1]\nssh:\n  timeout: {a: 1}\n", 3, ["ssh.timeout", "a number from 0.1"]),
        ("nodes:\n  - {name: gpu1, user: 'a b'}\n", 2, ["node.user = 'a b'"]),
        ("nodes:\n  - {name: gpu1, wieght: 2}\n", 2, ["'wieght'", "did you mean weight?"]),
        ("nodes:\n  - {name: gpu1, labels: {zone: 'a b'}}\n", 2, ["node.labels", "'a b'", "1 to 63 letters"]),
        ("nodes:\n  - {user: bob}\n", 2, ["no 'name'"]),
        ("nodes: gpu1\n", 1, ["nodes", "list"]),
        ("nodes: []\n", 1, ["nodes", "empty"]),
        ("nodes: [gpu1]\nremote_root: ../x\n", 2, ["remote_root", "'../x'"]),
        ("nodes: [gpu1]\nremote_root: ~/a/../../b\n", 2, ["remote_root", "without '..'"]),
        ("nodes: [gpu1]\nssh: {timeout: 1, timeout: 2}\n", 2, ["'timeout'", "twice"]),
        ("nodes: [gpu1\n", 2, ["invalid YAML"]),
        ("nodes: !!python/object/apply:os.system ['true']\n", 1, ["not allowed"]),
    ],
)
def test_error_names_the_line_and_the_value(text: str, line: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_grid_file(text, name="f.yaml")
    assert re.search(rf"f\.yaml:{line}\b", str(caught.value))
    for word in words:
        assert word in str(caught.value)


def test_error_for_a_label_names_its_line() -> None:
    text = "nodes:\n  - name: gpu1\n    labels:\n      zone: a\n      kind: a b\n"
    with pytest.raises(ConfigError, match=r"node\.labels = \{'kind': 'a b'\} \(f\.yaml:5\)"):
        parse_grid_file(text, name="f.yaml")


def test_values_are_converted_like_other_settings() -> None:
    text = "nodes: [gpu1]\nssh: {pool_size: '30'}\nray: {log_level: Debug, namespace: 5}\n"
    file = parse_grid_file(text, name="f.yaml")
    assert (file.ssh.pool_size, file.ray.log_level, file.ray.namespace) == (30, "debug", "5")


def test_missing_file_error_names_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grid-cli config init"):
        read_grid_file(tmp_path / "none.yaml")


def test_file_without_nodes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("remote_root: ~/x\n")
    with pytest.raises(ConfigError, match="has no 'nodes'"):
        read_grid_file(path)


def test_unknown_node_error_suggests_the_nearest_name() -> None:
    file = parse_grid_file("nodes: [gpu1, gpu2]", name="f.yaml")
    with pytest.raises(NoNodeError, match="did you mean gpu1"):
        file.node("gqu1")


def test_unknown_node_error_suggests_all_equally_near_names() -> None:
    file = parse_grid_file("nodes: [gpu2, gpu1, far]", name="f.yaml")
    with pytest.raises(NoNodeError, match=r"did you mean gpu2 or gpu1\?"):
        file.node("gpux")
    file = parse_grid_file("nodes: [gpu1, gpu2, gpu3, gpu4]", name="f.yaml")
    with pytest.raises(NoNodeError, match="nodes: gpu1, gpu2, gpu3, gpu4"):
        file.node("gpux")


def test_parse_node_reads_user_and_port() -> None:
    assert parse_node("bob@gpu1:2200") == GridNode(name="gpu1", user="bob", port=2200)


def test_nested_yaml_aliases_are_rejected() -> None:
    text = "a: &a [x]\n"
    for before, name in zip("abcd", "bcde", strict=True):
        text += f"{name}: &{name} [{', '.join([f'*{before}'] * 500)}]\n"
    with pytest.raises(ConfigError):
        parse_grid_file(text, name="f.yaml")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("nodes:\n\t- gpu1\n", "does not allow tabs"),
        ("nodes: [gpu1]\nsync:\n  exclude_patterns: [*.pyc]\n", "in quotes, as in '*.pyc'"),
        ("nodes: [gpu1]\nsync:\n  exclude_patterns: [*pyc]\n", "in quotes, as in '*.pyc'"),
        ("nodes:\n  - gpu1\n ssh:\n", "in the same column"),
        ("nodes:\n  - gpu1\nremote_root '/x'\n", "': ' follows a key"),
        ('nodes:\n  - "gpu1\n', "quotes and brackets are closed"),
    ],
)
def test_invalid_yaml_error_has_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="invalid YAML") as caught:
        parse_grid_file(text, name="grid.yaml")
    assert hint in caught.value.hint
