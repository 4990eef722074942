"""Sample jobs, nodes and replies of a controller."""

from __future__ import annotations

from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobSpec, JobState, Placement, Resources
from genie.model.messages import NodeView, StatusReply
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from genie.version import __version__


def make_job(
    state: JobState = JobState.QUEUED, *, job_id: str = "j1", reason: str = "", **fields: object
) -> Job:
    spec = JobSpec(name="train", command=("python", "train.py"), resources=Resources(gpus=1))
    return Job(
        job_id=job_id,
        tenant="default",
        owner="owner1",
        spec=spec,
        state=state,
        reason=reason,
        submitted_at=1.0,
        sequence=1,
        **fields,  # type: ignore[arg-type]
    )


def make_placed_job(state: JobState, **fields: object) -> Job:
    where = Placement(node_id="box", incarnation=1, gpu_ids=(0,), epoch=1)
    return make_job(state, placements=(where,), **fields)


def make_node_view() -> NodeView:
    gpu = GPUInfo(gpu_id=0, name="Test GPU", vendor=Vendor.NVIDIA, memory_total_bytes=8 * 1024**3)
    info = NodeInfo(
        node_id="box",
        hostname="box",
        role=NodeRole.WORKER,
        host="10.0.0.7",
        gpus=(gpu,),
        cpus=4.0,
        memory_total_bytes=16 * 1024**3,
        status=NodeStatus.HEALTHY,
        last_heartbeat=1.0,
    )
    hold = Hold(job_id="j7", tenant="default", epoch=1, incarnation=1, gpu_ids=(0,))
    return NodeView(info=info, node_holds=NodeHolds(node_id="box", holds=(hold,)))


def make_status_reply() -> StatusReply:
    return StatusReply(
        cluster_id="c1",
        version=__version__,
        leading=True,
        leader="127.0.0.1:5555",
        store="sqlite",
        store_ok=True,
        started_at=1.0,
        nodes={"healthy": 1},
        jobs={"running": 2, "queued": 0},
        gpus_total=4,
        gpus_free=3,
        policy="fair",
        clients=1,
    )
