"""The etcd member of this machine: its record and its files in the state directory.

    STATE/etcd/member.json   name, addresses and the client endpoints of all members
    STATE/etcd/etcd.pem,.key certificate of the role `etcd`, for clients, peers and the controller
    STATE/etcd/data          the data directory of etcd (replacement.py exchanges it)

supervisor/etcd_member.py starts the process; membership.py changes the membership.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genie.controller.store.etcd_address import EtcdAddress
from genie.errors import ConfigError
from genie.model.names import address_text
from genie.processes import files
from genie.runtime import tls

ETCD_DIRECTORY = "etcd"
_MEMBER_RECORD_FILE = "member.json"
_CA_FILE = Path("controller") / "ca.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMember:
    """`host` is the IP address under which the other members reach this one."""

    name: str
    host: str
    client_port: int
    peer_port: int
    bind: str
    """Address that etcd and the controller of this machine listen on."""
    controller_port: int
    """Port of the controller of this machine; 0: not known."""
    endpoints: tuple[str, ...] = ()
    """HOST:PORT of the other members, for clients."""
    runs_agent: bool = True
    """Whether jobs run on this machine: they could read the key of the CA."""
    etcd_cluster_id: str = ""
    """In hexadecimal digits; another one after a restore on this machine. Empty: not known."""

    @classmethod
    def read(cls, state_dir: Path) -> LocalMember | None:
        """Returns None if this machine has no member."""
        path = etcd_member_directory(state_dir) / _MEMBER_RECORD_FILE
        try:
            return cls.from_json(json.loads(files.read_small_file(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"the record of this machine's etcd member, {path}, cannot be read: {error}",
                hint="restore it from a backup, or remove the member with 'genie etcd remove' on another "
                "server and join again",
            ) from error

    @classmethod
    def from_json(cls, body: Any) -> LocalMember:
        """Raises ValueError, KeyError or TypeError if it is not the record of a member."""
        return cls(
            name=str(body["name"]),
            host=str(body["host"]),
            client_port=int(body["client_port"]),
            peer_port=int(body["peer_port"]),
            bind=str(body["bind"]),
            controller_port=int(body["controller_port"]),
            endpoints=tuple(str(endpoint) for endpoint in body["endpoints"]),
            runs_agent=bool(body.get("runs_agent", True)),
            etcd_cluster_id=_parse_cluster_id(body.get("etcd_cluster_id", "")),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "host": self.host,
            "client_port": self.client_port,
            "peer_port": self.peer_port,
            "bind": self.bind,
            "controller_port": self.controller_port,
            "endpoints": list(self.endpoints),
            "runs_agent": self.runs_agent,
            "etcd_cluster_id": self.etcd_cluster_id,
        }

    def write(self, state_dir: Path) -> None:
        directory = files.make_private_directory(etcd_member_directory(state_dir))
        files.write_private(directory / _MEMBER_RECORD_FILE, json.dumps(self.to_json()).encode())

    @property
    def endpoint(self) -> str:
        """HOST:PORT for clients."""
        return address_text(self.host, self.client_port)

    @property
    def client_url(self) -> str:
        return f"https://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        return f"https://{address_text(self.host, self.peer_port)}"

    def with_endpoints(self, endpoints: set[str]) -> LocalMember:
        """The same member with these endpoints of the cluster."""
        return replace(self, endpoints=tuple(sorted(endpoints - {self.endpoint})))

    def address(self, state_dir: Path) -> EtcdAddress:
        """The cluster as clients of this machine see it: its own member first."""
        address = make_managed_etcd_address((self.endpoint, *self.endpoints), state_dir=state_dir)
        return replace(address, cluster_id=self.etcd_cluster_id)


def _parse_cluster_id(value: object) -> str:
    text = str(value)
    return f"{int(text, 16):x}" if text else ""


def make_managed_etcd_address(endpoints: tuple[str, ...], *, state_dir: Path) -> EtcdAddress:
    """The address of an etcd cluster that Genie manages, with the certificate of this machine."""
    certificate, key = etcd_certificate_and_key_paths(state_dir)
    return EtcdAddress(
        endpoints=endpoints,
        uses_tls=True,
        ca_file=ca_path(state_dir),
        certificate_file=certificate,
        key_file=key,
        server_name=tls.ETCD_NAME,
    )


def has_member_record(state_dir: Path) -> bool:
    """Whether there is a record of a member, readable or not."""
    return (etcd_member_directory(state_dir) / _MEMBER_RECORD_FILE).exists()


def etcd_member_directory(state_dir: Path) -> Path:
    return state_dir / ETCD_DIRECTORY


def etcd_data_directory(state_dir: Path) -> Path:
    return etcd_member_directory(state_dir) / "data"


def etcd_certificate_and_key_paths(state_dir: Path) -> tuple[Path, Path]:
    """Certificate and key."""
    return etcd_member_directory(state_dir) / "etcd.pem", etcd_member_directory(state_dir) / "etcd.key"


def ca_path(state_dir: Path) -> Path:
    return state_dir / _CA_FILE
