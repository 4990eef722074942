"""The record of the etcd member of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from genie.controller.etcd.local_member import LocalMember, etcd_member_directory
from genie.errors import ConfigError

MEMBER = LocalMember(
    name="a", host="10.0.0.1", client_port=2379, peer_port=2380, bind="10.0.0.1", controller_port=5555
)


def test_written_record_is_read_again(tmp_path: Path) -> None:
    assert LocalMember.read(tmp_path) is None
    member = replace(MEMBER, endpoints=("10.0.0.2:2379",), runs_agent=False)
    member.write(tmp_path)
    assert LocalMember.read(tmp_path) == member


def test_record_of_an_earlier_release_has_an_agent(tmp_path: Path) -> None:
    MEMBER.write(tmp_path)
    path = etcd_member_directory(tmp_path) / "member.json"
    body = json.loads(path.read_text())
    del body["runs_agent"]
    path.write_text(json.dumps(body))
    assert LocalMember.read(tmp_path) == MEMBER


def test_urls_contain_ipv6_addresses_in_brackets() -> None:
    assert (MEMBER.client_url, MEMBER.peer_url) == ("https://10.0.0.1:2379", "https://10.0.0.1:2380")
    assert replace(MEMBER, host="fd00::1").peer_url == "https://[fd00::1]:2380"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a"}', "[" * 10_000])
def test_error_for_a_damaged_record_names_the_file(tmp_path: Path, text: str) -> None:
    MEMBER.write(tmp_path)
    path = etcd_member_directory(tmp_path) / "member.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        LocalMember.read(tmp_path)
