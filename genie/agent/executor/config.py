"""What an executor is told when it starts: one JSON file, written by the agent, mode 0600.

Imports no torch, so that the agent can use it. Not for: GENIE_* settings (genie/config.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from genie.errors import ConfigError, TlsError
from genie.runtime import files
from genie.runtime.credentials import is_loopback

VENDOR_DEVICES = {"cpu": "cpu", "nvidia": "cuda", "amd": "cuda", "intel": "xpu"}
"""torch's name for a vendor's devices; ROCm answers to cuda."""


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ticket_sha256` is hexadecimal. Empty certificate paths mean no TLS, on loopback only."""

    job_id: str
    endpoint_path: str
    """Written when clients may connect: {"port": N}."""
    ticket_sha256: str
    status_path: str = ""
    """Before that: a text that says what takes long, or why it has ended. Empty: nobody wants to know."""
    listen_host: str = "127.0.0.1"
    port: int = 0
    server_name: str = ""
    """The name in the certificate; clients check it."""
    certificate_path: str = ""
    key_path: str = ""
    ca_path: str = ""
    """The cluster's CA, to check other executors by; empty: nothing is fetched but from loopback."""
    vendor: str = "cpu"
    device_index: int = 0
    memory_bytes_max: int = 0
    """Memory that the client's tensors may take; 0 for no limit."""
    idle_s: float = 60.0
    """The executor ends when no client has connected for so long."""
    resume_s: float = 30.0
    """A client whose connection broke may come back for so long; then its session is over."""
    spin_us: int = 0
    """How long to look for the next frame before sleeping. Quicker answers, for a busy processor."""
    threads: int = 0
    """Threads for ops on the CPU; 0 leaves it to torch."""

    @property
    def tls(self) -> bool:
        return bool(self.certificate_path)

    @property
    def device(self) -> str:
        """As torch spells it."""
        kind = VENDOR_DEVICES[self.vendor]
        return kind if kind == "cpu" else f"{kind}:{self.device_index}"


def write(path: Path, config: ExecutorConfig) -> None:
    files.write_private(path, msgspec.json.encode(config))


def read(path: Path) -> ExecutorConfig:
    """ConfigError or TlsError when an executor must not start with what the file says."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=ExecutorConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the executor's configuration: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not an executor's configuration: {error}") from error
    _check(config, path)
    return config


def _check(config: ExecutorConfig, path: Path) -> None:
    if config.vendor not in VENDOR_DEVICES:
        raise ConfigError(f"{path}: vendor is {config.vendor!r}; allowed are {', '.join(VENDOR_DEVICES)}")
    if len(config.ticket_sha256) != 64 or not set(config.ticket_sha256) <= set("0123456789abcdef"):
        raise ConfigError(f"{path}: ticket_sha256 is not 64 hexadecimal digits")
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"{path}: port is {config.port}; allowed are 0 to 65535")
    for name in ("device_index", "memory_bytes_max", "idle_s", "resume_s", "spin_us", "threads"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{path}: {name} is {getattr(config, name)}; it cannot be negative")
    if bool(config.certificate_path) != bool(config.key_path):
        raise TlsError(f"{path}: certificate_path and key_path are given together or not at all")
    if config.ca_path and not config.tls:
        raise TlsError(f"{path}: ca_path is given without a certificate; an executor has TLS or has none")
    if not config.tls and not is_loopback(config.listen_host):
        raise TlsError(
            f"{path}: an executor on {config.listen_host} needs TLS", hint="give a certificate and a key"
        )
