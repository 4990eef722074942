"""Records what this release writes: `python -m tests.model.record_formats` replaces the recording of this
release in tests/model/recorded/. Recordings of earlier releases stay: later ones must read them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from genie.agent.identity import write_controller_addresses
from genie.agent.journal import JobRecord, Journal
from genie.agent.launcher import LaunchPlan, encode_plan
from genie.controller.backups.backup_file import BackupHeader, BackupWriter, encode_rows
from genie.controller.election import Election, LeaderRecord, StoreHealth
from genie.controller.ledger import Ledger, LedgerTable
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX, ServerRelease
from genie.controller.store import KeyValue, Store
from genie.model.job import JobKind
from genie.model.messages import ExitReport, Message, Report, Request
from genie.processes.clock import SystemClock
from genie.processes.process_identity import ProcessIdentity
from genie.runtime import device_protocol, wire
from genie.runtime.credentials import LocalCluster
from genie.runtime.known_servers import store_known_servers
from genie.supervisor.process_records import ProcessRecord
from genie.version import __version__
from tests.model.sample_values import make_sample

RECORDED_DIRECTORY = Path(__file__).parent / "recorded"
CALL_ID = 7
PIN = "0" * 16
SERVERS = (("10.0.0.1", 5555), ("10.0.0.2", 5556))
BACKUP_ROWS = (("job/j1", b"{}"), ("token/t1", b'{"a":1}'))
DEVICE_MESSAGES = (
    device_protocol.Open,
    device_protocol.Opened,
    device_protocol.Fetch,
    device_protocol.Fetched,
    device_protocol.Error,
)


def list_message_types() -> list[type[Message]]:
    """All types of messages between controllers, agents and clients."""
    found: list[type[Message]] = [Message]
    for kind in found:
        found.extend(kind.__subclasses__())
    return sorted(
        (kind for kind in found if kind not in (Message, Request, Report)), key=lambda kind: kind.__name__
    )


def list_row_types() -> dict[str, type[msgspec.Struct]]:
    """The type of the rows under each prefix of keys in the store."""
    store: Store = None  # type: ignore[assignment]  # not used
    election = Election(store, clock=SystemClock(), name="one", ttl_s=1.0, health=StoreHealth())
    ledger = Ledger(store, election, StoreHealth())
    tables = [table for table in vars(ledger).values() if isinstance(table, LedgerTable)]
    return {
        **{table.prefix: table.kind for table in tables},
        "leader": LeaderRecord,
        SERVER_RELEASE_KEY_PREFIX: ServerRelease,
    }


def record_frames() -> dict[str, dict[str, object]]:
    recorded: dict[str, dict[str, object]] = {}
    for kind in list_message_types():
        sample = make_sample(kind)
        frame_kind = wire.FrameKind.REQUEST if issubclass(kind, Request) else wire.FrameKind.REPLY
        frame = wire.pack_frame(frame_kind, CALL_ID, wire.encode_message(sample))
        recorded[kind.__name__] = {"frame": frame.hex(), "fields": msgspec.to_builtins(sample)}
    return recorded


def record_device_messages() -> dict[str, dict[str, object]]:
    recorded: dict[str, dict[str, object]] = {
        "preface": {"frame": device_protocol.make_preface().hex()},
        "preface of the control plane": {"frame": wire.make_preface().hex()},
    }
    for kind in DEVICE_MESSAGES:
        sample = make_sample(kind)
        recorded[kind.__name__] = {
            "frame": device_protocol.encode(sample).hex(),
            "fields": msgspec.to_builtins(sample),
        }
    return recorded


def record_rows() -> dict[str, dict[str, object]]:
    recorded: dict[str, dict[str, object]] = {}
    for prefix, kind in list_row_types().items():
        sample = make_sample(kind)
        recorded[prefix] = {
            "row": msgspec.json.encode(sample).decode(),
            "fields": msgspec.to_builtins(sample),
        }
    return recorded


def make_sample_plan() -> LaunchPlan:
    """A prepared launch, which the next agent of the node starts."""
    record = JobRecord(
        job_id="j-2",
        epoch=6,
        incarnation=3,
        accepted_at=1002.5,
        gpu_ids=(1,),
        tenant="red",
        gpu_milli=500,
        kind=JobKind.SESSION,
        has_deadman_timer=False,
        boot_id="boot-1",
    )
    return LaunchPlan(
        job_id="j-2",
        epoch=6,
        argv=("python", "train.py"),
        env={"A": "1"},
        directory=Path("/state/jobs/j-2"),
        work_dir=Path("/state/jobs/j-2/work"),
        log_file_bytes_max=4096,
        log_files_max=3,
        grace_s=5.0,
        deadman_grace_s=1.5,
        has_deadman_timer=False,
        record=record,
        socket_path=Path("/state/shims/j-2.6"),
        prepared_path=Path("/state/prepared/j-2.6"),
    )


def write_files(directory: Path) -> None:
    """The files that programs of other releases may read, with fixed values."""
    node = directory / "node"
    journal = Journal(node)
    journal.open()
    try:
        for _ in range(3):
            journal.begin_incarnation()
        journal.accept_leader_token_and_check_new(41, message_name="a registration")
        journal.record_registration("10.0.0.1:5555", registered_at=1000.5)
        journal.record_launch(
            JobRecord(job_id="j-1", epoch=5, incarnation=3, accepted_at=1001.5, gpu_ids=(0, 2))
        )
        plan = make_sample_plan()
        assert plan.record is not None
        journal.record_launch(plan.record)
        journal.store_prepared_launch(plan.record, encode_plan(plan))
        journal.write_exit_record(make_sample_exit())
    finally:
        journal.close()
    write_controller_addresses(node, SERVERS)
    store_known_servers(directory, PIN, SERVERS)
    LocalCluster(host="10.0.0.1", port=5555, cluster_id="c1").write(directory)
    identity = ProcessIdentity(4711, "boot-1/12345")
    ProcessRecord(name="agent", identity=identity, ready=True, node_id="n1").write(directory)
    writer = BackupWriter(directory / "backup")
    writer.write(encode_rows(KeyValue(key, value, 1, 1) for key, value in BACKUP_ROWS))
    header = BackupHeader(
        cluster_id="c1", generation=2, revision=9, created_at=1002.5, genie_version=__version__
    )
    writer.finish(header, row_count=len(BACKUP_ROWS))


def make_sample_exit() -> ExitReport:
    return ExitReport(
        job_id="j-1",
        epoch=5,
        exit_code=3,
        reason="exit code 3",
        ended_at=1003.5,
        is_caused_by_node=True,
        needed_disk_bytes=77,
    )


def record_all(directory: Path) -> None:
    for name, recorded in (
        ("messages", record_frames()),
        ("executor_handshake", record_device_messages()),
        ("rows", record_rows()),
    ):
        text = json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True)
        (directory / f"{name}.json").write_text(text + "\n", "utf-8")
    with tempfile.TemporaryDirectory() as written:
        write_files(Path(written))
        contents = {
            path: (Path(written) / path).read_bytes().hex() for path in list_written_files(Path(written))
        }
        (directory / "files.json").write_text(json.dumps(contents, indent=1, sort_keys=True) + "\n", "utf-8")


def list_written_files(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if path.name != "agent.lock":
                yield str(path.relative_to(directory))


if __name__ == "__main__":
    release_directory = RECORDED_DIRECTORY / __version__
    release_directory.mkdir(parents=True, exist_ok=True)
    record_all(release_directory)
    print(f"recorded {release_directory}")
