"""Compiles recorded graphs with torch's inductor, for this executor's client and nobody else.

What inductor writes (sources, libraries, kernels) goes to a folder of the executor's own. It starts no
pool of processes and keeps no cache that another process could fill. The session waits meanwhile; the
work is done on a thread that has none of its dispatch state. Not for: what a graph is (fxgraph.py), and
when it is compiled (native/torch/executor/graphs.cpp).
"""

from __future__ import annotations

import logging
import resource
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genie import config
from genie.agent.executor import accelerator
from genie.errors import GenieError, OpRefusedError

if TYPE_CHECKING:
    from genie.agent.executor import fxgraph

_log = logging.getLogger(__name__)

COMPILE_S_MAX = 480.0
"""After that the steps are carried out as they are."""
_MEANWHILE_S = 1.0
STEPS_MAX = 20_000
_ALLOWANCE_BYTES = 4 * 1024**3
_REASON_CHARACTERS_MAX = 300


@dataclass(frozen=True)
class Compiled:
    """One function; where the tensors that it takes and gives are."""

    function: Any
    inputs: list[tuple[Any, ...]]
    results: list[tuple[Any, ...]]

    def __call__(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self.function(*given))


class Compiler:
    """For one device; its folder is made when it is first needed."""

    def __init__(self, *, device: str, folder: Path) -> None:
        self._device = torch.device(device)
        self._folder = folder
        self._last: Future[Compiled] | None = None
        self._growth = _Growth()

    def compile(
        self,
        steps: Sequence[fxgraph.Step],
        wanted: Sequence[int],
        sizes: Mapping[int, int],
        meanwhile: Callable[[], None],
    ) -> Compiled:
        """OpRefusedError with the reason when it cannot be done. `meanwhile` is called every second."""
        if self._last is not None and not self._last.done():
            raise OpRefusedError("another graph is still being compiled")
        if len(steps) > STEPS_MAX:
            raise OpRefusedError(f"it has {len(steps)} steps; the most that are compiled is {STEPS_MAX}")
        _log.info("compiling a graph of %d steps with inductor", len(steps))
        started = time.monotonic()
        made = Future[Compiled]()
        allowance = _Allowance(self._growth)
        threads = torch.get_num_threads()

        def work() -> None:
            try:
                torch.set_num_threads(threads)  # it is each thread's own
                if self._device.type != "cpu":
                    torch.get_device_module(self._device).set_device(self._device)
                made.set_result(self._compile(steps, wanted, sizes, allowance))
            except BaseException as error:  # inductor raises anything
                made.set_exception(error)

        # Not of a pool: those are waited for when the process ends.
        try:
            threading.Thread(target=work, name="inductor", daemon=True).start()
        except RuntimeError as error:
            raise OpRefusedError(_reason(error)) from error
        self._last = made
        while not made.done():
            futures.wait([made], timeout=_MEANWHILE_S)
            if time.monotonic() - started > COMPILE_S_MAX and not made.done():
                allowance.end()  # the session goes on although the thread still compiles
                raise OpRefusedError(f"it took longer than {COMPILE_S_MAX:g} s")
            meanwhile()
        try:
            compiled = made.result()
        except GenieError as error:
            _log.info("not compiled: %s", error)
            raise
        except Exception as error:  # whatever a compiler raises: the graph is replayed without it
            _log.warning("not compiled", exc_info=True)
            raise OpRefusedError(_reason(error)) from error
        _log.info("compiled in %.1f s", time.monotonic() - started)
        return compiled

    def close(self) -> None:
        """Removes what was written; code that is loaded stays."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _compile(
        self,
        steps: Sequence[fxgraph.Step],
        wanted: Sequence[int],
        sizes: Mapping[int, int],
        allowance: _Allowance,
    ) -> Compiled:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        config.compile_into(self._folder.resolve())
        with torch.no_grad(), allowance:
            # Late: it imports much of torch that an executor does not need otherwise.
            from genie.agent.executor import fxgraph

            traced = fxgraph.trace(steps, wanted, sizes, self._device)
            function = _inductor(traced)
        return Compiled(
            function=function,
            inputs=[place.told() for place in traced.inputs],
            results=[place.told() for place in traced.results],
        )


@dataclass
class _Growth:
    """What compiling has left behind in this process, up to its allowance."""

    bytes: int = 0


class _Allowance:
    """Compiling takes memory of its own, and leaves modules behind: neither is the client's.

    Entered by the thread that compiles. The session waits meanwhile, so none of it goes to its tensors;
    when it waits no longer it ends the allowance, and what comes after that is counted as its own.
    """

    def __init__(self, growth: _Growth) -> None:
        self._growth = growth
        self._lock = threading.Lock()
        self._limit: _Limit | None = None
        self._before_bytes = 0
        self._is_over = False

    def __enter__(self) -> None:
        with self._lock:
            if self._is_over:
                raise OpRefusedError("nobody waits for it any more")
            self._limit = _Limit.now(self._growth.bytes)
            self._before_bytes = accelerator.data_bytes()
            self._limit.allow(self._growth.bytes + _ALLOWANCE_BYTES)

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Once; from any thread."""
        with self._lock:
            if self._limit is not None and not self._is_over:
                grown = self._growth.bytes + max(0, accelerator.data_bytes() - self._before_bytes)
                self._growth.bytes = min(grown, _ALLOWANCE_BYTES)
                self._limit.allow(self._growth.bytes)
            self._is_over = True


@dataclass(frozen=True)
class _Limit:
    """The session's own limit on the memory of this process; negative for none."""

    own: int
    hard: int

    @classmethod
    def now(cls, allowed_bytes: int) -> _Limit:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        return cls(soft if soft < 0 else soft - allowed_bytes, hard)

    def allow(self, more_bytes: int) -> None:
        if self.own >= 0:
            soft = self.own + more_bytes
            resource.setrlimit(
                resource.RLIMIT_DATA, (soft if self.hard < 0 else min(soft, self.hard), self.hard)
            )


def _inductor(traced: fxgraph.Traced) -> Any:
    # Before the rest of inductor is imported: that starts a pool of processes, unless told not to.
    from torch._inductor import config as inductor_config

    inductor_config.compile_threads = 1
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False,
               "autotune_remote_cache": False, "triton.cudagraphs": False,
               # Whatever an index says, nothing outside of its tensor is read or written.
               "assert_indirect_indexing": True,
               # It says so by raising, which within a parallel loop would end the process.
               "cpp.threads": 1,
               # They would go to a folder in /tmp that all of this user's processes share.
               "cpp_cache_precompile_headers": False}  # fmt: skip
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(traced.module, traced.examples, config_patches=patches)


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = next(line for line in text.splitlines() if line.strip())
    return f"{type(error).__name__}: {first}"[:_REASON_CHARACTERS_MAX]
