"""Why a request could not start even if all nodes were free."""

from __future__ import annotations

import msgspec
import pytest

from genie.model.job import Within
from genie.scheduler.feasibility import why_infeasible
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import Amounts, GpuFacts, JobRequest, NodeFacts, Shape, format_memory

ISLANDS = tuple(GpuFacts("H200", "nvidia", 1000, island=number // 2) for number in range(4))
NODE = NodeFacts("n", 8000, 64_000, ISLANDS, blocked_reason="draining")


@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        (Shape(gpus=1), {"workers": 4}, ""),
        (Shape(gpus=1), {"workers": 5}, "requests 5 workers in total; 4 fit"),
        (Shape(gpus=1, gpu_milli=500, gpu_memory_mib=600), {"workers": 8}, "4 fit"),
        (Shape(gpus=1, gpu_milli=500, gpu_memory_mib=500), {"workers": 8}, ""),
        (
            Shape(gpus=1),
            {"workers": 3, "within": Within.ISLAND},
            "3 workers in one island; 2 fit",
        ),
        (Shape(gpus=2), {"within": Within.ISLAND}, ""),
        (Shape(gpus=5), {}, "requests 5 GPUs on one node; n: has 4 GPUs"),
        (Shape(labels=frozenset({("a", "b")})), {}, "n: missing label a=b"),
        (Shape(nodes=frozenset({"m"})), {}, "requests node m, which is not registered"),
    ],
)
def test_infeasible_request_has_a_reason(shape: Shape, options: dict[str, object], why: str) -> None:
    request = JobRequest("j", "t", 1, shape, **options)  # type: ignore[arg-type]
    found = why_infeasible(request, [NODE])
    assert found.endswith(why) and bool(found) == bool(why)
    assert why_infeasible(request, []) == ""


def test_reason_names_the_kind_of_accelerator() -> None:
    node = NodeFacts("n", 8000, 64_000, (GpuFacts("Xeon", "cpu"),))
    found = why_infeasible(JobRequest("j", "t", 1, Shape(gpus=2, accelerator_kind="cpu")), [node])
    assert found == "requests 2 CPU accelerators on one node; n: has 1 CPU accelerator"
    h200 = Shape(gpus=1, accelerator_kind="cpu", models=frozenset({"H200"}))
    found = why_infeasible(JobRequest("j", "t", 1, h200), [node])
    assert found == "requests 1 GPU (model H200) on one node; n: GPU model is Xeon"
    ampere = Shape(gpus=1, gpu_milli=500, accelerator_kind="cpu", capability_min=(8, 0))
    found = why_infeasible(JobRequest("j", "t", 1, ampere), [node])
    assert found.startswith("requests 1 GPU (fraction 0.5, compute capability 8.0 or newer) on one node; ")
    found = why_infeasible(JobRequest("j", "t", 1, Shape(cpu_milli=2000)), [NodeFacts("n", 1000, 64_000)])
    assert found == "requests 2 CPUs on one node; n: has 1 CPU"


def test_reason_names_nodes_that_have_left_only_if_there_are_no_others() -> None:
    gone = NodeFacts("gone", 8000, 64_000, ISLANDS, blocked_reason="it has left", has_left=True)
    request = JobRequest("j", "t", 1, Shape(gpus=5))
    assert why_infeasible(request, [gone, NODE]) == "requests 5 GPUs on one node; n: has 4 GPUs"
    assert why_infeasible(request, [gone]) == "requests 5 GPUs on one node; gone: has 4 GPUs"


def test_lowered_quota_limits_only_requested_resources() -> None:
    quotas = Quotas({"t": Quota(gpu_limit_amounts(1), gpu_limit_amounts(0))})
    held = Amounts(gpu_milli=2000, cpu_milli=1000)

    def why(shape: Shape) -> str:
        return quotas.why_over_quota(JobRequest("j", "t", 1, shape), 1, usage=held, nonpreemptible_usage=held)

    assert why(Shape(cpu_milli=1000, memory_mib=10)) == ""
    assert "its quota of 1 GPU" in why(Shape(gpus=1))


def test_quota_reason_uses_singular() -> None:
    quotas = Quotas({"t": Quota(Amounts(1000, 1000, 10), gpu_limit_amounts(0))})
    request = JobRequest("j", "t", 1, Shape(gpus=2, cpu_milli=1000))
    why = quotas.why_over_quota(request, 1, usage=Amounts(), nonpreemptible_usage=Amounts())
    assert why.endswith("requests 2 GPUs, 1 CPU; the quota of tenant t is 1 GPU, 1 CPU, 0.01 GiB of memory")


def test_request_above_the_quota_is_infeasible() -> None:
    quotas = Quotas(
        {
            "t": Quota(gpu_limit_amounts(2), gpu_limit_amounts(1)),
            "u": Quota(gpu_limit_amounts(2), gpu_limit_amounts(0)),
        }
    )

    def why(gpus: int, *, tenant: str = "t", **options: object) -> str:
        request = msgspec.structs.replace(JobRequest("j", tenant, 1, Shape(gpus=gpus)), **options)
        found = quotas.why_never_within_quota(request)
        reason = quotas.why_over_quota(
            request, request.workers_required, usage=Amounts(), nonpreemptible_usage=Amounts()
        )
        assert reason == (f"cannot start under the current quota: {found}" if found else "")
        return found

    quota = "the quota of tenant t is 2 GPUs"
    assert why(2) == why(3, preemptible=True) == why(9, tenant="other") == ""
    assert why(1, workers=4, workers_min=2) == "", "it starts with its minimum"
    assert why(3) == f"requests 3 GPUs; {quota}; only preemptible jobs may borrow more"
    assert why(2, workers=2) == why(4, preemptible=True) == f"requests 4 GPUs; {quota} plus 1 GPU borrowed"
    assert why(4, tenant="u") == "requests 4 GPUs; the quota of tenant u is 2 GPUs"


def test_workers_without_resources_count_towards_the_node_limit() -> None:
    request = JobRequest("j", "t", 1, Shape(), workers=9)
    assert why_infeasible(request, [NODE], workers_per_node_max=9) == ""
    found = why_infeasible(request, [NODE], workers_per_node_max=8)
    assert found == "requests 9 workers in total; 8 fit"


@pytest.mark.parametrize(
    ("memory_mib", "text"),
    [(999 * 1024**2, "1022976 GiB"), (64 * 1024, "64 GiB"), (100, "0.1 GiB"), (1, "0.001 GiB")],
)
def test_memory_is_formatted_without_an_exponent(memory_mib: int, text: str) -> None:
    assert format_memory(memory_mib) == text
