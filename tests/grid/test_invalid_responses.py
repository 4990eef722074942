"""Nodes that send invalid responses: an error for that node only."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from genie.errors import ProtocolError
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshNode, SshTestbed

_TAMPER = """\
import json, sys
real = json.dumps
def tamper(answer):
    {body}
def dumps(value, **options):
    is_answer = isinstance(value, dict) and value.get("id") and ("ok" in value or "error" in value)
    found = tamper(value) if is_answer else value
    return found if isinstance(found, str) else real(found, **options)
json.dumps = dumps
code, sys.argv = sys.argv[-1], ["-c"]
exec(code)
"""


def tamper_with_responses(node: SshNode, body: str) -> None:
    """Make the node's python3 replace each response `answer` by the return value of `body`."""
    (node.folder / "tamper.py").write_text(_TAMPER.format(body=textwrap.indent(body, "    ").lstrip()))
    program = node.bin / "python3"
    program.write_text(f'#!/bin/sh\nexec /usr/bin/python3 {node.folder}/tamper.py "$@"\n')
    program.chmod(0o755)


INVALID = {
    "no_answer": "return {'id': answer['id']}",
    "null": "return {'id': answer['id'], 'ok': None}",
    "list": "return {'id': answer['id'], 'ok': [1]}",
    "empty": "return {'id': answer['id'], 'ok': {}}",
    "bad_error": "return {'id': answer['id'], 'error': [1]}",
    "deep": "return '[' * 200000",
    "infinite": "return {'id': answer['id'], 'ok': {key: 1e999 for key in answer['ok']}}",
}


@pytest.mark.parametrize("kind", INVALID)
async def test_invalid_response_fails_only_that_nodes_runs(own_testbed: SshTestbed, kind: str) -> None:
    tamper_with_responses(own_testbed["gpu1"], INVALID[kind])
    file = make_testbed_grid_file(own_testbed, more="ssh: {timeout: 20, max_retries: 0}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        runner = Runner(pool, file)
        with pytest.raises(ProtocolError, match="gpu1"):
            await runner.start("gpu1", "true")
        run = await runner.start("gpu2", "echo hello")
        assert (await runner.fetch_run_by_prefix(run.run_id)).node == "gpu2"
        invalid, valid = await runner.list_runs_on_nodes()
        assert isinstance(invalid.error, ProtocolError)
        assert [each.run_id for each in valid.runs] == [run.run_id]


@pytest.mark.parametrize("kind", INVALID)
async def test_invalid_response_fails_only_that_nodes_sync(
    own_testbed: SshTestbed, tmp_path: Path, kind: str
) -> None:
    tamper_with_responses(own_testbed["gpu1"], INVALID[kind])
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("hello")
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        invalid, valid = await syncer.sync(tmp_path / "tree", ["gpu1", "gpu2"])
    assert isinstance(invalid.error, ProtocolError)
    assert (valid.error, valid.sent_files) == (None, 1)


async def test_sync_rejects_excessive_record_size(own_testbed: SshTestbed, tmp_path: Path) -> None:
    body = (
        "if 'has_library' in answer['ok']: answer['ok'].update(digest='0' * 64, drift=1 << 50)\nreturn answer"
    )
    tamper_with_responses(own_testbed["gpu1"], body)
    (tmp_path / "tree").mkdir()
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await syncer.sync(tmp_path / "tree", ["gpu1"])
    assert isinstance(report.error, ProtocolError)
    assert "invalid size of the records" in report.error.message


async def test_response_with_another_run_id_is_rejected(own_testbed: SshTestbed) -> None:
    tamper_with_responses(
        own_testbed["gpu1"], "if 'id' in answer['ok']: answer['ok']['id'] = 'r-zzzzzzzzzz'\nreturn answer"
    )
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(ProtocolError, match="requested run"):
            await Runner(pool, file).start("gpu1", "true")


async def test_listed_runs_without_the_requested_prefix_are_ignored(own_testbed: SshTestbed) -> None:
    run = "dict(id='r-zzzzzzzzzz', command='', state='running', started=1)"
    tamper_with_responses(own_testbed["gpu1"], f"return {{'id': answer['id'], 'ok': {{'runs': [{run}]}}}}")
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        assert await Runner(pool, file).list_runs("gpu1", prefix="r-aaaaaaaaaa") == ()


@pytest.mark.parametrize("command", ["false", "sleep 0.5; false"])
@pytest.mark.parametrize("code", [256, -1])
async def test_invalid_exit_code_is_rejected(own_testbed: SshTestbed, code: int, command: str) -> None:
    change = f"if 'end' in one: one['exit_code'] = {code}"
    parts = "(answer['ok'], answer['ok'].get('first') or {})"
    tamper_with_responses(own_testbed["gpu1"], f"for one in {parts}:\n  {change}\nreturn answer")
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        runner = Runner(pool, file)
        with pytest.raises(ProtocolError, match="invalid exit code"):
            await runner.follow_until_end(await runner.start("gpu1", command), lambda *_: None)


async def test_command_output_is_limited(own_testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(own_testbed)
    async with (
        SshPool(file, ssh_config=own_testbed.ssh_config) as pool,
        pool.connect("gpu1", without_helper=True) as link,
    ):
        with pytest.raises(ProtocolError, match="wrote more than"):
            await link.run_command(
                "exec yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", timeout_s=60
            )
