"""config show and check, and every kind of bad setting as the command line tells it."""

from __future__ import annotations

import json

import pytest

from genie.cli.config_commands import environment_page
from genie.config import declared
from tests.house.sources import ROOT


def test_the_page_is_what_the_program_writes(genie) -> None:
    page = (ROOT / "docs" / "ENVIRONMENT_VARIABLES.md").read_text("utf-8")
    assert page == environment_page(), "run: genie config show --markdown > docs/ENVIRONMENT_VARIABLES.md"
    assert genie("config", "show", "--markdown").out == page


def test_show_lists_every_setting_with_its_source(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", "6000")
    ran = genie("config", "show")
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert set(rows) == {item.key for item in declared()}
    assert "6000" in rows["cluster.master_port"]
    assert "environment variable GENIE_MASTER_PORT" in rows["cluster.master_port"]
    assert rows["cluster.backend"].endswith("default")


def test_show_gives_json_with_typed_values(genie) -> None:
    found = {row["key"]: row for row in json.loads(genie("config", "show", "--json").out)["settings"]}
    assert found["cluster.master_port"]["value"] == 5555
    assert found["cluster.enable_heartbeat"]["value"] is True
    assert found["cluster.master_addr"]["value"] is None
    assert found["cluster.master_port"]["env"] == "GENIE_MASTER_PORT"


@pytest.mark.parametrize("argv", [[], ["--json"]])
def test_show_hides_the_token(genie, monkeypatch, argv) -> None:
    monkeypatch.setenv("GENIE_TOKEN", "genie.user.abcd.supersecret")
    ran = genie("config", "show", *argv)
    assert "supersecret" not in ran.out + ran.err
    assert "(hidden)" in ran.out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GENIE_MASTER_PROT", "6000", "GENIE_MASTER_PORT"),
        ("GENIE_MASTER_PORT", "sixty", "cluster.master_port"),
        ("GENIE_MASTER_PORT", "70000", "from 1 to 65535"),
        ("GENIE_ENABLE_HEARTBEAT", "perhaps", "true or false"),
        ("GENIE_BACKEND", "carrier-pigeon", "allowed: auto, tcp"),
        ("GENIE_LOG_LEVEL", "LOUD", "allowed: DEBUG"),
        ("GENIE_AGENT_HEARTBEAT_S", "nan", "agent.heartbeat_s"),
    ],
)
@pytest.mark.parametrize("argv", [["config", "check"], ["jobs"]])
def test_a_bad_variable_is_named_with_what_is_allowed(genie, monkeypatch, argv, name, value, said) -> None:
    monkeypatch.setenv(name, value)
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert name in ran.err and said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cluster]\nmaster_prot = 1\n", "master_port"),
        ("[clutser]\nmaster_port = 1\n", "did you mean cluster"),
        ("master_port = 1\n", "not a section"),
        ("[cluster]\nmaster_port = 'x'\n", "whole number"),
        ("[cluster]\nmaster_port = true\n", "whole number"),
        ("[cluster\n", "settings file"),
        ("\xff", "settings file"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(genie, tmp_path, text, said) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    ran = genie("config", "check", str(file))
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err and "c.toml" in ran.err


def test_a_check_as_one_document(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster]\ntimeout = 1.5\n")
    assert json.loads(genie("config", "check", str(file), "--json").out) == {"ok": True}
    file.write_text("[cluster]\ntimeot = 1.5\n")
    ran = genie("config", "check", str(file), "--json")
    assert ran.code == 2
    found = json.loads(ran.out)
    assert found["ok"] is False and "timeot" in found["error"] and "timeout" in found["hint"]


def test_a_file_that_was_named_by_hand_is_not_blamed_on_the_environment(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster\n")
    ran = genie("config", "check", str(file))
    assert "hint: correct it\n" in ran.err
    assert "GENIE_CONFIG" not in ran.err


def test_limits_are_shown_in_full(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_WORKDIR_BYTES_MAX", "1")
    assert "from 1024 to 1099511627776" in genie("config", "check").err
    monkeypatch.delenv("GENIE_WORKDIR_BYTES_MAX")
    monkeypatch.setenv("GENIE_HEARTBEAT_INTERVAL", "0")
    assert "from 0.05 to 3600" in genie("config", "check").err


def test_a_good_file_is_said_to_be_good(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster]\nmaster_port = 6000\n")
    ran = genie("config", "check", str(file))
    assert ran.code == 0
    assert "is right" in ran.out


def test_a_file_that_is_not_there_is_a_usage_error(genie, tmp_path) -> None:
    ran = genie("config", "check", str(tmp_path / "none.toml"))
    assert ran.code == 2
    assert "none.toml" in ran.err


def test_check_reads_the_file_that_the_environment_names(genie, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("GENIE_CONFIG", str(tmp_path / "gone.toml"))
    ran = genie("config", "check")
    assert ran.code == 2
    assert "gone.toml" in ran.err
