"""Compiles recorded graphs with torch's inductor, for this executor's client and nobody else.

What inductor writes (sources, libraries, kernels) goes to a folder of the executor's own. It starts no
pool of processes and keeps no cache that another process could fill. Compiling blocks the session, on a
thread without the session's dispatch state. Not for: what a graph is (fxgraph.py), and when it is compiled
(native/torch/executor/graphs.cpp).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from genie.agent.executor import accelerator, fxgraph
from genie.errors import GenieError, OpRefusedError

_log = logging.getLogger(__name__)

COMPILE_S_MAX = 480.0
"""Less than the client waits for an op (600 s); after that the steps are carried out as they are."""
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
        self._busy: threading.Thread | None = None

    def compile(
        self, steps: Sequence[fxgraph.Step], wanted: Sequence[int], sizes: Mapping[int, int]
    ) -> Compiled:
        """OpRefusedError with the reason when it cannot be done."""
        if self._busy is not None and self._busy.is_alive():
            raise OpRefusedError("another graph is still being compiled")
        _log.info("compiling a graph of %d steps with inductor", len(steps))
        started = time.monotonic()
        made: list[Compiled] = []
        failed: list[BaseException] = []
        threads = torch.get_num_threads()

        def work() -> None:
            torch.set_num_threads(threads)  # it is each thread's own, and goes into the code
            try:
                made.append(self._compile(steps, wanted, sizes))
            except BaseException as error:  # inductor raises anything; the reason is told
                failed.append(error)

        self._busy = threading.Thread(target=work, name="inductor", daemon=True)
        self._busy.start()
        self._busy.join(COMPILE_S_MAX)
        if made:
            _log.info("compiled in %.1f s", time.monotonic() - started)
            return made[0]
        if not failed:
            raise OpRefusedError(f"it took longer than {COMPILE_S_MAX:g} s")
        surprise = None if isinstance(failed[0], GenieError) else failed[0]
        _log.info("not compiled: %s", _reason(failed[0]), exc_info=surprise)
        raise OpRefusedError(_reason(failed[0]))

    def _compile(
        self, steps: Sequence[fxgraph.Step], wanted: Sequence[int], sizes: Mapping[int, int]
    ) -> Compiled:
        with torch.no_grad(), _more_memory(), self._private():
            traced = fxgraph.trace(steps, wanted, sizes, self._device)
            function = _inductor(traced)
        return Compiled(
            function=function,
            inputs=[place.told() for place in traced.inputs],
            results=[place.told() for place in traced.results],
        )

    @contextlib.contextmanager
    def _private(self) -> Iterator[None]:
        """Inductor and the compilers below it read from the environment where to write.

        It stays so: kernels are written later too, when they are first run.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        folder = str(self._folder.resolve())
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        os.environ["TMPDIR"] = folder
        yield


def _inductor(traced: fxgraph.Traced) -> Any:
    # Before the rest of inductor is imported: that starts a pool of processes, unless told not to.
    from torch._inductor import config

    config.compile_threads = 1
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    patches = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False,
               "autotune_remote_cache": False, "triton.cudagraphs": False,
               # They would go to a folder in /tmp that all of this user's processes share.
               "cpp_cache_precompile_headers": False}  # fmt: skip
    with functorch_config.patch(enable_autograd_cache=False):  # type: ignore[attr-defined]
        return compile_fx(traced.module, traced.examples, config_patches=patches)


@contextlib.contextmanager
def _more_memory() -> Iterator[None]:
    """Compiling takes memory of its own, and leaves modules behind: neither is the client's.

    The session waits meanwhile, so none of it goes to its tensors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft < 0:
        yield
        return
    before = accelerator.data_bytes()
    more = soft + _ALLOWANCE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (more if hard < 0 else min(more, hard), hard))
    try:
        yield
    finally:
        grown = min(max(0, accelerator.data_bytes() - before), _ALLOWANCE_BYTES)
        limit = soft + grown
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _reason(error: BaseException) -> str:
    if isinstance(error, GenieError):
        return str(error)
    text = str(error).strip() or type(error).__name__
    first = next(line for line in text.splitlines() if line.strip())
    return f"{type(error).__name__}: {first}"[:_REASON_CHARACTERS_MAX]
