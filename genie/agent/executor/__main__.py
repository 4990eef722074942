"""The executor's entry: listen, make the accelerator ready, say where, serve one client, end."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from genie.agent.executor import config as executor_config
from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.door import Door
from genie.agent.executor.session import ClientSession
from genie.config import LogConfig
from genie.errors import GenieError, HardwareError
from genie.runtime import files
from genie.telemetry import log

_log = logging.getLogger("genie.agent.executor")
_MESSAGE_CHARS_MAX = 300
"""Of what ended it, in what the client is told; the log has the whole."""


def main(arguments: list[str] | None = None) -> int:
    """0 when the client has left or none came; an error's exit code when it could not start or go on."""
    parser = argparse.ArgumentParser(prog="python -m genie.agent.executor", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="written by the agent")
    options = parser.parse_args(arguments)
    log.configure(LogConfig())
    config: ExecutorConfig | None = None
    try:
        config = executor_config.read(options.config)
        run(config)
    except GenieError as error:
        _log.error("the executor ends: %s", error)
        if config is not None:
            _say(config, f"{error.message[:_MESSAGE_CHARS_MAX]} ({error.hint})")
        return error.exit_code
    return 0


def run(config: ExecutorConfig) -> None:
    """Returns when the client has left or none came. Ends the process if the accelerator may have failed."""
    door = Door(config)
    try:
        # Late: importing torch takes seconds, and clients may queue at the door meanwhile.
        from genie.agent.executor import accelerator
        from genie.runtime import native

        if not native.Workshop.of_this_installation().is_built("genie_executor"):
            _say(config, f"compiling its library for torch {native.Target.installed().torch_version}")
        library = native.load("genie_executor")
        facts = accelerator.prepare(config)
        session = ClientSession(library, door, config)
        door.open(facts, library.Stream)
        files.write_private(Path(config.endpoint_path), msgspec.json.encode({"port": door.port}))
        arrival = door.wait_client(config.idle_s)
        if arrival is None:
            _log.info("no client came within %g s", config.idle_s)
            return
        _log.info("serving %s on %s", arrival.peer, config.device)
        if not session.serve(arrival):
            # While the session is still there: letting go of what is on the accelerator would abort.
            logging.shutdown()
            os._exit(HardwareError.exit_code)
    finally:
        door.close()


def _say(config: ExecutorConfig, text: str) -> None:
    """For the agent, which tells the client."""
    if config.status_path:
        files.write_private(Path(config.status_path), text.encode())


if __name__ == "__main__":
    sys.exit(main())
