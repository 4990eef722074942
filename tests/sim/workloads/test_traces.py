"""Reading of traces; errors name the line and the allowed values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genie.errors import UsageError
from genie.sim.workloads import traces
from genie.sim.workloads.traces import TraceJob, TraceNode, TracePod

PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
JOBS = "timestamp,duration,num_gpus,gpu_time,cluster\n"


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(text, "utf-8")
        return path

    return write


def test_nodes_of_a_trace_are_read(write_trace: Callable[[str], Path]) -> None:
    assert traces.read_openb_nodes(write_trace(NODES + "n0,64000,262144,2,P100\n")) == [
        TraceNode("n0", 64000, 262144, 2, "P100")
    ]


def test_pods_with_gpu_models_are_read(write_trace: Callable[[str], Path]) -> None:
    text = PODS + "p0,12000,16384,1,460,\np1,1000,2000,8,1000,T4|A10|T4\np2,500,100,0,1000,T4\n"
    assert traces.read_openb_pods(write_trace(text)) == [
        TracePod(12000, 16384, 1, 460, ()),
        TracePod(1000, 2000, 8, 1000, ("T4", "A10", "T4")),
        TracePod(500, 100, 0, 0, ()),  # no GPU share and no model without GPUs
    ]


def test_pods_without_gpu_models_are_read(write_trace: Callable[[str], Path]) -> None:
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,1,2,1,1000\n"
    assert traces.read_openb_pods(write_trace(text)) == [TracePod(1, 2, 1, 1000, ())]


def test_jobs_of_a_trace_are_read(write_trace: Callable[[str], Path]) -> None:
    text = JOBS + "1970-01-02 00:00:41,2240.5,8,17924.0,7f04ca\n"
    assert traces.read_philly_trace(write_trace(text)) == [TraceJob(86441.0, 2240.5, 8, "7f04ca")]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (
            "read_openb_pods",
            PODS + "p0,1,2,1,1000,\np1,x,2,1,1000,\n",
            r"csv:3: cpu_milli is 'x'; .* integer from 0",
        ),
        ("read_openb_pods", PODS + "p0,-1,2,1,1000,\n", "cpu_milli is '-1'"),
        (
            "read_openb_pods",
            PODS + "p0,1,2,17,1000,\n",
            "num_gpu is '17'; it must be an integer from 0 to 16",
        ),
        (
            "read_openb_pods",
            PODS + "p0,1,2,1,1001,\n",
            "gpu_milli is '1001'; it must be an integer from 0 to 1000",
        ),
        (
            "read_openb_pods",
            PODS + "p0,1,2,2,500,\n",
            "gpu_milli is '500'; it must be 1 to 1000 for one GPU, or 1000",
        ),
        ("read_openb_pods", PODS + "p0,1,2,1,0,\n", "gpu_milli is '0'"),
        ("read_openb_pods", PODS + "p0,1,2,1\n", "csv:2: wrong number of columns; expected 6"),
        ("read_openb_pods", PODS + "p0,1,2,1,1000,,more\n", "csv:2: wrong number of columns; expected 6"),
        ("read_openb_pods", "name,cpu_milli\n", "csv:1: missing column 'gpu_milli'"),
        ("read_openb_nodes", NODES + "n0,1,2,,P100\n", "csv:2: gpu is ''"),
        (
            "read_philly_trace",
            JOBS + "yesterday,1,1,1,a\n",
            "timestamp is 'yesterday'; it must be a time like",
        ),
        ("read_philly_trace", JOBS + "2017-09-04 10:30:41,nan,1,1,a\n", "duration is 'nan'; .* seconds >= 0"),
    ],
)
def test_invalid_line_is_named(
    write_trace: Callable[[str], Path], read: str, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        getattr(traces, read)(write_trace(text))


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("absent.csv", r"no such trace file: '.*absent\.csv'", "check the path"),
        ("binary.csv/under", r"no such trace file: '.*under'", "check the path"),
        ("folder", r"trace '.*folder' is a directory", "one of its CSV files"),
        ("binary.csv", r"could not read trace '.*': not UTF-8 text", "uncompressed"),
        ("endless.csv", r"could not read trace '.*': field larger than field limit", "give a CSV file"),
        ("loop.csv", r"could not read trace '.*': too many levels of symbolic links", "readable file"),
    ],
)
def test_unreadable_file_is_named_with_a_hint(tmp_path: Path, name: str, message: str, hint: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.csv").write_bytes(b"\x1f\x8b\x08\xff")
    (tmp_path / "endless.csv").write_text("x" * 200_000, "utf-8")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    with pytest.raises(UsageError, match=message) as caught:
        traces.read_openb_nodes(tmp_path / name)
    assert hint in (caught.value.hint or "")


def test_workloads_of_a_directory_are_found_by_file_name(tmp_path: Path) -> None:
    for name in ("openb_pod_list_b.csv", "openb_pod_list_a10.csv", traces.NODE_LIST_FILE, "other.csv"):
        (tmp_path / name).touch()
    assert list(traces.find_openb_pod_lists(tmp_path)) == ["a10", "b"]
