"""The configuration of an executor: one JSON file, written by the agent, mode 0600.

Does not import torch, because the agent uses it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from genie.errors import ConfigError, TlsError
from genie.model.names import is_loopback
from genie.processes import files

TORCH_DEVICE_TYPE_BY_VENDOR = {"cpu": "cpu", "nvidia": "cuda", "amd": "cuda", "intel": "xpu"}
"""The torch device type of each vendor; ROCm uses cuda."""


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ticket_sha256` is hexadecimal. Empty certificate paths mean no TLS, on loopback only."""

    job_id: str
    endpoint_path: str
    """File that is written once clients can connect: {"port": N}."""
    ticket_sha256: str
    status_path: str = ""
    """File for progress before that, or the reason of a failed start; empty to write none."""
    listen_host: str = "127.0.0.1"
    port: int = 0
    server_name: str = ""
    """The name in the certificate, which clients verify."""
    certificate_path: str = ""
    key_path: str = ""
    ca_path: str = ""
    """The CA of the cluster, to verify other executors; empty: fetch only from loopback."""
    vendor: str = "cpu"
    device_index: int = 0
    memory_bytes_max: int = 0
    """Maximum memory for the tensors of the client; 0 for no limit."""
    idle_s: float = 60.0
    """Idle timeout: the executor exits after this time without a connection."""
    resume_s: float = 30.0
    """Time within which a client can resume its session after a lost connection."""
    spin_us: int = 0
    """Busy-wait for the next frame before sleeping: lower latency for more CPU time."""
    threads: int = 0
    """Threads for ops on the CPU; 0 for the default of torch."""

    op_libraries: dict[str, str] = {}
    """Libraries whose ops clients may use: for each namespace, a shared object or a Python module."""

    @property
    def uses_tls(self) -> bool:
        return bool(self.certificate_path)

    @property
    def device(self) -> str:
        """The torch device, such as cuda:0."""
        kind = TORCH_DEVICE_TYPE_BY_VENDOR[self.vendor]
        return kind if kind == "cpu" else f"{kind}:{self.device_index}"


def write(path: Path, config: ExecutorConfig) -> None:
    files.write_private(path, msgspec.json.encode(config))


def read(path: Path) -> ExecutorConfig:
    """Raises ConfigError or TlsError if the configuration is invalid or insecure."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=ExecutorConfig)
    except OSError as error:
        raise ConfigError(f"could not read the configuration of the executor: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a configuration of an executor: {error}") from error
    _check_config(config, path)
    return config


def _check_config(config: ExecutorConfig, path: Path) -> None:
    if config.vendor not in TORCH_DEVICE_TYPE_BY_VENDOR:
        raise ConfigError(
            f"{path}: vendor is {config.vendor!r}; allowed: {', '.join(TORCH_DEVICE_TYPE_BY_VENDOR)}"
        )
    if len(config.ticket_sha256) != 64 or not set(config.ticket_sha256) <= set("0123456789abcdef"):
        raise ConfigError(f"{path}: ticket_sha256 is not 64 hexadecimal digits")
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"{path}: port is {config.port}; allowed: 0 to 65535")
    for name in ("device_index", "memory_bytes_max", "idle_s", "resume_s", "spin_us", "threads"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{path}: {name} is {getattr(config, name)}; it must not be negative")
    if bool(config.certificate_path) != bool(config.key_path):
        raise TlsError(f"{path}: certificate_path and key_path must be set together")
    if config.ca_path and not config.uses_tls:
        raise TlsError(f"{path}: ca_path is set without a certificate")
    if not config.uses_tls and not is_loopback(config.listen_host):
        raise TlsError(
            f"{path}: an executor on {config.listen_host} requires TLS",
            hint="set certificate_path and key_path",
        )
