"""Entry point: listen, initialize the accelerator, write the endpoint file, serve one client, exit."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from genie.config import LogConfig
from genie.errors import GenieError, HardwareError
from genie.executor.listener import ExecutorListener
from genie.executor.session import ClientSession, SessionOutcome
from genie.model.job import CLIENT_LOST_EXIT_CODE
from genie.processes import executor_config, files
from genie.processes.executor_config import ExecutorConfig
from genie.telemetry import log

_log = logging.getLogger("genie.executor")
_STATUS_MESSAGE_CHARACTERS_MAX = 300
"""Maximum length of the error in the status for the client; the log has the whole message."""


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when the client has closed the session, CLIENT_LOST_EXIT_CODE when it did not connect or
    reconnect, else the exit code of the error."""
    parser = argparse.ArgumentParser(prog="python -m genie.executor", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config file, written by the agent")
    options = parser.parse_args(arguments)
    log.configure(LogConfig())
    config: ExecutorConfig | None = None
    try:
        config = executor_config.read(options.config)
        return run(config)
    except GenieError as error:
        _log.error("executor failed: %s", error)
        if config is not None:
            _write_status_for_agent(
                config, f"{error.message[:_STATUS_MESSAGE_CHARACTERS_MAX]} ({error.hint})"
            )
        return error.exit_code


def run(config: ExecutorConfig) -> int:
    """Return the exit code when the session has ended. Exit if the accelerator may have failed."""
    listener = ExecutorListener(config)
    try:
        # Imported late: importing torch takes seconds, and clients can already connect.
        from genie.executor import accelerator
        from genie.native import genie_executor, libraries

        if not libraries.BuildCache.of_this_installation().is_built("genie_executor"):
            torch_version = libraries.TorchPlatform.from_installation().torch_version
            _write_status_for_agent(config, f"compiling the executor library for torch {torch_version}")
        libraries.load("genie_executor")
        opened = accelerator.prepare_accelerator(config)
        session = ClientSession(listener, config)
        listener.start(opened, genie_executor.Stream)
        files.write_private(Path(config.endpoint_path), msgspec.json.encode({"port": listener.port}))
        client = listener.wait_for_client(config.idle_s)
        if client is None:
            return _report_no_client_and_get_exit_code(
                config, f"no client connected within {config.idle_s:g} s"
            )
        _log.info("serving %s on %s", client.peer, config.device)
        end = session.serve(client)
        if not session.is_memory_freed:
            # Without destroying the session: freeing memory of a failed accelerator would abort.
            logging.shutdown()
            os._exit(HardwareError.exit_code)
        if end is SessionOutcome.CLIENT_LOST:
            return _report_no_client_and_get_exit_code(
                config, f"the client disconnected and did not reconnect within {config.resume_s:g} s"
            )
        return 0 if end is SessionOutcome.CLOSED else HardwareError.exit_code
    finally:
        listener.close()


def _report_no_client_and_get_exit_code(config: ExecutorConfig, reason: str) -> int:
    _log.warning("exiting without a client: %s", reason)
    _write_status_for_agent(config, reason)
    return CLIENT_LOST_EXIT_CODE


def _write_status_for_agent(config: ExecutorConfig, text: str) -> None:
    """For the agent, which forwards it to the client."""
    if config.status_path:
        files.write_private(Path(config.status_path), text.encode())


if __name__ == "__main__":
    sys.exit(main())
