"""Recorded rows, frames and files of each release are read, and what this release writes is recorded.

`tests/model/recorded/RELEASE/` is what that release wrote (tests/model/record_formats.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from genie.agent.identity import read_controller_addresses
from genie.agent.journal import JobRecord, Journal
from genie.agent.launcher import try_decode_plan
from genie.controller.backups.backup_file import BackupReader
from genie.controller.ledger import LedgerTable
from genie.controller.rows import ClusterRecord
from genie.model.messages import Message, Request
from genie.processes.process_identity import ProcessIdentity
from genie.runtime import device_protocol, wire
from genie.runtime.credentials import LocalCluster
from genie.runtime.known_servers import read_known_servers
from genie.supervisor.process_records import read_process_record
from genie.version import __version__
from tests.model.record_formats import (
    BACKUP_ROWS,
    CALL_ID,
    DEVICE_MESSAGES,
    PIN,
    RECORDED_DIRECTORY,
    SERVERS,
    list_message_types,
    list_row_types,
    list_written_files,
    make_sample_exit,
    make_sample_plan,
    record_all,
    write_files,
)

RELEASES = sorted(path.name for path in RECORDED_DIRECTORY.iterdir())
ENCODED_DIFFERENTLY: dict[tuple[str, str], str] = {}
"""Release and type whose recording this release encodes in other bytes: the reason."""
NO_LONGER_READ: dict[tuple[str, str], str] = {}
"""Release and type that this release does not have any more: the reason."""
MESSAGE_TYPES = {kind.__name__: kind for kind in list_message_types()}
ROW_TYPES = list_row_types()


def read_recording(release: str, name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        (RECORDED_DIRECTORY / release / f"{name}.json").read_text("utf-8")
    )
    return found


def fields_of(value: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(value))


def decode_message(frame: bytes, kind: type[Message]) -> Message:
    length, frame_kind, call_id = wire.unpack_header(frame, frame_bytes_max=wire.FRAME_BYTES_MAX, peer="x")
    payload = frame[wire.HEADER_BYTES :]
    assert (length, call_id) == (len(payload), CALL_ID)
    if issubclass(kind, Request):
        assert frame_kind is wire.FrameKind.REQUEST
        return wire.RequestDecoder((kind,)).decode(payload, peer="x")
    assert frame_kind is wire.FrameKind.REPLY
    return wire.decode_reply(kind, payload, peer="x")


def test_what_this_release_writes_is_recorded(tmp_path: Path) -> None:
    record_all(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        recorded = RECORDED_DIRECTORY / __version__ / path.name
        assert recorded.exists() and recorded.read_text("utf-8") == path.read_text("utf-8"), (
            f"{path.name} has changed: run 'python -m tests.model.record_formats', and check that releases "
            "one minor version apart can read it (docs/decisions/0029-version-skew.md)"
        )


def test_every_message_and_row_is_recorded() -> None:
    assert read_recording(__version__, "messages").keys() == MESSAGE_TYPES.keys()
    assert read_recording(__version__, "rows").keys() == ROW_TYPES.keys()
    names = {kind.__name__ for kind in DEVICE_MESSAGES}
    assert names < read_recording(__version__, "executor_handshake").keys()


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_messages_are_read(release: str) -> None:
    for name, recorded in read_recording(release, "messages").items():
        if (release, name) in NO_LONGER_READ:
            continue
        frame = bytes.fromhex(recorded["frame"])
        message = decode_message(frame, MESSAGE_TYPES[name])
        assert fields_of(message) == recorded["fields"], name
        if (release, name) not in ENCODED_DIFFERENTLY:
            assert wire.encode_message(message) == frame[wire.HEADER_BYTES :], name


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_rows_are_read(release: str) -> None:
    for prefix, recorded in read_recording(release, "rows").items():
        if (release, prefix) in NO_LONGER_READ:
            continue
        row = LedgerTable(prefix, ROW_TYPES[prefix]).decode("", recorded["row"].encode())
        assert fields_of(row) == recorded["fields"], prefix
        if (release, prefix) not in ENCODED_DIFFERENTLY:
            assert msgspec.json.encode(row).decode() == recorded["row"], prefix


def structs_in(node: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The types of structs in a type, itself included."""
    if isinstance(node, inspect.StructType):
        yield node.cls
        inner = [field.type for field in node.fields]
    else:
        named = (getattr(node, name, None) for name in ("type", "item_type", "key_type", "value_type"))
        inner = [each for each in named if isinstance(each, inspect.Type)]
        inner += [*getattr(node, "types", ()), *getattr(node, "item_types", ())]
    for each in inner:
        yield from structs_in(each)


@pytest.mark.parametrize("prefix", sorted(ROW_TYPES))
def test_rows_are_stored_without_fields_that_have_their_default(prefix: str) -> None:
    """A new field that is not used must not be in the row: an older server would reject the whole row."""
    for kind in structs_in(inspect.type_info(ROW_TYPES[prefix])):
        assert kind.__struct_config__.omit_defaults, f"{kind.__name__} is not a Record: {prefix}"


def test_row_of_a_new_cluster_has_only_what_is_set() -> None:
    record = ClusterRecord(cluster_id="c1", ca_pin="p")
    assert json.loads(msgspec.json.encode(record)) == {"cluster_id": "c1", "ca_pin": "p"}


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_handshakes_are_read(release: str) -> None:
    recorded = read_recording(release, "executor_handshake")
    device_protocol.choose_version(bytes.fromhex(recorded["preface"]["frame"]), peer="x")
    wire.choose_version(bytes.fromhex(recorded["preface of the control plane"]["frame"]), peer="x")
    for kind in DEVICE_MESSAGES:
        frame, fields = (recorded[kind.__name__][part] for part in ("frame", "fields"))
        message = msgspec.msgpack.decode(bytes.fromhex(frame)[4:], type=kind)
        assert fields_of(message)[: len(fields)] == fields
        if (release, kind.__name__) not in ENCODED_DIFFERENTLY:
            assert device_protocol.encode(message).hex() == frame


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_files_are_read(release: str, tmp_path: Path) -> None:
    for name, contents in read_recording(release, "files").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(str(contents)))
    assert read_known_servers(tmp_path, PIN) == SERVERS
    assert LocalCluster.read(tmp_path) == LocalCluster(host="10.0.0.1", port=5555, cluster_id="c1")
    assert read_controller_addresses(tmp_path / "node") == SERVERS
    journal = Journal(tmp_path / "node")
    journal.open()
    try:
        assert (journal.incarnation, journal.leader_token) == (3, 41)
        assert journal.read_job_record("j-1") == JobRecord(
            job_id="j-1", epoch=5, incarnation=3, accepted_at=1001.5, gpu_ids=(0, 2)
        )
        assert journal.unsettled_exits() == {"j-1": make_sample_exit()}
        plan = make_sample_plan()
        ((record, body),) = journal.take_prepared_launches(boot_id="boot-1")
        assert (record, try_decode_plan(body)) == (plan.record, plan)
    finally:
        journal.close()
    backup = BackupReader(tmp_path / "backup")
    backup.verify()
    assert tuple(backup.rows()) == BACKUP_ROWS
    assert (backup.header.cluster_id, backup.header.generation, backup.header.revision) == ("c1", 2, 9)
    check_process_record_of_running_process_is_read(tmp_path)


def check_process_record_of_running_process_is_read(directory: Path) -> None:
    """The recorded process has ended, so its numbers are replaced by those of this one."""
    identity = ProcessIdentity.of_pid(os.getpid())
    assert identity is not None
    path = directory / "run" / "agent.json"
    assert read_process_record(directory, "agent") is None
    path.write_text(
        path.read_text().replace("4711", str(identity.pid)).replace("boot-1/12345", identity.start_mark)
    )
    record = read_process_record(directory, "agent")
    assert record is not None
    assert (record.identity, record.ready, record.node_id) == (identity, True, "n1")


def test_files_of_a_newer_release_are_read_without_their_new_fields(tmp_path: Path) -> None:
    write_files(tmp_path)
    for name in list_written_files(tmp_path):
        path = tmp_path / name
        if path.suffix == ".json" and path.read_bytes().startswith(b"{"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "orbit": "low"}))
    journal = Journal(tmp_path / "node")
    journal.open()
    try:
        assert journal.leader_token == 41
        assert journal.read_job_record("j-1") is not None
        assert journal.unsettled_exits() == {"j-1": make_sample_exit()}
        plan = make_sample_plan()
        ((record, body),) = journal.take_prepared_launches(boot_id="boot-1")
        assert (record, try_decode_plan(body)) == (plan.record, plan)
    finally:
        journal.close()
    assert LocalCluster.read(tmp_path) is not None
    check_process_record_of_running_process_is_read(tmp_path)
