"""The settings tree: precedence of sources, validation, error messages, and the rule for labels."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from genie import config
from genie.config import (
    cluster_settings_from_arguments,
    environment_for_jobs,
    environment_variables,
    list_settings,
    load,
)
from genie.config.labels import validate_label, validate_labels
from genie.errors import ConfigError, NameInvalidError, UsageError


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('[cluster]\nmaster_port = 7000\nhealth_interval = 3.5\n[log]\nlevel = "ERROR"\n')
    return path


def test_precedence_is_file_then_environment_then_arguments(config_file: Path) -> None:
    assert load(environ={}).cluster.master_port == 5555
    assert load(environ={}, file=config_file).cluster.master_port == 7000
    environ = {"GENIE_MASTER_PORT": "7001"}
    assert load(environ=environ, file=config_file).cluster.master_port == 7001
    settings = load({"cluster.master_port": 7002}, environ=environ, file=config_file)
    assert settings.cluster.master_port == 7002
    assert settings.log.level == "ERROR"
    assert settings.sources["cluster.master_port"] == "argument master_port"
    assert settings.sources["log.level"] == f"file {config_file}"
    assert settings.sources["cluster.backend"] == "default"


def test_type_hints_of_a_settings_section_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command loads the settings, and each setting needs its type."""
    read: list[object] = []
    real = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda cls: read.append(cls) or real(cls))
    load(environ={})
    load(environ={})
    assert len(read) == len(set(read))


def test_none_argument_and_empty_variable_count_as_not_given() -> None:
    settings = load({"cluster.master_port": None}, environ={"GENIE_MASTER_PORT": ""})
    assert settings.cluster.master_port == 5555


def test_setting_names_of_the_visual_guide_are_accepted(config_file: Path) -> None:
    assert load(environ={}, file=config_file).cluster.health_check_interval == 3.5
    given = cluster_settings_from_arguments({"enable_gpu_monitor": False, "health_interval": 9})
    settings = load(given, environ={})
    assert settings.cluster.enable_gpu_monitoring is False
    assert settings.cluster.health_check_interval == 9.0


def test_file_is_found_by_variable_and_by_default_path(config_file: Path, tmp_path: Path) -> None:
    assert load(environ={"GENIE_CONFIG": str(config_file)}).cluster.master_port == 7000
    place = tmp_path / "xdg" / "genie"
    place.mkdir(parents=True)
    (place / "config.toml").write_text(config_file.read_text())
    assert load(environ={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).cluster.master_port == 7000
    with pytest.raises(
        ConfigError, match=r"could not read the settings file .*nowhere\.toml: No such file"
    ) as gone:
        load(environ={"GENIE_CONFIG": str(tmp_path / "nowhere.toml")})
    assert "Errno" not in str(gone.value)


def test_state_directory_is_taken_from_its_environment_variables() -> None:
    assert load(environ={"XDG_STATE_HOME": "/x"}).paths.state_dir == Path("/x/genie")
    both = {"XDG_STATE_HOME": "/x", "GENIE_STATE_DIR": "/y"}
    assert load(environ=both).paths.state_dir == Path("/y")
    assert load(environ={}).paths.state_dir == Path("~/.local/state/genie").expanduser()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"GENIE_MASTER_PROT": "1"}, "did you mean GENIE_MASTER_PORT"),
        (
            {"GENIE_MASTER_PORT": "many"},
            "cluster.master_port = 'many' .environment variable GENIE_MAST",
        ),
        ({"GENIE_MASTER_PORT": "0"}, "from 1 to 65535"),
        ({"GENIE_MASTER_PORT": "1.5"}, "not an integer"),
        ({"GENIE_MASTER_PORT": "١٢٣٤"}, "not an integer.*allowed: an integer from 1 to 65535"),
        ({"GENIE_MASTER_PORT": "5_555"}, "not an integer"),
        ({"GENIE_TIMEOUT": "١٢"}, "not a number.*allowed: a number from 0.1 to 3600"),
        ({"GENIE_TIMEOUT": "1_0.5"}, "not a number"),
        ({"GENIE_TIMEOUT": "1e999"}, "is not allowed"),
        ({"GENIE_TIMEOUT": "nan"}, "cluster.timeout"),
        ({"GENIE_TIMEOUT": "inf"}, "from 0.1 to 3600"),
        ({"GENIE_ENABLE_HEARTBEAT": "maybe"}, "true or false"),
        ({"GENIE_NODE_ROLE": "boss"}, "allowed: client, server, worker"),
        ({"GENIE_LOG_LEVEL": "LOUD"}, "allowed: DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ({"GENIE_CONTROLLER_TLS": "perhaps"}, "allowed: on, off"),
    ],
)
def test_error_names_the_variable_and_the_allowed_values(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(environ=environ)
    assert next(iter(environ)) in str(caught.value) or "did you mean" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["GENIE_FOO", "GENIE_CONTROLLER_FOO", "GENIE_COLOUR"])
def test_no_variable_is_suggested_for_a_dissimilar_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a setting") as caught:
        load(environ={name: "1"})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("GENIE_TOKN", "GENIE_TOKEN"),
        ("GENIE_PORT", "GENIE_MASTER_PORT"),
        ("GENIE_CONTROLER_TLS", "GENIE_CONTROLLER_TLS"),
    ],
)
def test_a_similar_variable_is_suggested(name: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {suggested}"):
        load(environ={name: "1"})


def test_empty_argument_is_reported_as_empty() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"cluster.master_addr": ""}, environ={})
    assert caught.value.message == "cluster.master_addr = '' (argument master_addr) is empty"
    assert caught.value.hint == "give a value, or leave it out"


@pytest.mark.parametrize(
    ("given", "level"), [("", "INFO"), ("info", "INFO"), ("Debug", "DEBUG"), ("critical", "CRITICAL")]
)
def test_log_level_defaults_to_info_and_is_case_insensitive(given: str, level: str) -> None:
    assert load(environ={"GENIE_LOG_LEVEL": given}).log.level == level


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clutser]\nx = 1", "did you mean cluster"),
        ("[clutser]", "did you mean cluster"),
        ("[cluster]\nmaster_prot = 1", "did you mean master_port"),
        ("master_port = 1", "is not a section"),
        ("[cluster]\nmaster_port = true", "not an integer"),
        ("[cluster]\nmaster_addr = 5", "not a string"),
        ("[cluster", "config.toml"),
        ('[cluster]\nmaster_addr = "a\\u0000b"', "not a string"),
    ],
)
def test_error_names_the_key_and_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(environ={}, file=path)
    assert "config.toml" in str(caught.value)


def test_labels_are_a_table_or_a_string(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[agent]\nrack = "r7"\n[agent.labels]\ndisk = "ssd"\n"site/zone" = "a"\n')
    given = {"disk": "ssd", "site/zone": "a"}
    assert load(environ={}).agent.labels == {}
    agent = load(environ={}, file=path).agent
    assert (agent.labels, agent.rack) == (given, "r7")
    environ = {"GENIE_AGENT_LABELS": "disk=ssd, site/zone=a"}
    assert load(environ=environ).agent.labels == given
    settings = load({"agent.labels": {"gpu": "new"}}, environ=environ, file=path)
    assert settings.agent.labels == {"gpu": "new"}, "the last source replaces labels; they are not merged"
    assert settings.sources["agent.labels"] == "argument labels"


@pytest.mark.parametrize(
    "labels",
    [
        "disk",
        "disk=ssd,",
        "disk=ssd,disk=hdd",
        "disk=",
        "=ssd",
        "a b=c",
        "a=b=c",
        f"{'k' * 64}=v",
        f"k={'v' * 64}",
        ",".join(f"k{number}=v" for number in range(65)),
    ],
)
def test_error_for_invalid_labels_states_the_rule(labels: str) -> None:
    with pytest.raises(ConfigError, match="environment variable GENIE_AGENT_LABELS") as caught:
        load(environ={"GENIE_AGENT_LABELS": labels})
    assert "1 to 63 letters, digits" in caught.value.hint and "at most 64" in caught.value.hint


def test_labels_of_maximum_length_and_number_are_allowed() -> None:
    many = {f"{number:->63}": "v" * 63 for number in range(64)}
    text = ",".join(f"{key}={value}" for key, value in many.items())
    assert load(environ={"GENIE_AGENT_LABELS": text}).agent.labels == many


@pytest.mark.parametrize("rack", ["a b", "r" * 64, "r\u00fc"])
def test_error_for_an_invalid_rack_states_the_rule(rack: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.rack") as caught:
        load(environ={"GENIE_AGENT_RACK": rack})
    assert caught.value.hint == "allowed: 1 to 63 letters, digits, '.', '_', '-' or '/'"


def test_settings_trees_do_not_share_labels() -> None:
    vars(load(environ={}).agent)["labels"]["x"] = "y"
    assert load(environ={}).agent.labels == {}


@pytest.mark.parametrize("text", ['labels = "disk=ssd"', "labels = {disk = 1}", "labels = 5"])
def test_labels_of_a_file_must_be_strings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[agent]\n{text}\n")
    if "disk=ssd" in text:
        assert load(environ={}, file=path).agent.labels == {"disk": "ssd"}
        return
    with pytest.raises(ConfigError, match="not a mapping"):
        load(environ={}, file=path)


def test_error_does_not_contain_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"cluster.token": 12345}, environ={})
    assert "12345" not in str(caught.value)


def test_repr_does_not_contain_a_secret() -> None:
    """A notebook prints the state that init() returns, with its configuration."""
    settings = load(environ={"GENIE_TOKEN": "genie.user.abc.SECRET.-"})
    assert settings.cluster.token == "genie.user.abc.SECRET.-"
    assert "SECRET" not in repr(settings)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("ON", True), ("no", False), ("False", False)])
def test_booleans_have_several_spellings(text: str, value: bool) -> None:
    assert load(environ={"GENIE_ENABLE_HEARTBEAT": text}).cluster.enable_heartbeat is value


def test_every_setting_has_a_variable_a_type_and_a_help_text() -> None:
    rows = list_settings()
    assert len({row.env for row in rows}) == len(rows) == len({row.key for row in rows})
    assert all(row.help and row.type_description for row in rows)
    names = {row.key: row.env for row in rows}
    assert names["cluster.master_addr"] == "GENIE_MASTER_ADDR"
    assert names["controller.port"] == "GENIE_CONTROLLER_PORT"
    assert set(environment_variables()) == {row.env for row in rows} | set(config.OTHER_ENVIRONMENT_VARIABLES)


def test_every_default_is_valid() -> None:
    given = {row.key: row.default for row in list_settings() if row.default}
    assert load(given, environ={}) is not None


def test_job_inherits_no_token() -> None:
    environ = {"PATH": "/bin", "GENIE_TOKEN": "secret", "AWS_SECRET": "x", "LANG": "C"}
    assert environment_for_jobs(environ) == {"PATH": "/bin", "LANG": "C"}


def test_executor_inherits_cache_directory_and_compiler() -> None:
    environ = {"XDG_CACHE_HOME": "/kept", "CXX": "clang++ -m64"}
    inherited = environment_for_jobs(environ)
    assert inherited == environ
    assert (config.cache_home(inherited), config.cxx_command(inherited)) == (Path("/kept"), "clang++ -m64")


def test_empty_cache_and_compiler_variables_use_the_defaults() -> None:
    assert config.cache_home({"XDG_CACHE_HOME": ""}) == Path("~/.cache").expanduser()
    assert config.cxx_command({"CXX": ""}) is None


@pytest.mark.parametrize("label", ["a", "site/zone", "-._/", "x" * 63])
def test_labels_and_racks_may_contain_slashes(label: str) -> None:
    assert validate_label(label, what="rack") == label
    assert validate_labels({label: label}) == {label: label}


@pytest.mark.parametrize("label", ["", "a b", "a=b", "a,b", "x" * 64, "a\n", "na\u00efve"])
def test_invalid_label_is_rejected_by_name(label: str) -> None:
    for labels, named in (({label: "v"}, "the name of label"), ({"k": label}, "the value of label k")):
        with pytest.raises(NameInvalidError, match=named):
            validate_labels(labels)


def test_at_most_sixty_four_labels_are_allowed() -> None:
    assert len(validate_labels({f"k{number}": "v" for number in range(64)})) == 64
    with pytest.raises(UsageError, match="65 labels are too many"):
        validate_labels({f"k{number}": "v" for number in range(65)})
