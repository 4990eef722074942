"""The executor's entry: listen, make the accelerator ready, say where, serve one client, end."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from genie.agent.executor import config as executor_config
from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.door import Door
from genie.config import LogConfig
from genie.errors import GenieError
from genie.runtime import files
from genie.telemetry import log

_log = logging.getLogger("genie.agent.executor")


def main(arguments: list[str] | None = None) -> int:
    """0 when the client has left or none came; an error's exit code when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m genie.agent.executor", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="written by the agent")
    options = parser.parse_args(arguments)
    log.configure(LogConfig())
    try:
        run(executor_config.read(options.config))
    except GenieError as error:
        _log.error("the executor ends: %s", error)
        return error.exit_code
    return 0


def run(config: ExecutorConfig) -> None:
    door = Door(config)
    try:
        # Late: importing torch takes seconds, and clients may queue at the door meanwhile.
        from genie.agent.executor import accelerator
        from genie.agent.executor.session import Session

        door.open(accelerator.prepare(config))
        files.write_private(Path(config.endpoint_path), msgspec.json.encode({"port": door.port}))
        client = door.wait_client(config.idle_s)
        if client is None:
            _log.info("no client came within %g s", config.idle_s)
            return
        _log.info("serving %s on %s", client.peer, config.device)
        Session(client, config).serve()
    finally:
        door.close()


if __name__ == "__main__":
    sys.exit(main())
