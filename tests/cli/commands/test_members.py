"""genie members: from a server, or from the files of this machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from genie.model.member import Member, MemberRole, MemberState
from genie.model.messages import ListMembers, MembersReply
from genie.runtime.gossip.files import try_write_members


def make_reply(observer: str = "0a1b") -> MembersReply:
    now = time.time()
    server = Member(
        name="0a1b",
        role=MemberRole.SERVER,
        address="10.0.0.1:5556",
        controller_address="10.0.0.1:5555",
        state=MemberState.ALIVE,
        since=now - 3600,
        release="1.2.3",
    )
    node = Member(
        name="gpu-1",
        role=MemberRole.NODE,
        address="10.0.0.7:5557",
        state=MemberState.DEAD,
        since=now - 90,
    )
    return MembersReply(members=(server, node), observer=observer, observed_at=now)


def test_members_prints_a_table(genie, controller) -> None:
    controller.replies[ListMembers] = make_reply()
    ran = genie("members")
    header, server, node = ran.out.splitlines()
    assert header.split() == ["NAME", "ROLE", "ADDRESS", "STATE", "SINCE", "RELEASE"]
    assert server.split() == ["0a1b", "server", "10.0.0.1:5555", "alive", "1", "h", "ago", "1.2.3"]
    assert node.split()[:4] == ["gpu-1", "node", "10.0.0.7:5557", "dead"]


def test_servers_have_the_name_of_their_machine(genie, controller) -> None:
    reply = make_reply()
    server = msgspec.structs.replace(reply.members[0], machine_name="gpu-0")
    controller.replies[ListMembers] = msgspec.structs.replace(reply, members=(server,))
    assert genie("members").out.splitlines()[1].split()[0] == "gpu-0"
    (member,) = json.loads(genie("members", "--json").out)["members"]
    assert (member["name"], member["machine_name"]) == ("0a1b", "gpu-0")


def test_members_prints_json(genie, controller) -> None:
    controller.replies[ListMembers] = make_reply()
    document = json.loads(genie("members", "--json").out)
    assert document["source"] == f"127.0.0.1:{controller.port}"
    assert [member["state"] for member in document["members"]] == ["alive", "dead"]


def test_members_notes_that_the_list_is_longer(genie, controller) -> None:
    controller.replies[ListMembers] = msgspec.structs.replace(make_reply(), more=True)
    assert "the first 2 members" in genie("members").err


def test_server_without_gossip_is_an_error_with_the_reason(genie, controller) -> None:
    controller.replies[ListMembers] = MembersReply(off_reason="gossip.enabled = off")
    ran = genie("members")
    assert ran.code != 0
    assert "takes no part in gossip: gossip.enabled = off" in ran.err and "genie nodes" in ran.err


@pytest.mark.parametrize("folder", ["controller", "agents/gpu-1"])
def test_without_a_server_the_files_of_this_machine_are_read(genie, folder: str) -> None:
    state_dir = Path(os.environ["GENIE_STATE_DIR"])
    assert try_write_members(state_dir / folder, make_reply("gpu-1"))
    ran = genie("members")
    assert ran.code == 0
    assert "gpu-1 on this machine knew" in ran.err and "dead" in ran.out
    assert json.loads(genie("members", "--json").out)["source"] == "this machine"


@pytest.mark.parametrize("observed_at", [-1e300, 1e300])
def test_values_of_a_file_of_this_machine_are_shown_without_control_characters_and_in_bounds(
    genie, observed_at: float
) -> None:
    state_dir = Path(os.environ["GENIE_STATE_DIR"])
    node = msgspec.structs.replace(make_reply().members[1], name="gpu\x1b[2J", since=observed_at)
    reply = MembersReply(members=(node,), observer="gpu-1\x1b]0;title\x07\nforged", observed_at=observed_at)
    assert try_write_members(state_dir / "controller", reply)
    ran = genie("members")
    assert ran.code == 0
    assert all(char.isprintable() or char == "\n" for char in ran.out + ran.err)
    assert "gpu-1 ]0;title  forged on this machine knew" in ran.err
    assert "0" * 20 not in ran.err + ran.out


def test_files_of_this_machine_do_not_stand_in_for_another_address(genie) -> None:
    state_dir = Path(os.environ["GENIE_STATE_DIR"])
    try_write_members(state_dir / "controller", make_reply())
    ran = genie("--address", "127.0.0.1:1", "members")
    assert ran.code != 0 and ran.out == ""
