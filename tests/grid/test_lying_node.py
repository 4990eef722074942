"""A node that answers what it likes: its own failure, in words, and nobody else's."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from genie.errors import ProtocolError
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.bed import Bed, Node
from tests.grid.conftest import grid_file_of

_LIAR = """\
import json, sys
real = json.dumps
def lie(told):
    {body}
def dumps(told, **how):
    is_answer = isinstance(told, dict) and told.get("id") and ("ok" in told or "error" in told)
    found = lie(told) if is_answer else told
    return found if isinstance(found, str) else real(found, **how)
json.dumps = dumps
code, sys.argv = sys.argv[-1], ["-c"]
exec(code)
"""


def make_liar(node: Node, body: str) -> None:
    """From now on its python3 puts what `body` gives in the place of each answer `told`."""
    (node.folder / "liar.py").write_text(_LIAR.format(body=textwrap.indent(body, "    ").lstrip()))
    program = node.bin / "python3"
    program.write_text(f'#!/bin/sh\nexec /usr/bin/python3 {node.folder}/liar.py "$@"\n')
    program.chmod(0o755)


LIES = {
    "no_answer": "return {'id': told['id']}",
    "null": "return {'id': told['id'], 'ok': None}",
    "list": "return {'id': told['id'], 'ok': [1]}",
    "empty": "return {'id': told['id'], 'ok': {}}",
    "bad_error": "return {'id': told['id'], 'error': [1]}",
    "deep": "return '[' * 200000",
    "infinite": "return {'id': told['id'], 'ok': {key: 1e999 for key in told['ok']}}",
}


@pytest.mark.parametrize("lie", LIES)
async def test_its_runs_are_an_error_and_those_of_others_are_listed(own_bed: Bed, lie: str) -> None:
    make_liar(own_bed["gpu1"], LIES[lie])
    file = grid_file_of(own_bed, more="ssh: {timeout: 20, max_retries: 0}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        runner = Runner(pool, file)
        with pytest.raises(ProtocolError, match="gpu1"):
            await runner.start("gpu1", "true")
        run = await runner.start("gpu2", "echo hello")
        assert (await runner.find(run.run_id)).node == "gpu2"
        lying, honest = await runner.list_all()
        assert isinstance(lying.error, ProtocolError)
        assert [each.run_id for each in honest.runs] == [run.run_id]


@pytest.mark.parametrize("lie", LIES)
async def test_a_sync_reaches_the_other_nodes(own_bed: Bed, tmp_path: Path, lie: str) -> None:
    make_liar(own_bed["gpu1"], LIES[lie])
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("hello")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        lying, honest = await syncer.sync(tmp_path / "tree", ["gpu1", "gpu2"])
    assert isinstance(lying.error, ProtocolError)
    assert (honest.error, honest.sent_files) == (None, 1)


async def test_a_sync_takes_no_records_that_are_none(own_bed: Bed, tmp_path: Path) -> None:
    body = "if 'has_library' in told['ok']: told['ok'].update(digest='0' * 64, drift=1 << 50)\nreturn told"
    make_liar(own_bed["gpu1"], body)
    (tmp_path / "tree").mkdir()
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await syncer.sync(tmp_path / "tree", ["gpu1"])
    assert isinstance(report.error, ProtocolError)
    assert "bytes of records" in report.error.message


async def test_it_cannot_pass_off_a_run_for_another(own_bed: Bed) -> None:
    make_liar(own_bed["gpu1"], "if 'id' in told['ok']: told['ok']['id'] = 'r-zzzzzzzzzz'\nreturn told")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        with pytest.raises(ProtocolError, match="asked for run"):
            await Runner(pool, file).start("gpu1", "true")


async def test_it_is_not_found_by_ids_that_others_have(own_bed: Bed) -> None:
    told = "dict(id='r-zzzzzzzzzz', command='', state='running', started=1)"
    make_liar(own_bed["gpu1"], f"return {{'id': told['id'], 'ok': {{'runs': [{told}]}}}}")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        assert await Runner(pool, file).list("gpu1", prefix="r-aaaaaaaaaa") == ()


@pytest.mark.parametrize("command", ["false", "sleep 0.5; false"])
@pytest.mark.parametrize("code", [256, -1])
async def test_an_exit_code_that_cannot_be_is_no_success(own_bed: Bed, code: int, command: str) -> None:
    lie = f"if 'end' in one: one['exit_code'] = {code}"
    parts = "(told['ok'], told['ok'].get('first') or {})"
    make_liar(own_bed["gpu1"], f"for one in {parts}:\n  {lie}\nreturn told")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        runner = Runner(pool, file)
        with pytest.raises(ProtocolError, match="a code of"):
            await runner.wait(await runner.start("gpu1", command), lambda *_: None)


async def test_what_a_command_writes_has_a_bound(own_bed: Bed) -> None:
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool, pool.use("gpu1", bare=True) as link:
        with pytest.raises(ProtocolError, match="wrote more than"):
            await link.command("exec yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", timeout_s=60)
