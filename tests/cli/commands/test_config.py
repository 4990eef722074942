"""config show and check, and errors for invalid settings."""

from __future__ import annotations

import json

import pytest

from genie.cli.commands.config import format_environment_page
from genie.config import list_settings
from tests.house.repository_files import ROOT


def test_environment_page_is_up_to_date(genie) -> None:
    page = (ROOT / "docs" / "ENVIRONMENT_VARIABLES.md").read_text("utf-8")
    assert page == format_environment_page(), (
        "run: genie config show --markdown > docs/ENVIRONMENT_VARIABLES.md"
    )
    assert genie("config", "show", "--markdown").out == page


def test_environment_page_lists_allowed_values() -> None:
    page = format_environment_page()
    assert "Values: text, json. |" in page
    assert "| `GENIE_TOKEN` |  |" in page and "(secret) |" in page


@pytest.mark.parametrize("item", list_settings(), ids=lambda item: item.key)
def test_environment_variable_is_named_after_its_key(item) -> None:
    section, _, name = item.key.partition(".")
    assert item.env.removeprefix("GENIE_").lower().removeprefix(f"{section}_") == name


def test_show_lists_every_setting_with_its_source(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_MASTER_PORT", "6000")
    ran = genie("config", "show")
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert set(rows) == {item.key for item in list_settings()}
    assert "6000" in rows["cluster.master_port"]
    assert "environment variable GENIE_MASTER_PORT" in rows["cluster.master_port"]
    assert rows["cluster.backend"].endswith("default")


def test_show_prints_json_with_typed_values(genie) -> None:
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
    ("name", "value", "message"),
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
def test_invalid_variable_is_named_with_allowed_values(
    genie, monkeypatch, argv, name, value, message
) -> None:
    monkeypatch.setenv(name, value)
    ran = genie(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert name in ran.err and message in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nmaster_prot = 1\n", "master_port"),
        ("[clutser]\nmaster_port = 1\n", "did you mean cluster"),
        ("master_port = 1\n", "not a section"),
        ("[cluster]\nmaster_port = 'x'\n", "an integer"),
        ("[cluster]\nmaster_port = true\n", "an integer"),
        ("[cluster\n", "settings file"),
        ("\xff", "settings file"),
    ],
)
def test_invalid_file_is_named_with_the_reason(genie, tmp_path, text, message) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    ran = genie("config", "check", str(file))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and "c.toml" in ran.err


def test_check_prints_json(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster]\ntimeout = 1.5\n")
    assert json.loads(genie("config", "check", str(file), "--json").out) == {"ok": True}
    file.write_text("[cluster]\ntimeot = 1.5\n")
    ran = genie("config", "check", str(file), "--json")
    assert ran.code == 2
    found = json.loads(ran.out)
    assert found["ok"] is False and "timeot" in found["error"] and "timeout" in found["hint"]


def test_error_for_a_given_file_does_not_mention_the_environment(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster\n")
    ran = genie("config", "check", str(file))
    assert "hint: correct the file\n" in ran.err
    assert "GENIE_CONFIG" not in ran.err


def test_out_of_range_error_shows_the_exact_limits(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_WORKDIR_BYTES_MAX", "1")
    assert "from 1024 to 1099511627776" in genie("config", "check").err
    monkeypatch.delenv("GENIE_WORKDIR_BYTES_MAX")
    monkeypatch.setenv("GENIE_HEARTBEAT_INTERVAL", "0")
    assert "from 0.05 to 3600" in genie("config", "check").err


def test_valid_file_is_reported_as_valid(genie, tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster]\nmaster_port = 6000\n")
    ran = genie("config", "check", str(file))
    assert ran.code == 0
    assert "valid" in ran.out


def test_missing_file_is_a_usage_error(genie, tmp_path) -> None:
    ran = genie("config", "check", str(tmp_path / "none.toml"))
    assert ran.code == 2
    assert "none.toml" in ran.err


def test_check_reads_the_file_named_by_the_environment(genie, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("GENIE_CONFIG", str(tmp_path / "gone.toml"))
    ran = genie("config", "check")
    assert ran.code == 2
    assert "gone.toml" in ran.err
