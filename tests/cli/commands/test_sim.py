"""genie sim run, replay and generate, custom policies and invalid options."""

from __future__ import annotations

import json
import sys

import pytest

from genie.controller.placement import policy
from tests.house.repository_files import ROOT

SMALL_CLUSTER_OPTIONS = ("--nodes", "4x8", "--jobs", "40", "--seed", "1")


@pytest.fixture
def trace_file(genie, tmp_path):
    path = tmp_path / "jobs.csv"
    ran = genie("sim", "generate", *SMALL_CLUSTER_OPTIONS, "--load", "2", str(path))
    assert (ran.code, ran.out, ran.err) == (0, "", f"wrote 40 jobs to {path}\n")
    return path


def test_run_prints_metrics(genie) -> None:
    ran = genie("sim", "run", *SMALL_CLUSTER_OPTIONS)
    assert ran.code == 0
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "32, over " in rows["GPUs"]
    for name in (
        "utilization",
        "utilization while pending",
        "wait time",
        "completion time",
        "slowdown",
        "preemptions",
    ):
        assert name in rows


def test_json_has_all_metrics_and_depends_on_the_seed(genie) -> None:
    runs = [json.loads(genie("sim", "run", *SMALL_CLUSTER_OPTIONS, "--json").out) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]["jobs"] + runs[0]["impossible"] == 40
    assert set(runs[0]["wait_s"]) == {"count", "mean", "p50", "p99", "most"}
    other = json.loads(genie("sim", "run", "--nodes", "4x8", "--jobs", "40", "--seed", "2", "--json").out)
    assert other != runs[0]


def test_generated_jobs_can_be_simulated(genie, trace_file) -> None:
    given = json.loads(genie("sim", "run", "--trace", str(trace_file), "--nodes", "4x8", "--json").out)
    made = json.loads(genie("sim", "run", *SMALL_CLUSTER_OPTIONS, "--load", "2", "--json").out)
    assert given["jobs"] == made["jobs"]
    assert given["wait_s"]["mean"] == pytest.approx(made["wait_s"]["mean"], abs=1)


def test_generate_writes_to_standard_output(genie, trace_file, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert genie("sim", "generate", *SMALL_CLUSTER_OPTIONS, "--load", "2", "-") == (
        0,
        trace_file.read_text("utf-8"),
        "",
    )
    assert [path.name for path in tmp_path.iterdir()] == [trace_file.name]


@pytest.mark.parametrize("order", ["fifo", "priority", "fair"])
@pytest.mark.parametrize("placement", ["supply", "fgd", "bestfit"])
def test_every_order_and_placement_can_be_simulated(genie, trace_file, order, placement) -> None:
    options = ("--order", order, "--placement", placement, "--no-backfill", "--no-preempt")
    ran = genie("sim", "run", "--trace", str(trace_file), "--nodes", "4x8", *options, "--json")
    assert (ran.code, json.loads(ran.out)["preemptions"]) == (0, 0)


def test_results_are_written_to_a_directory(genie, tmp_path) -> None:
    assert genie("sim", "run", *SMALL_CLUSTER_OPTIONS, "--out", str(tmp_path / "new" / "results")).code == 0
    folder = tmp_path / "new" / "results"
    assert sorted(path.name for path in folder.iterdir()) == [
        "summary.json",
        "utilisation.svg",
        "waiting.svg",
    ]
    assert json.loads((folder / "summary.json").read_text("utf-8"))["gpus"] == 32


def test_fail_every_injects_node_failures(genie) -> None:
    ran = genie("sim", "run", *SMALL_CLUSTER_OPTIONS, "--fail-every", "1h", "--repair", "10m", "--json")
    assert json.loads(ran.out)["failures"] > 0


def test_philly_and_openb_traces_are_read(genie, tmp_path) -> None:
    philly, openb, nodes = (tmp_path / name for name in ("p.csv", "o.csv", "n.csv"))
    philly.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n2017-09-04 10:30:41,60,16,960,x\n")
    openb.write_text("cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "1000,10,1,500\n" * 10)
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn1,9000,9000,2,A\n")
    for argv in (
        ("--trace", str(philly), "--format", "philly", "--nodes", "2x8"),
        ("--trace", str(openb), "--format", "openb", "--nodes", str(nodes)),
    ):
        ran = genie("sim", "run", *argv, "--json")
        assert (ran.code, json.loads(ran.out)["impossible"]) == (0, 0), ran.err
    ran = genie("sim", "replay", "--trace", str(openb), "--nodes", str(nodes), "--json")
    assert json.loads(ran.out)["allocated_pct"] == pytest.approx(100, abs=30)


def test_replay_prints_allocated_and_rejected(genie) -> None:
    ran = genie("sim", "replay", "--placement", "bestfit")
    assert ran.code == 0
    assert ran.out.startswith("allocated")
    found = json.loads(genie("sim", "replay", "--json").out)
    assert set(found) == {"allocated_pct", "arrivals", "dropped", "dropped_multi_gpu"}
    assert 80 < found["allocated_pct"] < 100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--order", "random"], "--order: there is no policy 'random'"),
        (["run", "--placement", "best"], "--placement 'best' is invalid"),
        (["run", "--nodes", "many"], "--nodes 'many' is neither COUNTxGPUS nor a file"),
        (["run", "--nodes", "0x8"], "--nodes 0x8: COUNT '0' is out of range"),
        (["run", "--nodes", "4x17"], "--nodes 4x17: GPUS '17' is out of range"),
        (["run", "--format", "slurm"], "--format 'slurm' is invalid"),
        (["run", "--jobs", "0"], "--jobs '0' is out of range"),
        (["run", "--seed", "x"], "--seed 'x' is not an integer"),
        (["run", "--load", "0"], "--load '0' is out of range"),
        (["run", "--load", "0"], "hint: give a number from 0.001 to 1000"),
        (["run", "--limits", "0.5"], "--limits '0.5' would end jobs before they finish"),
        (["run", "--fail-every", "often"], "--fail-every 'often' is not a duration"),
        (["run", "--trace", "no-such-file.csv"], "genie: no such trace file: 'no-such-file.csv'\n"),
        (["run", "--trace", "no-such-file.csv"], "hint: check the path; without --trace, jobs are synthetic"),
        (["run", "--trace", "/"], "genie: trace '/' is a directory\n"),
        (["replay", "--trace", "x.csv"], "--trace and --nodes must be given together"),
        (["replay", "--placement", "x"], "--placement 'x' is invalid"),
        (["generate", "no-such-folder/x.csv"], "could not write"),
    ],
)
def test_invalid_option_is_named(genie, argv, message) -> None:
    ran = genie("sim", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and "Traceback" not in ran.err


POLICY_MODULE = """
import threading

class LastFirst:
    def within(self, request):
        return (-request.sequence,)
    def among(self, request, scales):
        return (-request.sequence,)

class Picky(LastFirst):
    def allowed(self, request, node):
        return "not for this one" if request.tenant == "b" else ""

class Breaks(LastFirst):
    def among(self, request, scales):
        return (1 // (request.tenant != "b"),)

class Slow(LastFirst):
    def within(self, request):
        sum(range(100_000))
        return (-request.sequence,)

class HeldUp(LastFirst):
    def within(self, request):
        threading.Event().wait(0.05)
        return (-request.sequence,)

class Hangs(LastFirst):
    def within(self, request):
        while True:
            pass

class CannotBeMade:
    def __init__(self):
        raise OSError("no")

made = LastFirst()
"""
JOBS_CSV = """submitted_s,duration_s,job_id,tenant,gpus
0,100,first,a,8
0,200,second,a,8
0,300,third,b,8
"""


@pytest.fixture
def simulate_with_policy(genie, tmp_path, monkeypatch):
    """Simulate three jobs, each for the whole cluster, with a policy of this file."""
    (tmp_path / "sim_policies.py").write_text(POLICY_MODULE, "utf-8")
    (tmp_path / "leaves_policies.py").write_text("raise SystemExit(0)", "utf-8")
    (tmp_path / "three.csv").write_text(JOBS_CSV, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sim_policies", raising=False)

    def run(name, *more):
        trace = ("--trace", str(tmp_path / "three.csv"), "--nodes", "1x8")
        return genie("sim", "run", *trace, "--order", name, *more)

    return run


def test_custom_policy_is_used(simulate_with_policy) -> None:
    waits = {}
    for name in ("fifo", "sim_policies:LastFirst"):
        ran = simulate_with_policy(name, "--json")
        assert (ran.code, ran.err) == (0, "")
        document = json.loads(ran.out)
        assert (document["jobs"], document["policy_fault"]) == (3, "")
        waits[name] = document["wait_s"]["p50"], document["wait_s"]["most"]
    assert waits == {"fifo": (100, 300), "sim_policies:LastFirst": (300, 500)}


def test_policy_budget_counts_cpu_time_only(simulate_with_policy) -> None:
    ran = simulate_with_policy("sim_policies:HeldUp", "--json")
    assert (ran.code, ran.err) == (0, "")


def test_jobs_rejected_by_a_policy_are_counted(simulate_with_policy) -> None:
    ran = simulate_with_policy("sim_policies:Picky")
    assert ran.code == 0
    assert "2, 1 never started: the policy rejected all nodes, 0 ended" in ran.out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Breaks", "raised ZeroDivisionError"),
        ("Hangs", "did not return"),
        ("Slow", "s; the limit is 1e-05 s"),
    ],
)
def test_failing_policy_is_disabled_and_reported(simulate_with_policy, monkeypatch, name, what) -> None:
    if name == "Hangs":
        monkeypatch.setattr(policy, "POLICY_CALL_TIMEOUT_S", 0.1)
    if name == "Slow":
        monkeypatch.setenv("GENIE_CONTROLLER_POLICY_BUDGET_S", "0.00001")
    ran = simulate_with_policy(f"sim_policies:{name}", "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["jobs"]) == (1, 3)
    assert f"genie: {document['policy_fault']}\n" in ran.err and "hint: " in ran.err
    assert f"'sim_policies:{name}' is disabled and replaced by FairShare" in ran.err and what in ran.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sim_policies:Missing", "--order: sim_policies:Missing cannot be imported: AttributeError"),
        ("no_such_module:X", "--order: no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("leaves_policies:X", "--order: leaves_policies:X cannot be imported: SystemExit"),
        ("sim_policies:made", "--order: sim_policies:made is not a class"),
        ("sim_policies:CannotBeMade", "could not create policy 'sim_policies:CannotBeMade': OSError: no"),
        ("pathlib:PurePath", "has no method within"),
    ],
)
def test_unknown_policy_has_the_error_of_the_controller(simulate_with_policy, name, message) -> None:
    ran = simulate_with_policy(name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("genie: --order: ") and message in ran.err


def test_example_policy_can_be_simulated(genie, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "schedulers"))
    ran = genie("sim", "run", *SMALL_CLUSTER_OPTIONS, "--order", "own_policy:SmallFirst", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["left_waiting"] == 0


def test_invalid_format_and_invalid_line_are_reported(genie, trace_file) -> None:
    ran = genie("sim", "run", "--trace", str(trace_file), "--format", "slurm")
    assert (ran.code, "--format 'slurm' is invalid" in ran.err) == (2, True)
    trace_file.write_text("submitted_s,duration_s\n0,never\n", "utf-8")
    ran = genie("sim", "run", "--trace", str(trace_file))
    assert ran.code == 2
    assert f"{trace_file}:2: duration_s is 'never'; it must be a number of seconds" in ran.err
