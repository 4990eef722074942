"""Compiles recorded graphs with torch's inductor.

Inductor writes to a directory of this executor, starts no process pool, and uses no cache that another
process could fill. The session waits meanwhile; compilation runs on a thread without its dispatch state.
fxgraph.py builds the graph; native/torch/executor/graph_table.cpp decides when it is compiled.
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
from typing import TYPE_CHECKING

import torch

from genie import config
from genie.errors import GenieError, OpRefusedError
from genie.executor import accelerator
from genie.native.graph_steps import Step, ViewFields

if TYPE_CHECKING:
    from genie.executor import fxgraph

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 480.0
"""Timeout; afterwards the graph is replayed step by step."""
_CLIENT_KEEP_ALIVE_INTERVAL_S = 1.0
COMPILED_GRAPH_STEPS_MAX = 20_000
_COMPILE_MEMORY_ALLOWANCE_BYTES = 4 * 1024**3
_FAILURE_REASON_CHARACTERS_MAX = 300


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled function, and the views that are its inputs and results."""

    function: Callable[..., Sequence[torch.Tensor]]
    inputs: list[ViewFields]
    results: list[ViewFields]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self.function(*inputs))


class InductorCompiler:
    """Compiles for one device; creates its directory on first use."""

    def __init__(self, *, device: str, folder: Path) -> None:
        self._device = torch.device(device)
        self._cache_folder = folder
        self._last_compilation: Future[CompiledGraph] | None = None
        self._retained_memory = _MemoryRetainedByCompiler()

    def compile(
        self,
        steps: Sequence[Step],
        result_storages: Sequence[int],
        existing_storage_bytes: Mapping[int, int],
        keep_alive: Callable[[], None],
    ) -> CompiledGraph:
        """`keep_alive` is called every second. OpRefusedError if the graph cannot be compiled."""
        if self._last_compilation is not None and not self._last_compilation.done():
            raise OpRefusedError("another graph is still being compiled")
        if len(steps) > COMPILED_GRAPH_STEPS_MAX:
            raise OpRefusedError(
                f"the graph has {len(steps)} steps; the maximum for compilation is {COMPILED_GRAPH_STEPS_MAX}"
            )
        _log.info("compiling a graph of %d steps with inductor", len(steps))
        started = time.monotonic()
        future = Future[CompiledGraph]()
        allowance = _CompilationMemoryAllowance(self._retained_memory)
        threads = torch.get_num_threads()

        def work() -> None:
            try:
                torch.set_num_threads(threads)  # a setting per thread
                if self._device.type != "cpu":
                    torch.get_device_module(self._device).set_device(self._device)
                future.set_result(self._compile(steps, result_storages, existing_storage_bytes, allowance))
            except BaseException as error:  # inductor may raise anything
                future.set_exception(error)

        # Not a pool thread: the interpreter waits for those at exit.
        try:
            threading.Thread(target=work, name="inductor", daemon=True).start()
        except RuntimeError as error:
            raise OpRefusedError(_format_failure_reason(error)) from error
        self._last_compilation = future
        while not future.done():
            futures.wait([future], timeout=_CLIENT_KEEP_ALIVE_INTERVAL_S)
            if time.monotonic() - started > COMPILE_TIMEOUT_S and not future.done():
                allowance.end()  # the session continues while the thread still compiles
                raise OpRefusedError(f"compilation took longer than {COMPILE_TIMEOUT_S:g} s")
            keep_alive()
        try:
            compiled = future.result()
        except GenieError as error:
            _log.info("replaying a graph without inductor: %s", error)
            raise
        except Exception as error:  # of any kind: the graph is replayed step by step
            _log.warning("replaying a graph without inductor", exc_info=True)
            raise OpRefusedError(_format_failure_reason(error)) from error
        _log.info("compiled a graph in %.1f s", time.monotonic() - started)
        return compiled

    def close(self) -> None:
        """Remove the directory; loaded code stays in memory."""
        shutil.rmtree(self._cache_folder, ignore_errors=True)

    def _compile(
        self,
        steps: Sequence[Step],
        result_storages: Sequence[int],
        existing_storage_bytes: Mapping[int, int],
        allowance: _CompilationMemoryAllowance,
    ) -> CompiledGraph:
        self._cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._cache_folder.chmod(0o700)
        config.set_compiler_cache_dir(self._cache_folder.resolve())
        with torch.no_grad(), allowance:
            # Imported late: it imports much of torch that is not needed otherwise.
            from genie.executor import fxgraph

            traced = fxgraph.trace_steps(steps, result_storages, existing_storage_bytes, self._device)
            function = _compile_fx(traced)
        return CompiledGraph(
            function=function,
            inputs=[view.as_tuple() for view in traced.inputs],
            results=[view.as_tuple() for view in traced.results],
        )


@dataclass
class _MemoryRetainedByCompiler:
    """Memory of this process that earlier compilations retain, up to the allowance."""

    bytes: int = 0


class _CompilationMemoryAllowance:
    """Raises the memory limit for a compilation, whose memory is not the client's.

    Entered by the compiling thread while the session waits. When the session stops waiting it ends the
    allowance; later growth counts towards its own limit.
    """

    def __init__(self, retained: _MemoryRetainedByCompiler) -> None:
        self._retained_memory = retained
        self._lock = threading.Lock()
        self._rlimit: _DataSegmentRlimit | None = None
        self._bytes_before_compilation = 0
        self._has_ended = False

    def __enter__(self) -> None:
        with self._lock:
            if self._has_ended:
                raise OpRefusedError("the compilation timed out")
            self._rlimit = _DataSegmentRlimit.current(self._retained_memory.bytes)
            self._bytes_before_compilation = accelerator.data_segment_bytes()
            self._rlimit.set_soft_limit_with_allowance(
                self._retained_memory.bytes + _COMPILE_MEMORY_ALLOWANCE_BYTES
            )

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Idempotent and thread-safe."""
        with self._lock:
            if self._rlimit is not None and not self._has_ended:
                retained = self._retained_memory.bytes + max(
                    0, accelerator.data_segment_bytes() - self._bytes_before_compilation
                )
                self._retained_memory.bytes = min(retained, _COMPILE_MEMORY_ALLOWANCE_BYTES)
                self._rlimit.set_soft_limit_with_allowance(self._retained_memory.bytes)
            self._has_ended = True


@dataclass(frozen=True)
class _DataSegmentRlimit:
    """The memory limit of this process without allowances; negative: none."""

    soft_bytes_without_allowance: int
    hard_bytes: int

    @classmethod
    def current(cls, current_allowance_bytes: int) -> _DataSegmentRlimit:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        return cls(soft if soft < 0 else soft - current_allowance_bytes, hard)

    def set_soft_limit_with_allowance(self, allowance_bytes: int) -> None:
        if self.soft_bytes_without_allowance >= 0:
            soft = self.soft_bytes_without_allowance + allowance_bytes
            resource.setrlimit(
                resource.RLIMIT_DATA,
                (soft if self.hard_bytes < 0 else min(soft, self.hard_bytes), self.hard_bytes),
            )


def _compile_fx(traced: fxgraph.TracedGraph) -> Callable[..., Sequence[torch.Tensor]]:
    # Set before the rest of inductor is imported, which otherwise starts a process pool.
    from torch._inductor import config as inductor_config

    inductor_config.compile_threads = 1
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False,
               "autotune_remote_cache": False, "triton.cudagraphs": False,
               # Bounds checks for indices.
               "assert_indirect_indexing": True,
               # A failed check raises, which would end the process inside a parallel loop.
               "cpp.threads": 1,
               # They would be written to a directory that all processes of the user share.
               "cpp_cache_precompile_headers": False}  # fmt: skip
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(traced.module, traced.example_inputs, config_patches=patches)
    assert callable(compiled)
    return compiled


def _format_failure_reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = next(line for line in text.splitlines() if line.strip())
    return f"{type(error).__name__}: {first}"[:_FAILURE_REASON_CHARACTERS_MAX]
