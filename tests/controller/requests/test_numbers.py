"""Numbers in the records of requests (jobs, nodes, quotas, reports), sent to a real controller: each one is
accepted or rejected by name, and none is an internal error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from genie.errors import GenieError, UsageError
from genie.model.job import JobSpec, PlacementConstraints, Resources, Workdir
from genie.model.messages import (
    Endpoint,
    ExecutorReady,
    ExitReport,
    Heartbeat,
    Register,
    Request,
    RunningJob,
    SessionHeartbeat,
    SetQuota,
    SubmitJob,
)
from genie.model.node import NodeInfo
from genie.model.tenant import QuotaRecord
from tests.controller.running_controller import CALL_S, running_controller
from tests.fakes.agent import make_node_info

UNUSUAL_NUMBERS = (math.nan, math.inf, -math.inf, -1, 1e308, 1 << 63, (1 << 64) - 1)

ACCEPTED_PARTS = (
    "exits.",  # a report that states nonsense must not reject the others
    "running.",
    "node.gpus.0.utilization_pct",  # -1, as of every reading
    "node.gpus.0.temperature_c",
    "node.gpus.0.power_w",
)


def complete_node(node_id: str) -> NodeInfo:
    node = make_node_info(node_id)
    gpu = msgspec.structs.replace(node.gpus[0], utilization_pct=1.0, temperature_c=1.0, power_w=1.0)
    return msgspec.structs.replace(node, gpus=(gpu,))


def find_numbers(
    node: inspect.Type, value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """The path of each number in `value`, and whether it is a float. `path` has names and indices."""
    if isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from find_numbers(each, value, path)
    elif isinstance(node, inspect.IntType | inspect.FloatType):
        yield path, isinstance(node, inspect.FloatType)
    elif isinstance(node, inspect.StructType) and isinstance(value, node.cls):
        for field in node.fields:
            yield from find_numbers(field.type, getattr(value, field.name), (*path, field.name))
    elif isinstance(node, inspect.VarTupleType):
        for index, item in enumerate(value):
            yield from find_numbers(node.item_type, item, (*path, index))
    elif isinstance(node, inspect.TupleType) and value is not None:
        for index, each in enumerate(node.item_types):
            yield from find_numbers(each, value[index], (*path, index))


def with_number(value: Any, path: tuple[Any, ...], number: float) -> Any:
    if not path:
        return number
    first, *rest = path
    if isinstance(first, int):
        return (*value[:first], with_number(value[first], tuple(rest), number), *value[first + 1 :])
    return msgspec.structs.replace(value, **{first: with_number(getattr(value, first), tuple(rest), number)})


def requests_with_records(*, node_id: str) -> dict[str, Request[Any]]:
    node = complete_node(node_id)
    endpoint = Endpoint(host="127.0.0.1", port=4000, server_name="x")
    exit_report = ExitReport(job_id="j-none", epoch=1, exit_code=0, reason="", ended_at=1.0)
    running = RunningJob(job_id="j-none", epoch=1, endpoint=endpoint)
    spec = JobSpec(
        name="job",
        command=("true",),
        resources=Resources(gpus=1, cpus=1.0),
        gpu_ids=(0,),
        node_id=node_id,
        workdir=Workdir(digest="a" * 64, size_bytes=1),
        constraints=PlacementConstraints(capability_min=(1, 0), time_limit_s=1.0, deadline_at=4e9),
    )
    return {
        "register": Register(node=node, exits=(exit_report,)),
        "heartbeat": Heartbeat(
            node_id=node_id, incarnation=1, node=node, running=(running,), exits=(exit_report,)
        ),
        "ready": ExecutorReady(job_id="j-none", epoch=1, endpoint=endpoint),
        "session": SessionHeartbeat(node=complete_node("session-1")),
        "submit": SubmitJob(spec=spec, request_id="r"),
        "quota": SetQuota(quota=QuotaRecord(tenant="t", gpus=1.0, borrow_gpus=1.0)),
    }


@pytest.mark.parametrize("name", ["register", "heartbeat", "ready", "session", "submit", "quota"])
async def test_a_number_in_a_record_is_never_an_internal_error(name: str, tmp_path: Path) -> None:
    accepted: set[str] = set()
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        request = requests_with_records(node_id="n1")[name]
        peer = agent.peer if name in ("register", "heartbeat", "ready") else owner.peer
        for path, is_float in find_numbers(inspect.type_info(type(request)), request):
            for number in UNUSUAL_NUMBERS:
                if isinstance(number, float) and not is_float:
                    continue
                sent = float(number) if is_float else number
                changed = with_number(request, path, sent)
                (outcome,) = await peer.call_each((changed,), timeout_s=CALL_S)
                if isinstance(outcome, UsageError):
                    assert f"= {sent} is not allowed" in outcome.message
                elif isinstance(outcome, GenieError):
                    assert outcome.code != GenieError.code, (path, number)
                else:
                    accepted.add(".".join(map(str, path)))
    assert not {path for path in accepted if not path.startswith(ACCEPTED_PARTS)}
