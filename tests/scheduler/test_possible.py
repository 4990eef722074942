"""Why a request could never start, were all nodes free."""

from __future__ import annotations

import msgspec
import pytest

from genie.model.job import Within
from genie.scheduler.possible import why_never
from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import Amounts, GpuFacts, NodeFacts, Request, Shape

ISLANDS = tuple(GpuFacts("H200", "nvidia", 1000, island=number // 2) for number in range(4))
NODE = NodeFacts("n", 8000, 64_000, ISLANDS, closed="draining")


@pytest.mark.parametrize(
    ("shape", "wishes", "why"),
    [
        (Shape(gpus=1), {"workers": 4}, ""),
        (Shape(gpus=1), {"workers": 5}, "it asks for 5 workers in all; there is room for 4"),
        (Shape(gpus=1, gpu_milli=500, gpu_memory_mib=600), {"workers": 8}, "there is room for 4"),
        (Shape(gpus=1, gpu_milli=500, gpu_memory_mib=500), {"workers": 8}, ""),
        (
            Shape(gpus=1),
            {"workers": 3, "within": Within.ISLAND},
            "3 workers in one island; there is room for 2",
        ),
        (Shape(gpus=2), {"within": Within.ISLAND}, ""),
        (Shape(gpus=5), {}, "it asks for 5 GPUs on one node; n: has 4 GPUs"),
        (Shape(labels=frozenset({("a", "b")})), {}, "n: no label a=b"),
        (Shape(nodes=frozenset({"m"})), {}, "it asks for node m, and no such node is registered"),
    ],
)
def test_what_could_never_start_is_told(shape: Shape, wishes: dict[str, object], why: str) -> None:
    request = Request("j", "t", 1, shape, **wishes)  # type: ignore[arg-type]
    found = why_never(request, [NODE])
    assert found.endswith(why) and bool(found) == bool(why)
    assert why_never(request, []) == ""


def test_accelerators_are_called_what_they_are() -> None:
    node = NodeFacts("n", 8000, 64_000, (GpuFacts("Xeon", "cpu"),))
    found = why_never(Request("j", "t", 1, Shape(gpus=2, kind="cpu")), [node])
    assert found == "it asks for 2 CPU accelerators on one node; n: has 1 CPU accelerator"
    found = why_never(Request("j", "t", 1, Shape(cpu_milli=2000)), [NodeFacts("n", 1000, 64_000)])
    assert found == "it asks for 2 CPUs on one node; n: has 1 CPU"


def test_a_quota_below_what_is_held_bounds_only_what_more_is_asked_of() -> None:
    quotas = Quotas({"t": Quota(of_gpus(1), of_gpus(0))})
    held = Amounts(gpu_milli=2000, cpu_milli=1000)

    def why(shape: Shape) -> str:
        return quotas.why_not(Request("j", "t", 1, shape), 1, usage=held, fixed=held)

    assert why(Shape(cpu_milli=1000, memory_mib=10)) == ""
    assert "its quota is 1 GPU" in why(Shape(gpus=1))


def test_a_quota_of_one_of_each_is_told_so() -> None:
    quotas = Quotas({"t": Quota(Amounts(1000, 1000, 10), of_gpus(0))})
    request = Request("j", "t", 1, Shape(gpus=2, cpu_milli=1000))
    why = quotas.why_not(request, 1, usage=Amounts(), fixed=Amounts())
    assert why.endswith("it asks for 2 GPUs, 1 CPU, and the quota of tenant t is 1 GPU, 1 CPU, 10 MiB")


def test_what_is_more_than_the_whole_quota_can_never_start() -> None:
    quotas = Quotas({"t": Quota(of_gpus(2), of_gpus(1)), "u": Quota(of_gpus(2), of_gpus(0))})

    def why(gpus: int, *, tenant: str = "t", **wishes: object) -> str:
        request = msgspec.structs.replace(Request("j", tenant, 1, Shape(gpus=gpus)), **wishes)
        found = quotas.why_never(request)
        said = quotas.why_not(request, request.least_workers, usage=Amounts(), fixed=Amounts())
        assert said == (f"can never start under the present quota: {found}" if found else "")
        return found

    mine = "and the quota of tenant t is 2 GPUs"
    assert why(2) == why(3, preemptible=True) == why(9, tenant="other") == ""
    assert why(1, workers=4, workers_min=2) == "", "it starts with fewer"
    assert why(3) == f"it asks for 3 GPUs, {mine}; only preemptible jobs may borrow more"
    assert why(2, workers=2) == why(4, preemptible=True) == f"it asks for 4 GPUs, {mine} and 1 GPU on loan"
    assert why(4, tenant="u") == "it asks for 4 GPUs, and the quota of tenant u is 2 GPUs"


def test_workers_that_hold_nothing_are_counted_too() -> None:
    request = Request("j", "t", 1, Shape(), workers=9)
    assert why_never(request, [NODE], workers_max=9) == ""
    found = why_never(request, [NODE], workers_max=8)
    assert found == "it asks for 9 workers in all; there is room for 8"
