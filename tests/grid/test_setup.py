"""One Python environment on all nodes: what is asked for, the stamp, wheels for nodes without a network."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import re
import zipfile
from pathlib import Path

import pytest

from genie.errors import UsageError
from genie.grid.remote.core import OpError
from genie.grid.remote.environment import install
from genie.grid.setup import Setup, Wish, wish
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed
from tests.grid.conftest import grid_file_of
from tests.waiting import until


def make_wheel(folder: Path, *, version: str = "1.0", value: int = 1) -> None:
    """The smallest wheel that pip takes."""
    folder.mkdir(exist_ok=True)
    info = f"small_thing-{version}.dist-info"
    with zipfile.ZipFile(folder / f"small_thing-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_thing.py", f"VALUE = {value}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: small-thing\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/RECORD", f"small_thing.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels")
    return tmp_path / "wheels"


async def test_wheels_are_sent_and_installed_and_the_same_again_does_nothing(
    own_bed: Bed, wheels: Path
) -> None:
    file = grid_file_of(own_bed)
    wanted = wish(requirements=None, packages=["small-thing"], wheels=wheels)
    said: list[str] = []
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        setup = Setup(pool, file)
        reports = await setup.run(wanted, say=lambda node, text: said.append(f"{node} {text}"))
        assert [(each.node, each.state, each.error) for each in reports] == [
            ("gpu1", "installed", ""),
            ("gpu2", "installed", ""),
        ]
        assert any("gpu2 sending small_thing" in each for each in said)
        env = "/root/grid_workspace/grid_env"
        assert own_bed["gpu1"].run(f"{env}/bin/python -c 'import small_thing as t; print(t.VALUE)'") == "1\n"
        # People who activate it find the grid's Ray, if there is one.
        own_bed["gpu1"].run(f"mkdir -p {env}/../.grid/ray && echo 'export X=ray' > {env}/../.grid/ray/env.sh")
        assert own_bed["gpu1"].run(f". {env}/bin/activate; echo $X") == "ray\n"
        again = await setup.run(wanted, say=lambda node, text: None)
        assert [each.state for each in again] == ["unchanged", "unchanged"]
        make_wheel(wheels, value=2)
        changed = wish(requirements=None, packages=["small-thing"], wheels=wheels)
        assert [each.state for each in await setup.run(changed, ["gpu1"])] == ["installed"]


async def test_one_node_that_fails_does_not_stop_the_other_and_pips_last_lines_are_shown(
    own_bed: Bed, wheels: Path
) -> None:
    broken = own_bed["gpu2"]
    (broken.bin / "python3.special").write_text("#!/bin/sh\nexit 3\n")
    (broken.bin / "python3.special").chmod(0o755)
    (own_bed["gpu1"].bin / "python3.special").symlink_to("/usr/bin/python3")
    file = grid_file_of(own_bed)
    wanted = wish(requirements=None, packages=["not-there"], wheels=wheels, python="python3.special")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        first, second = await Setup(pool, file).run(wanted)
        assert first.state == second.state == "failed"
        assert "No matching distribution found for not-there" in first.error
        assert "no Python that runs" in second.error
        # What failed has no stamp, so it is tried again.
        right = dataclasses.replace(wanted, packages=("small-thing",))
        assert [each.state for each in await Setup(pool, file).run(right, ["gpu1"])] == ["installed"]


async def test_a_python_without_venv_gets_the_hint_for_debian(own_bed: Bed) -> None:
    refuse = 'if [ "$1" = -m ]; then echo "No module named venv"; exit 1; fi'
    script = f'#!/bin/sh\n{refuse}\nexec /usr/bin/python3 "$@"\n'
    (own_bed["gpu1"].bin / "python3.bare").write_text(script)
    (own_bed["gpu1"].bin / "python3.bare").chmod(0o755)
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        (report,) = await Setup(pool, file).run(Wish(packages=("x",), python="python3.bare"), ["gpu1"])
    assert "No module named venv" in report.error
    assert report.hint == "on Debian and Ubuntu: apt install python3-venv"


async def test_on_a_full_disk_it_is_the_disk_that_is_named(own_bed: Bed) -> None:
    own_bed["gpu1"].restart(before="mount -t tmpfs -o size=2m tmpfs /root")
    file = grid_file_of(own_bed)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        (report,) = await Setup(pool, file).run(
            wish(requirements=None, packages=["small-thing"], wheels=None), ["gpu1"]
        )
    assert report.state == "failed"
    assert "No space left on device" in report.error
    assert "python3-venv" not in report.hint


async def test_two_at_the_same_time_do_not_spoil_each_other(own_bed: Bed, wheels: Path) -> None:
    file = grid_file_of(own_bed)
    wanted = wish(requirements=None, packages=["small-thing"], wheels=wheels)
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        both = await asyncio.gather(*(Setup(pool, file).run(wanted, ["gpu1"]) for _ in range(2)))
    reports = [report for each in both for report in each]
    assert "installed" in [report.state for report in reports]
    errors = [report.error for report in reports if report.state == "failed"]
    assert [error for error in errors if "under way" not in error] == []


async def test_a_setup_goes_on_after_a_cut_says_so_to_the_next_and_leaves_no_lock(
    own_bed: Bed, wheels: Path
) -> None:
    """The program that makes the environment waits at a gate, once."""
    node = own_bed["gpu1"]
    gate = "if [ -p /root/gate ]; then read _ < /root/gate; rm /root/gate; exit 1; fi"
    (node.bin / "python3.slow").write_text(
        f'#!/bin/sh\ncase "$*" in *venv*) {gate};; esac\nexec /usr/bin/python3 "$@"\n'
    )
    (node.bin / "python3.slow").chmod(0o755)
    node.run("mkfifo /root/gate")
    file = grid_file_of(own_bed, more="ssh: {connect_timeout: 20, max_retries: 0}\n")
    wanted = wish(requirements=None, packages=["small-thing"], wheels=wheels, python="python3.slow")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        first = asyncio.ensure_future(Setup(pool, file, who="ann@desk").run(wanted, ["gpu1"]))
        await until(lambda: node.processes("python3.slow -m venv"), what="the setup at its gate")
        (slow,) = node.processes("python3.slow -m venv")
        node.cut()
        (lost,) = await first
        assert lost.state == "unreachable"
        (told,) = await Setup(pool, file).run(wanted, ["gpu1"])
        assert told.state == "failed"
        under_way = r"another setup is under way here, begun by ann@desk \d+ s ago \(process (\d+)\)"
        found = re.search(under_way, told.error)
        assert found is not None and int(found[1]) == slow, told.error
        assert "grid-cli run --node gpu1 'tail .grid/setup/setup.log'" in told.hint
        (node.home / "gate").write_text("\n")
        await until(lambda: not node.processes("python3.slow -m venv"), what="the end of the first setup")
        (after,) = await Setup(pool, file).run(wanted, ["gpu1"])
        assert (after.state, after.error) == ("installed", "")


@pytest.mark.parametrize(
    "content",
    [
        *("", "7", "[" * 5000, '{"who": 1}', '{"who": "x", "since": "y", "pid": 1}'),
        '{"who": "x", "since": 1%s, "pid": 1}' % ("0" * 400),
    ],
)
def test_a_lock_that_tells_nothing_is_still_a_lock(tmp_path: Path, content: str) -> None:
    (tmp_path / ".grid/setup").mkdir(parents=True)
    path = tmp_path / ".grid/setup/lock"
    path.write_text(content)
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OpError, match=r"^another setup is under way here$") as caught:
            install({"root": str(tmp_path)}, b"")
    assert (caught.value.reason, path.read_text()) == ("locked", content)


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / ".grid/setup").mkdir(parents=True)
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / ".grid/setup/lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        install({"root": str(tmp_path), "who": "x"}, b"")
    assert (tmp_path / "precious").read_text() == "as it was"


def test_a_wish_is_the_same_whatever_its_order() -> None:
    one, other = Wish(packages=("a", "b")), Wish(packages=("b", "a"))
    assert one.stamp("3.11.7") == other.stamp("3.11.7")
    assert one.stamp("3.11.7") != one.stamp("3.12.0")
    assert one.stamp("3.11.7") != Wish(packages=("a",)).stamp("3.11.7")


@pytest.mark.parametrize("package", ["-rfile", "--index-url=x", "", "a\nb", "./x"])
def test_a_package_can_not_be_an_option(package: str) -> None:
    with pytest.raises(UsageError, match="--package"):
        wish(requirements=None, packages=[package])


@pytest.mark.parametrize("line", ["-r more.txt", "-e .", "  -c x", "./local", "--find-links here"])
def test_a_requirement_that_names_a_file_of_this_machine_is_refused_with_its_line(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"numpy\n{line}\n")
    with pytest.raises(UsageError, match=r"requirements\.txt:2"):
        wish(requirements=path)


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no wheels"):
        wish(requirements=None, packages=["a"], wheels=tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        wish(requirements=None, packages=["a"], wheels=tmp_path / "none")
    with pytest.raises(UsageError, match="--python"):
        wish(requirements=None, python="-c evil")
