"""Growth of memory, descriptors and threads of every process of a cluster over 300,000 operations.

    python benchmarks/bench_leaks.py [--json] [--operations 300000] [--quick]

operation_mix.py describes the operations and why they are mixed so. After a warm-up, whose growth is
reported separately, every process is read at regular intervals. The slope is that of Theil and Sen, the
median over all pairs of readings. Memory may grow by at most 2 bytes per operation, which is the resolution
of this method; descriptors and threads may not grow at all. `make soak` runs the same mix for hours.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import report
from operation_mix import (
    ROUND_OPERATIONS,
    WARM_UP_ROUNDS,
    OperationMix,
    ProcessSamples,
    running_mix,
    warm_up_figures,
)

READINGS = 60


async def measure(operations: int, *, warm_up_rounds: int) -> list[report.Figure]:
    warm_up, samples = ProcessSamples(), ProcessSamples()
    async with running_mix() as mix:
        warm_up.add(0, mix.pids)
        await run_rounds(mix, warm_up_rounds)
        warm_up.add(mix.operations, mix.pids)
        print(f"after the warm-up: {warm_up.rss_line()}", file=sys.stderr)
        samples.add(mix.operations, mix.pids)
        rounds = max(2, round(operations / ROUND_OPERATIONS))
        for number in range(rounds):
            await mix.run_round()
            if (number + 1) * READINGS // rounds > number * READINGS // rounds:
                samples.add(mix.operations, mix.pids)
            if (number + 1) % 50 == 0:
                print(f"{mix.operations} operations: {samples.rss_line()}", file=sys.stderr)
    return [*samples.figures(), *warm_up_figures(warm_up)]


async def run_rounds(mix: OperationMix, count: int) -> None:
    for _ in range(count):
        await mix.run_round()


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=1)
    parser.add_argument(
        "--operations", type=report.parse_positive_int, help="operations (default: 300000; quick: 4000)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer operations and a shorter warm-up")
    given = parser.parse_args()
    operations = given.operations or (4000 if given.quick else 300_000)
    logging.disable(logging.WARNING)
    with report.use_temporary_state():
        figures = asyncio.run(measure(operations, warm_up_rounds=2 if given.quick else WARM_UP_ROUNDS))
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
