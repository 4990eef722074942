"""Python environments on all nodes: the request, the stamp, and wheels for nodes without internet access."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import hashlib
import os
import re
import time
from pathlib import Path

import pytest

from genie.errors import UsageError
from genie.grid.remote.core import OpError
from genie.grid.remote.environment import (
    _make_pip_commands,
    _requirements_to_constraints,
    install_environment,
)
from genie.grid.setup import (
    DEFAULT_PACKAGES,
    EnvironmentSetup,
    EnvironmentSpec,
    default_packages,
    read_environment_spec,
)
from genie.grid.ssh.pool import SshPool
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.quick_venv import QuickVenv
from tests.grid.small_wheel import make_wheel
from tests.grid.testbed import SshTestbed
from tests.waiting import until


@pytest.fixture
def wheel_folder(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels")
    return tmp_path / "wheels"


@pytest.fixture
def quick_testbed(own_testbed: SshTestbed, quick_venv: QuickVenv) -> SshTestbed:
    """Nodes with a fast venv."""
    for node in own_testbed.nodes:
        quick_venv.install(node)
    return own_testbed


@pytest.mark.parametrize(
    "bed_name",
    ["quick_testbed", pytest.param("own_testbed", marks=pytest.mark.long("venv and pip as they are"))],
)
async def test_wheels_are_installed_and_repeating_changes_nothing(
    request: pytest.FixtureRequest, bed_name: str, wheel_folder: Path
) -> None:
    own_testbed: SshTestbed = request.getfixturevalue(bed_name)
    file = make_testbed_grid_file(own_testbed)
    spec = read_environment_spec(requirements=None, packages=["small-thing"], wheels=wheel_folder)
    shown: list[str] = []
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        setup = EnvironmentSetup(pool, file)
        reports = await setup.run(spec, on_progress=lambda node, text: shown.append(f"{node} {text}"))
        assert [(each.node, each.state, each.error) for each in reports] == [
            ("gpu1", "installed", ""),
            ("gpu2", "installed", ""),
        ]
        assert any("gpu2 uploading small_thing" in each for each in shown)
        env = "/root/grid_workspace/grid_env"
        assert (
            own_testbed["gpu1"].run(f"{env}/bin/python -c 'import small_thing as t; print(t.VALUE)'") == "1\n"
        )
        # bin/activate sets the variables of the grid's Ray cluster.
        own_testbed["gpu1"].run(
            f"mkdir -p {env}/../.grid/ray && echo 'export X=ray' > {env}/../.grid/ray/env.sh"
        )
        assert own_testbed["gpu1"].run(f". {env}/bin/activate; echo $X") == "ray\n"
        again = await setup.run(spec, on_progress=lambda node, text: None)
        assert [each.state for each in again] == ["unchanged", "unchanged"]
        make_wheel(wheel_folder, value=2)
        changed = read_environment_spec(requirements=None, packages=["small-thing"], wheels=wheel_folder)
        assert [each.state for each in await setup.run(changed, ["gpu1"])] == ["installed"]


async def test_failing_node_does_not_stop_others_and_pip_output_is_shown(
    own_testbed: SshTestbed, quick_venv: QuickVenv, wheel_folder: Path
) -> None:
    broken = own_testbed["gpu2"]
    (broken.bin / "python3.special").write_text("#!/bin/sh\nexit 3\n")
    (broken.bin / "python3.special").chmod(0o755)
    quick_venv.install(own_testbed["gpu1"], "python3.special")
    file = make_testbed_grid_file(own_testbed)
    spec = read_environment_spec(
        requirements=None, packages=["not-there"], wheels=wheel_folder, python="python3.special"
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        first, second = await EnvironmentSetup(pool, file).run(spec)
        assert first.state == second.state == "failed"
        assert "No matching distribution found for not-there" in first.error
        assert "is not a working Python" in second.error
        # A failed installation has no stamp, so it is retried.
        right = dataclasses.replace(spec, packages=("small-thing",))
        assert [each.state for each in await EnvironmentSetup(pool, file).run(right, ["gpu1"])] == [
            "installed"
        ]


async def test_missing_venv_has_hint_for_debian(own_testbed: SshTestbed) -> None:
    refuse = 'if [ "$1" = -m ]; then echo "No module named venv"; exit 1; fi'
    script = f'#!/bin/sh\n{refuse}\nexec /usr/bin/python3 "$@"\n'
    (own_testbed["gpu1"].bin / "python3.bare").write_text(script)
    (own_testbed["gpu1"].bin / "python3.bare").chmod(0o755)
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        (report,) = await EnvironmentSetup(pool, file).run(
            EnvironmentSpec(packages=("x",), python="python3.bare"), ["gpu1"]
        )
    assert "No module named venv" in report.error
    assert report.hint == "on Debian and Ubuntu: apt install python3-venv"


async def test_passwords_in_progress_lines_are_redacted(own_testbed: SshTestbed) -> None:
    node = own_testbed["gpu1"]
    line = 'echo "from https://me:hunter2@host/x"; read _ < /root/gate; exit 1'
    script = f'#!/bin/sh\nif [ "$1" = -m ]; then {line}; fi\nexec /usr/bin/python3 "$@"\n'
    (node.bin / "python3.slow").write_text(script)
    (node.bin / "python3.slow").chmod(0o755)
    node.run("mkfifo /root/gate")
    file = make_testbed_grid_file(own_testbed)
    shown: list[str] = []

    def on_progress(_node: str, text: str) -> None:
        shown.append(text)
        if "host/x" in text:
            (node.home / "gate").write_text("\n")

    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        (report,) = await EnvironmentSetup(pool, file).run(
            EnvironmentSpec(packages=("x",), python="python3.slow"), ["gpu1"], on_progress=on_progress
        )
    assert shown[-1] == "from https://me:***@host/x"
    assert report.error.endswith("from https://me:***@host/x")


async def test_full_disk_is_reported(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].restart(before="mount -t tmpfs -o size=2m tmpfs /root")
    file = make_testbed_grid_file(own_testbed)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        (report,) = await EnvironmentSetup(pool, file).run(
            read_environment_spec(requirements=None, packages=["small-thing"], wheels=None), ["gpu1"]
        )
    assert report.state == "failed"
    assert "No space left on device" in report.error
    assert "python3-venv" not in report.hint


async def test_concurrent_setups_do_not_interfere(quick_testbed: SshTestbed, wheel_folder: Path) -> None:
    file = make_testbed_grid_file(quick_testbed)
    spec = read_environment_spec(requirements=None, packages=["small-thing"], wheels=wheel_folder)
    async with SshPool(file, ssh_config=quick_testbed.ssh_config) as pool:
        both = await asyncio.gather(*(EnvironmentSetup(pool, file).run(spec, ["gpu1"]) for _ in range(2)))
    reports = [report for each in both for report in each]
    assert "installed" in [report.state for report in reports]
    errors = [report.error for report in reports if report.state == "failed"]
    assert [error for error in errors if "in progress" not in error] == []


async def test_setup_continues_after_disconnect_and_releases_its_lock(
    own_testbed: SshTestbed, quick_venv: QuickVenv, wheel_folder: Path
) -> None:
    """The program that creates the environment blocks once, on a FIFO."""
    node = own_testbed["gpu1"]
    gate = "if [ -p /root/gate ]; then read _ < /root/gate; rm /root/gate; exit 1; fi"
    quick_venv.install(node, "python3.quick")
    (node.bin / "python3.slow").write_text(
        f'#!/bin/sh\ncase "$*" in *venv*) {gate};; esac\nexec {node.bin}/python3.quick "$@"\n'
    )
    (node.bin / "python3.slow").chmod(0o755)
    node.run("mkfifo /root/gate")
    file = make_testbed_grid_file(own_testbed, more="ssh: {connect_timeout: 20, max_retries: 0}\n")
    spec = read_environment_spec(
        requirements=None, packages=["small-thing"], wheels=wheel_folder, python="python3.slow"
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        first = asyncio.ensure_future(EnvironmentSetup(pool, file, requester="ann@desk").run(spec, ["gpu1"]))
        await until(lambda: node.processes("python3.slow -m venv"), what="the blocked setup")
        (slow,) = node.processes("python3.slow -m venv")
        node.kill_connections()
        (lost,) = await first
        assert lost.state == "unreachable"
        (second,) = await EnvironmentSetup(pool, file).run(spec, ["gpu1"])
        assert second.state == "failed"
        message = r"another setup is in progress, started by ann@desk \d+ s ago \(process (\d+)\)"
        found = re.search(message, second.error)
        assert found is not None and int(found[1]) == slow, second.error
        assert "grid-cli run --node gpu1 'tail .grid/setup/setup.log'" in second.hint
        (node.home / "gate").write_text("\n")
        await until(lambda: not node.processes("python3.slow -m venv"), what="the end of the first setup")
        (after,) = await EnvironmentSetup(pool, file).run(spec, ["gpu1"])
        assert (after.state, after.error) == ("installed", "")


@pytest.mark.parametrize(
    "content",
    [
        *("", "7", "[" * 5000, '{"who": 1}', '{"who": "x", "since": "y", "pid": 1}'),
        '{"who": "x", "since": 1%s, "pid": 1}' % ("0" * 400),
    ],
)
def test_lock_with_invalid_contents_is_respected(tmp_path: Path, content: str) -> None:
    (tmp_path / ".grid/setup").mkdir(parents=True)
    path = tmp_path / ".grid/setup/lock"
    path.write_text(content)
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OpError, match=r"^another setup is in progress$") as caught:
            install_environment({"root": str(tmp_path)}, b"")
    assert (caught.value.reason, path.read_text()) == ("locked", content)


def test_symbolic_link_as_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".grid/setup").mkdir(parents=True)
    (tmp_path / "precious").write_text("unchanged")
    (tmp_path / ".grid/setup/lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        install_environment({"root": str(tmp_path), "who": "x"}, b"")
    assert (tmp_path / "precious").read_text() == "unchanged"


def test_environment_stamp_is_independent_of_package_order() -> None:
    one, other = EnvironmentSpec(packages=("a", "b")), EnvironmentSpec(packages=("b", "a"))
    assert one.to_installed_spec("3.11.7") == other.to_installed_spec("3.11.7")
    assert one.to_installed_spec("3.11.7") != one.to_installed_spec("3.12.0")
    assert one.to_installed_spec("3.11.7") != EnvironmentSpec(packages=("a",)).to_installed_spec("3.11.7")


@pytest.mark.parametrize("package", ["-rfile", "--index-url=x", "", "a\nb", "./x"])
def test_package_that_looks_like_an_option_is_rejected(package: str) -> None:
    with pytest.raises(UsageError, match="--package"):
        read_environment_spec(requirements=None, packages=[package])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("-r more.txt", "option -r"),
        ("-e .", "option -e"),
        ("  -c x", "option -c"),
        ("./local", "a local path"),
        ("--find-links here", "option --find-links"),
        ("-e git+https://ghp_SECRET@github.com/a/b", "option -e"),
        ("--find-links=https://SECRET@host/", "option --find-links"),
        ("file://SECRET@host/x", "a local path"),
    ],
)
@pytest.mark.parametrize("before", ["numpy\n", "", "\ufeff"])
def test_unsupported_requirement_is_rejected_without_quoting_it(
    tmp_path: Path, before: str, line: str, what: str
) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"{before}{line}\n")
    number = 1 + before.count("\n")
    with pytest.raises(UsageError, match=rf"requirements\.txt:{number}: {what} is not supported") as caught:
        read_environment_spec(requirements=path)
    assert "SECRET" not in caught.value.message + caught.value.hint


def test_invalid_wheel_directory_and_python_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no wheels"):
        read_environment_spec(requirements=None, packages=["a"], wheels=tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        read_environment_spec(requirements=None, packages=["a"], wheels=tmp_path / "none")
    with pytest.raises(UsageError, match=r"could not read the requirements file .*: No such file") as missing:
        read_environment_spec(requirements=tmp_path / "none.txt")
    assert missing.value.hint == "check --requirements"
    with pytest.raises(UsageError, match="--python"):
        read_environment_spec(requirements=None, python="-c evil")


@pytest.mark.parametrize("name", ["requirements", "wheels"])
def test_unknown_user_in_path_is_reported(name: str) -> None:
    paths = {"requirements": None, "wheels": None, name: Path("~nosuchuser/x")}
    with pytest.raises(
        UsageError, match=r"^~nosuchuser/x cannot be read: no home directory for '~nosuchuser'"
    ):
        read_environment_spec(**paths)


def test_requirements_are_size_limited_and_may_come_from_a_pipe() -> None:
    with pytest.raises(UsageError, match="/dev/zero is larger than 1048576 bytes"):
        read_environment_spec(requirements=Path("/dev/zero"))
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as out:
        out.write("numpy\n")
        out.close()
        assert read_environment_spec(requirements=Path(f"/dev/fd/{reader}")).requirements == "numpy\n"


async def test_packages_can_be_added_to_requirements_with_hashes(
    quick_testbed: SshTestbed, wheel_folder: Path, tmp_path: Path
) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(wheel_folder, name="pinned", version=version)
    digest = hashlib.sha256((wheel_folder / "pinned-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    (tmp_path / "locked.txt").write_text(f"pinned==1.0 \\\n    --hash=sha256:{digest}\n")
    spec = read_environment_spec(
        requirements=tmp_path / "locked.txt", packages=["small-thing", "pinned"], wheels=wheel_folder
    )
    file = make_testbed_grid_file(quick_testbed)
    async with SshPool(file, ssh_config=quick_testbed.ssh_config) as pool:
        reports = [(await EnvironmentSetup(pool, file).run(spec, ["gpu1"]))[0] for _ in range(2)]
        assert [(each.state, each.error) for each in reports] == [("installed", ""), ("unchanged", "")]
        (tmp_path / "locked.txt").write_text(f"pinned==1.0 --hash=sha256:{'0' * 64}\n")
        wrong = read_environment_spec(
            requirements=tmp_path / "locked.txt", packages=["small-thing"], wheels=wheel_folder
        )
        env = quick_testbed["gpu1"].home / "grid_workspace/grid_env"
        assert [path.name for path in env.glob("lib/*/site-packages/pinned-*")] == ["pinned-1.0.dist-info"]
        (report,) = await EnvironmentSetup(pool, file).run(wrong, ["gpu2"])
        assert (report.state, "DO NOT MATCH THE HASHES" in report.error) == ("failed", True), report.error


def test_constraints_keep_versions_and_indexes() -> None:
    text = (
        "--index-url https://own/simple\n--require-hashes\n# a comment\n"
        "ray[default,serve] ==2.9 ; python_version > '3' \\\n  --hash=sha256:aa \\\r\n  --hash=sha256:bb\n"
        "https://host/x-1.whl --hash=sha256:cc\nnumpy\n"
    )
    assert _requirements_to_constraints(text).splitlines() == [
        *("--index-url https://own/simple", "ray ==2.9 ; python_version > '3'", "numpy")
    ]


@pytest.mark.parametrize(
    ("text", "constraints"),
    [
        ("--require-hashes --index-url http://own/simple\n", ["--index-url http://own/simple"]),
        ("--index-url http://own/simple --require-hashes\n", ["--index-url http://own/simple"]),
        ("--require-hashes \\\n  --pre\\\n --require-hashes -i http://own", ["--pre -i http://own"]),
        ("\ufeff--require-hashes\na==1 --hash=sha256:aa\n", ["a==1"]),
        ("# made with: x \\\na==1\n", ["a==1"]),
        ("a==1 \\\n  # why \\\nb==2 # last \\\n c==3\n", ["a==1", "b==2"]),
        ("a==1.\\\n0\\", ["a==1.0"]),
    ],
)
def test_constraints_drop_only_the_hash_flag(text: str, constraints: list[str]) -> None:
    assert _requirements_to_constraints(text).splitlines() == constraints


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_packages_use_a_separate_command_with_require_hashes(tmp_path: Path, mark: str) -> None:
    args = {"wheels": False, "packages": ["b"]}
    written = f"{mark}--require-hashes -i http://own\na==1\n".encode()
    first, second = _make_pip_commands(args, "env", str(tmp_path), written)
    assert (first[-1], second[-2:]) == (str(tmp_path / "requirements.txt"), ["--", "b"])
    assert (tmp_path / "constraints.txt").read_text() == "-i http://own\na==1\n"


@pytest.mark.parametrize("blank", [" ", " -", "#", " #", "a[", "\\\n", "--require-hashes"])
def test_constraints_are_made_in_linear_time(blank: str) -> None:
    start = time.process_time()
    _requirements_to_constraints("a" + blank * 100_000 + "a")
    assert time.process_time() - start < 2


def test_default_packages_are_limited_to_available_wheels(tmp_path: Path) -> None:
    make_wheel(tmp_path, name="ray")
    (tmp_path / "NumPy-2.0.tar.gz").touch()
    make_wheel(tmp_path, name="torch-tools")
    assert default_packages(tmp_path) == ("ray[default]", "numpy")
    assert default_packages(None) == DEFAULT_PACKAGES
