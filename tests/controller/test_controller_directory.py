"""The location of a controller: copies of its directory are refused, moved ones and restarts are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from genie.controller.controller_directory import (
    check_directory_not_copied,
    controller_instance_id,
    record_directory_location,
)
from genie.errors import DuplicateControllerError


@pytest.fixture
def machine_id(tmp_path: Path) -> Path:
    path = tmp_path / "machine-id"
    path.write_text("a" * 32 + "\n")
    return path


@pytest.fixture
def directory(tmp_path: Path, machine_id: Path) -> Path:
    path = tmp_path / "controller"
    path.mkdir()
    check_directory_not_copied(path, machine_id_file=machine_id)
    return path


def test_a_restart_is_accepted(directory: Path, machine_id: Path) -> None:
    check_directory_not_copied(directory, machine_id_file=machine_id)


def test_a_copy_on_the_same_machine_is_refused(directory: Path, machine_id: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    with pytest.raises(
        DuplicateControllerError, match=f"is a copy: .* last started in {directory}"
    ) as caught:
        check_directory_not_copied(tmp_path / "copy", machine_id_file=machine_id)
    assert "genie store adopt" in caught.value.hint
    check_directory_not_copied(directory, machine_id_file=machine_id)


def test_a_copy_on_another_machine_is_refused(directory: Path, machine_id: Path) -> None:
    machine_id.write_text("b" * 32)
    with pytest.raises(DuplicateControllerError, match="last started on another machine") as caught:
        check_directory_not_copied(directory, machine_id_file=machine_id)
    assert "/etc/machine-id" in caught.value.hint


def test_a_renamed_directory_is_accepted_and_its_old_name_is_not_kept(
    directory: Path, machine_id: Path, tmp_path: Path
) -> None:
    moved = directory.rename(tmp_path / "moved")
    check_directory_not_copied(moved, machine_id_file=machine_id)
    shutil.copytree(moved, directory)
    with pytest.raises(DuplicateControllerError):
        check_directory_not_copied(directory, machine_id_file=machine_id)


def test_a_directory_that_was_unpacked_at_its_old_path_is_accepted(
    directory: Path, machine_id: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path / "archive")
    shutil.rmtree(directory)
    (tmp_path / "other").mkdir()  # so that the inode is not reused
    shutil.copytree(tmp_path / "archive", directory)
    check_directory_not_copied(directory, machine_id_file=machine_id)


@pytest.mark.parametrize("text", ["", "uninitialized"])
def test_a_container_without_a_machine_id_is_recognized_by_its_directory(
    directory: Path, machine_id: Path, text: str
) -> None:
    machine_id.write_text(text)
    check_directory_not_copied(directory, machine_id_file=machine_id)


def test_an_adopted_copy_is_accepted(directory: Path, machine_id: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    record_directory_location(copy, machine_id_file=machine_id)
    check_directory_not_copied(copy, machine_id_file=machine_id)


def test_the_machine_id_is_not_stored(directory: Path) -> None:
    assert "a" * 32 not in (directory / "location.json").read_text()


def test_copies_are_different_instances_and_restarts_are_not(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    assert controller_instance_id(directory) == controller_instance_id(directory)
    assert controller_instance_id(directory) != controller_instance_id(tmp_path / "copy")
