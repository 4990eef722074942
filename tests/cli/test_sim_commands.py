"""genie sim: runs, replays and made-up workloads, and every kind of wrong option."""

from __future__ import annotations

import json
import sys

import pytest

from genie.controller import policy
from tests.house.sources import ROOT

SMALL = ("--nodes", "4x8", "--jobs", "40", "--seed", "1")


@pytest.fixture
def trace(genie, tmp_path):
    path = tmp_path / "jobs.csv"
    ran = genie("sim", "generate", *SMALL, "--load", "2", str(path))
    assert (ran.code, ran.out, ran.err) == (0, "", f"40 jobs are in {path}\n")
    return path


def test_a_run_is_a_list_of_figures(genie) -> None:
    ran = genie("sim", "run", *SMALL)
    assert ran.code == 0
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    assert "32, for " in rows["GPUs"]
    for name in ("in use", "while jobs wait", "waiting", "completion", "slowdown", "preemptions"):
        assert name in rows


def test_json_has_every_figure_and_the_seed_decides(genie) -> None:
    runs = [json.loads(genie("sim", "run", *SMALL, "--json").out) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]["jobs"] + runs[0]["impossible"] == 40
    assert set(runs[0]["wait_s"]) == {"count", "mean", "p50", "p99", "most"}
    other = json.loads(genie("sim", "run", "--nodes", "4x8", "--jobs", "40", "--seed", "2", "--json").out)
    assert other != runs[0]


def test_what_was_generated_can_be_run(genie, trace) -> None:
    given = json.loads(genie("sim", "run", "--trace", str(trace), "--nodes", "4x8", "--json").out)
    made = json.loads(genie("sim", "run", *SMALL, "--load", "2", "--json").out)
    assert given["jobs"] == made["jobs"]
    assert given["wait_s"]["mean"] == pytest.approx(made["wait_s"]["mean"], abs=1)


def test_a_dash_is_standard_output(genie, trace, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert genie("sim", "generate", *SMALL, "--load", "2", "-") == (0, trace.read_text("utf-8"), "")
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize("order", ["fifo", "priority", "fair"])
@pytest.mark.parametrize("placement", ["supply", "fgd", "bestfit"])
def test_every_order_and_placement_runs(genie, trace, order, placement) -> None:
    options = ("--order", order, "--placement", placement, "--no-backfill", "--no-preempt")
    ran = genie("sim", "run", "--trace", str(trace), "--nodes", "4x8", *options, "--json")
    assert (ran.code, json.loads(ran.out)["preemptions"]) == (0, 0)


def test_results_go_to_a_folder(genie, tmp_path) -> None:
    assert genie("sim", "run", *SMALL, "--out", str(tmp_path / "new" / "results")).code == 0
    folder = tmp_path / "new" / "results"
    assert sorted(path.name for path in folder.iterdir()) == [
        "summary.json",
        "utilisation.svg",
        "waiting.svg",
    ]
    assert json.loads((folder / "summary.json").read_text("utf-8"))["gpus"] == 32


def test_nodes_fail_when_that_is_asked_for(genie) -> None:
    ran = genie("sim", "run", *SMALL, "--fail-every", "1h", "--repair", "10m", "--json")
    assert json.loads(ran.out)["failures"] > 0


def test_philly_and_openb_are_read(genie, tmp_path) -> None:
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


def test_a_replay_tells_what_was_filled_and_dropped(genie) -> None:
    ran = genie("sim", "replay", "--placement", "bestfit")
    assert ran.code == 0
    assert ran.out.startswith("allocated")
    found = json.loads(genie("sim", "replay", "--json").out)
    assert set(found) == {"allocated_pct", "arrivals", "dropped", "dropped_multi_gpu"}
    assert 80 < found["allocated_pct"] < 100


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "--order", "random"], "--order: there is no policy 'random'"),
        (["run", "--placement", "best"], "--placement 'best' is not known"),
        (["run", "--nodes", "many"], "--nodes 'many' is neither COUNTxGPUS nor a file"),
        (["run", "--nodes", "0x8"], "--nodes '0' is not allowed"),
        (["run", "--nodes", "4x17"], "--nodes '17' is not allowed"),
        (["run", "--jobs", "0"], "--jobs '0' is not allowed"),
        (["run", "--seed", "x"], "--seed 'x' is not a whole number"),
        (["run", "--load", "0"], "--load 0 is no load"),
        (["run", "--limits", "0.5"], "--limits '0.5' would end jobs early"),
        (["run", "--fail-every", "often"], "--fail-every 'often' is not a duration"),
        (["run", "--trace", "no-such-file.csv"], "genie: there is no trace 'no-such-file.csv'\n"),
        (["run", "--trace", "no-such-file.csv"], "hint: check the path; without a trace, jobs are made up"),
        (["run", "--trace", "/"], "genie: the trace '/' is a folder\n"),
        (["replay", "--trace", "x.csv"], "--trace and --nodes belong together"),
        (["replay", "--placement", "x"], "--placement 'x' is not known"),
        (["generate", "no-such-folder/x.csv"], "cannot be written"),
    ],
)
def test_a_wrong_option_is_told_in_plain_words(genie, argv, said) -> None:
    ran = genie("sim", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err and "Traceback" not in ran.err


POLICIES = """
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
JOBS = """submitted_s,duration_s,job_id,tenant,gpus
0,100,first,a,8
0,200,second,a,8
0,300,third,b,8
"""


@pytest.fixture
def own(genie, tmp_path, monkeypatch):
    """Runs three jobs, each for the whole cluster, by a policy of this file."""
    (tmp_path / "sim_policies.py").write_text(POLICIES, "utf-8")
    (tmp_path / "leaves_policies.py").write_text("raise SystemExit(0)", "utf-8")
    (tmp_path / "three.csv").write_text(JOBS, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sim_policies", raising=False)
    monkeypatch.setattr(policy, "HANGS_S", 0.1)

    def run(name, *more):
        trace = ("--trace", str(tmp_path / "three.csv"), "--nodes", "1x8")
        return genie("sim", "run", *trace, "--order", name, *more)

    return run


def test_a_policy_of_ones_own_decides(own) -> None:
    waits = {}
    for name in ("fifo", "sim_policies:LastFirst"):
        ran = own(name, "--json")
        assert (ran.code, ran.err) == (0, "")
        told = json.loads(ran.out)
        assert (told["jobs"], told["policy_fault"]) == (3, "")
        waits[name] = told["wait_s"]["p50"], told["wait_s"]["most"]
    assert waits == {"fifo": (100, 300), "sim_policies:LastFirst": (300, 500)}


def test_a_machine_that_holds_a_policy_up_does_not_change_the_run(own) -> None:
    ran = own("sim_policies:HeldUp", "--json")
    assert (ran.code, ran.err) == (0, "")


def test_whom_a_policy_keeps_off_every_node_is_counted(own) -> None:
    ran = own("sim_policies:Picky")
    assert ran.code == 0
    assert "2, 1 never started: the policy keeps them off every node, 0 ended" in ran.out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Breaks", "raised ZeroDivisionError"),
        ("Hangs", "did not return"),
        ("Slow", "s, and may take 1e-05 s"),
    ],
)
def test_a_policy_that_fails_is_out_of_use_and_the_run_says_so(own, monkeypatch, name, what) -> None:
    if name == "Slow":
        monkeypatch.setenv("GENIE_CONTROLLER_POLICY_BUDGET_S", "0.00001")
    ran = own(f"sim_policies:{name}", "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["jobs"]) == (1, 3)
    assert f"genie: {told['policy_fault']}\n" in ran.err and "hint: " in ran.err
    assert f"'sim_policies:{name}' is out of use, and FairShare decides" in ran.err and what in ran.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sim_policies:Missing", "--order: sim_policies:Missing cannot be imported: AttributeError"),
        ("no_such_module:X", "--order: no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("leaves_policies:X", "--order: leaves_policies:X cannot be imported: SystemExit"),
        ("sim_policies:made", "--order: sim_policies:made is not a class"),
        ("sim_policies:CannotBeMade", "cannot be made: OSError: no"),
        ("pathlib:PurePath", "has no method within"),
    ],
)
def test_a_policy_that_is_not_there_is_told_as_a_controller_tells_it(own, name, message) -> None:
    ran = own(name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("genie: --order: ") and message in ran.err


def test_the_policy_of_the_example_can_be_simulated(genie, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "schedulers"))
    ran = genie("sim", "run", *SMALL, "--order", "own_policy:SmallFirst", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["left_waiting"] == 0


def test_a_format_that_is_none_and_a_bad_line_are_told(genie, trace) -> None:
    ran = genie("sim", "run", "--trace", str(trace), "--format", "slurm")
    assert (ran.code, "--format 'slurm' is not known" in ran.err) == (2, True)
    trace.write_text("submitted_s,duration_s\n0,never\n", "utf-8")
    ran = genie("sim", "run", "--trace", str(trace))
    assert ran.code == 2
    assert f"{trace}:2: duration_s is 'never'; it must be a number of seconds" in ran.err
