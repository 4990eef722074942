"""Working directories: packing, validation, and that nothing is written outside."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genie.errors import WorkdirError
from genie.processes.workdir import PackedWorkdir, pack, unpack

MIB = 1024 * 1024


def pack_directory(directory: Path, *, bytes_max: int = MIB, files_max: int = 100) -> PackedWorkdir:
    return pack(directory, bytes_max=bytes_max, files_max=files_max)


def packed_names(directory: Path, **given: int) -> list[str]:
    with pack_directory(directory, **given) as made, tarfile.open(fileobj=made.file) as archive:
        return archive.getnames()


def write_tree(root: Path, **contents: str) -> Path:
    """Keywords are paths with __ for a slash and DOT for a dot."""
    for name, content in contents.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def read_tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))  # noqa: PTH115
        elif path.is_dir():
            found[name] = "directory"
        else:
            found[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


# --- packing ----------------------------------------------------------------------------------


def test_digest_is_independent_of_times(tmp_path: Path) -> None:
    digests = []
    for number, order in enumerate((("a", "b"), ("b", "a"))):
        root = tmp_path / str(number)
        root.mkdir()
        for name in order:
            (root / name).write_text(name)
            os.utime(root / name, (number, number))
        with pack_directory(root) as made:
            digests.append(made.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("change", ["content", "name", "mode"])
def test_digest_depends_on_the_contents(tmp_path: Path, change: str) -> None:
    file = write_tree(tmp_path, a="one") / "a"
    with pack_directory(tmp_path) as before:
        if change == "content":
            file.write_text("two")
        elif change == "name":
            file.rename(tmp_path / "b")
        else:
            file.chmod(0o755)
    with pack_directory(tmp_path) as after:
        assert after.digest != before.digest


def test_digest_is_that_of_the_archive(tmp_path: Path) -> None:
    write_tree(tmp_path, a="one")
    with pack_directory(tmp_path) as made:
        data = made.file.read()
        assert (made.digest, made.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
        assert (made.workdir.digest, made.workdir.size_bytes) == (made.digest, made.size_bytes)


def test_gitignore_applies_at_every_level(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        DOTgitignore="*.log\n/build/\n!keep.log\n",
        a="",
        x="",
        sub__DOTgitignore="x\n!y.log\n",
    )
    for name in ("a.log", "keep.log", "build/out", "sub/x", "sub/y.log", "sub/z.log", "sub/build/kept"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert packed_names(tmp_path) == [
        ".gitignore",
        "a",
        "keep.log",
        "sub",
        "sub/.gitignore",
        "sub/build",
        "sub/build/kept",
        "sub/y.log",
        "x",
    ]


def test_contents_of_an_ignored_directory_are_excluded(tmp_path: Path) -> None:
    write_tree(tmp_path, DOTgitignore="data/\n", data__DOTgitignore="!*\n", data__big="")
    assert packed_names(tmp_path) == [".gitignore"]


def test_git_directory_is_always_excluded(tmp_path: Path) -> None:
    write_tree(tmp_path, DOTgit__config="", sub__DOTgit="gitdir: ..", a="")
    assert packed_names(tmp_path) == ["a", "sub"]


def test_links_to_the_outside_are_excluded_with_a_note(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "root", a="one", sub__b="two")
    (root / "sub" / "up").symlink_to("../a")
    (root / "loop").symlink_to("loop")
    (root / "missing").symlink_to("nowhere")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "outside").symlink_to("../../other")
    (root / "sub" / "top").symlink_to("..")
    (root / "tricky").symlink_to("sub/top/../x")  # inside by its text, outside when followed
    with pack_directory(root) as made, tarfile.open(fileobj=made.file) as archive:
        assert archive.getnames() == ["a", "loop", "missing", "sub", "sub/b", "sub/top", "sub/up"]
    assert [note.split()[0] for note in made.exclusion_notes] == ["absolute", "outside", "tricky"]


def test_special_file_is_rejected_by_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        with_dir = os.open(place, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{with_dir}/socket")
        finally:
            os.close(with_dir)
    with pytest.raises(WorkdirError, match=r"socket is a device, pipe or socket"):
        pack_directory(place)
    write_tree(place, DOTgitignore="socket\n")
    assert packed_names(place) == [".gitignore"]


def test_size_limit_error_names_the_largest_files_and_the_setting(tmp_path: Path) -> None:
    write_tree(tmp_path, small="x", large="y" * 2000, medium="z" * 500)
    with pytest.raises(WorkdirError) as caught:
        pack_directory(tmp_path, bytes_max=1000)
    assert "2501 bytes; the limit is 1000; the largest files are large (2000 bytes), medium" in str(
        caught.value
    )
    assert "GENIE_WORKDIR_BYTES_MAX" in str(caught.value)


def test_file_limit_error_names_the_fullest_folders_and_the_setting(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / str(number)).touch()
    with pytest.raises(
        WorkdirError, match=r"10 files; the limit is 5; most are in many \(9 files\)"
    ) as caught:
        pack_directory(tmp_path, files_max=5)
    assert "GENIE_WORKDIR_FILES_MAX" in str(caught.value)


def test_scan_of_a_huge_directory_stops(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / str(number)).touch()
    with pytest.raises(WorkdirError, match="more than 20 files"):
        pack_directory(tmp_path, files_max=2)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_path_that_is_not_a_directory_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="is not a directory"):
        pack_directory(tmp_path / name)


def test_progress_is_reported_up_to_the_total(tmp_path: Path) -> None:
    write_tree(tmp_path, a="x" * 10, b="y" * 20)
    reports: list[tuple[int, int]] = []
    with pack(
        tmp_path, bytes_max=MIB, files_max=9, progress=lambda done, total: reports.append((done, total))
    ):
        assert reports == [(10, 30), (30, 30)]


# --- round trips ------------------------------------------------------------------------------

_names = st.text(alphabet="abcé .-", min_size=1, max_size=8).filter(lambda name: name.strip(". ") != "")
_trees = st.dictionaries(
    st.lists(_names, min_size=1, max_size=3).map("/".join), st.tuples(st.binary(max_size=2000), st.booleans())
)


@settings(max_examples=30)
@given(tree=_trees)
def test_unpacked_tree_equals_the_packed_one(tree: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, target, file = Path(place, "source"), Path(place, "target"), Path(place, "file")
        source.mkdir()
        target.mkdir()
        for name, (content, executable) in tree.items():
            path = source / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file and a directory of the same name
            path.chmod(0o755 if executable else 0o644)
        with pack_directory(source) as made:
            file.write_bytes(made.file.read())
        unpack(file, target)
        assert read_tree(target) == read_tree(source)
        with pack_directory(target) as again:
            assert again.digest == made.digest


def test_links_round_trip(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "root", a="one", sub__b="two")
    (root / "sub" / "up").symlink_to("../a")
    with pack_directory(root) as made:
        (tmp_path / "file").write_bytes(made.file.read())
    unpack(tmp_path / "file", tmp_path / "target")
    assert read_tree(tmp_path / "target") == read_tree(root)


# --- unpacking untrusted archives ------------------------------------------------------------


def tar_member(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([tar_member("/etc/x", data=b"1")], "could be outside"),
        ([tar_member("../x", data=b"1")], "could be outside"),
        ([tar_member("a/../../x", data=b"1")], "could be outside"),
        ([tar_member("x", tarfile.SYMTYPE, link="/etc")], "leads out"),
        ([tar_member("x", tarfile.SYMTYPE, link="../y")], "leads out"),
        ([tar_member("x", tarfile.SYMTYPE, link="y"), tar_member("x/z", data=b"1")], "through a link"),
        ([tar_member("x", tarfile.LNKTYPE, link="y")], "neither a file"),
        ([tar_member("x", tarfile.CHRTYPE)], "neither a file"),
        ([tar_member("x", tarfile.FIFOTYPE)], "neither a file"),
        ([tar_member("x", tarfile.GNUTYPE_SPARSE)], "."),
        ([tar_member("x"), tar_member("x")], "twice"),
    ],
)
def test_malicious_archive_is_rejected(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], words: str
) -> None:
    target = tmp_path / "in" / "target"
    target.mkdir(parents=True)
    with tarfile.open(tmp_path / "file", "w:") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(WorkdirError, match=words):
        unpack(tmp_path / "file", target)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["target"]


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_compressed_archive_is_rejected(tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "file", mode) as archive:  # type: ignore[call-overload]
        archive.addfile(tarfile.TarInfo("x"))
    with pytest.raises(WorkdirError, match="could not unpack"):
        unpack(tmp_path / "file", tmp_path / "target")


def test_invalid_and_truncated_archives_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(2048))
    with pytest.raises(WorkdirError, match="could not unpack"):
        unpack(tmp_path / "file", tmp_path / "target")
    write_tree(tmp_path / "root", a="x" * 5000)
    with pack_directory(tmp_path / "root") as made:
        (tmp_path / "file").write_bytes(made.file.read()[:3000])
    with pytest.raises(WorkdirError, match="could not unpack"):
        unpack(tmp_path / "file", tmp_path / "target")


def test_only_the_executable_bit_of_modes_is_kept(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with tarfile.open(tmp_path / "file", "w:") as archive:
        info = tarfile.TarInfo("x")
        info.mode = 0o6777
        archive.addfile(info)
    unpack(tmp_path / "file", tmp_path / "target")
    assert (tmp_path / "target" / "x").stat().st_mode & 0o7022 == 0


def write_archive(
    path: Path, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT
) -> Path:
    with tarfile.open(path, "w:", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_error_for_a_very_long_name_is_short(tmp_path: Path, form: int) -> None:
    file = write_archive(tmp_path / "file", tar_member("n" * 80_000), form=form)
    with pytest.raises(WorkdirError) as caught:
        unpack(file, tmp_path / "target")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["n" * 256, "/".join("d" * 101), "/".join(["n" * 200] * 21)])
def test_long_and_deep_names_are_rejected_by_both_sides(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkdirError, match="too long or too deep"):
        unpack(write_archive(tmp_path / "file", tar_member(name)), tmp_path / "target")


def test_directory_that_is_too_deep_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "/".join("d" * 101)).mkdir(parents=True)
    with pytest.raises(WorkdirError, match="too deep"):
        pack_directory(tmp_path, files_max=1000)


def test_write_error_message_is_short(tmp_path: Path) -> None:
    folders = ["d" * 203]
    while len(folders) < 20:
        folders.append(f"{folders[-1]}/{'d' * 203}")
    file = write_archive(tmp_path / "file", *(tar_member(name, tarfile.DIRTYPE) for name in folders))
    with pytest.raises(WorkdirError, match="File name too long") as caught:
        unpack(file, tmp_path / "target")
    assert len(str(caught.value)) < 400


def folder_member(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return tar_member(name, tarfile.DIRTYPE)


def link_member(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return tar_member(name, tarfile.SYMTYPE, link=target)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([tar_member("./a", data=b"1")], "could be outside"),
        ([link_member("./a", "."), tar_member("a/x", data=b"1")], "could be outside"),
        ([tar_member("a//b", data=b"1")], "could be outside"),
        ([folder_member("d"), link_member("d/a", "b/../../.."), link_member("d/b", "c")], "leads out"),
        ([folder_member("d"), link_member("d/up", ".."), link_member("x", "d/up/y")], "through another link"),
        ([folder_member("d"), link_member("x", "d/up/y"), link_member("d/up", "..")], "through another link"),
        ([link_member("a", "b"), folder_member("b"), tar_member("a/x", data=b"1")], "through a link"),
        ([tar_member("a/x", data=b"1")], "is not in the archive"),
        ([tar_member("a", data=b"1"), tar_member("a/x", data=b"1")], "is not in the archive"),
        ([link_member("a", "b" * 5000)], "leads out"),
    ],
)
def test_no_name_and_no_link_chain_leads_out_of_the_directory(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], words: str
) -> None:
    target = tmp_path / "in" / "target"
    with pytest.raises(WorkdirError, match=words):
        unpack(write_archive(tmp_path / "file", *members), target)
    assert not [path for path in target.rglob("*") if path.is_symlink()], "links are made last"


def test_link_through_another_link_is_excluded_with_a_note(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "root", real__a="one")
    (root / "alias").symlink_to("real")
    (root / "deep").symlink_to("alias/a")
    (root / "round").symlink_to("real/../real/a")
    with pack_directory(root) as made:
        (tmp_path / "file").write_bytes(made.file.read())
    assert sorted(note.split()[0] for note in made.exclusion_notes) == ["deep", "round"]
    unpack(tmp_path / "file", tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["alias", "real"]


def test_long_names_and_links_round_trip(tmp_path: Path) -> None:
    root = tmp_path / "root"
    deep = root / ("d" * 120) / ("é" * 100)
    deep.mkdir(parents=True)
    (deep / "file").write_text("one")
    (root / "link").symlink_to(f"{'d' * 120}/{'é' * 100}/file")
    with pack_directory(root) as made:
        (tmp_path / "file").write_bytes(made.file.read())
    unpack(tmp_path / "file", tmp_path / "target")
    assert read_tree(tmp_path / "target") == read_tree(root)


def extended_header(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(payload) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + payload.ljust(-(-len(payload) // 512) * 512, b"\0")


def pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 2
    return str(length + len(str(length)) - 2).encode() + body


END_OF_ARCHIVE = b"\0" * 1024


@pytest.mark.parametrize(
    "data",
    [
        extended_header(b"x", b"a" * 70_000) + END_OF_ARCHIVE,
        extended_header(b"x", b"", size=8**11 - 1),
        extended_header(b"L", b"a" * 100) * 5000 + END_OF_ARCHIVE,
        extended_header(b"x", b"11 path=a\n\n") * 5000 + END_OF_ARCHIVE,
        extended_header(b"g", pax_record("path", "everywhere")) + END_OF_ARCHIVE,
        extended_header(b"x", pax_record("GNU.sparse.major", "1"))
        + extended_header(b"0", b"")
        + END_OF_ARCHIVE,
        extended_header(b"x", pax_record("size", "9" * 5000)) + extended_header(b"0", b"") + END_OF_ARCHIVE,
        extended_header(b"x", pax_record("size", "9" * 40)) + extended_header(b"0", b"") + END_OF_ARCHIVE,
        extended_header(b"x", pax_record("size", "-512")) + extended_header(b"0", b"") + END_OF_ARCHIVE,
        extended_header(b"x", b"99999 path=a\n") + extended_header(b"0", b"") + END_OF_ARCHIVE,
        extended_header(b"x", b"0 path=a\n") + extended_header(b"0", b"") + END_OF_ARCHIVE,
        extended_header(b"x", pax_record("path", "a")) + END_OF_ARCHIVE,
        extended_header(b"0", b"1"),
    ],
)
def test_headers_that_pack_never_writes_are_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(WorkdirError) as caught:
        unpack(tmp_path / "file", tmp_path / "target")
    assert len(str(caught.value)) < 400


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_archive_is_rejected_or_stays_inside(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        whole = write_archive(
            Path(place, "file"),
            folder_member("d"),
            tar_member("d/f", data=b"12"),
            link_member("l", "d/f"),
            tar_member("é" * 120),
        )
        content = bytearray(whole.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, 4096))] = data.draw(st.integers(0, 255))
        whole.write_bytes(content)
        try:
            unpack(whole, Path(place, "in"))
        except WorkdirError:
            pass
        assert {path.name for path in Path(place).iterdir()} <= {"file", "in"}


def test_gitignore_that_is_huge_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    ignore = tmp_path / ".gitignore"
    os.mkfifo(ignore)
    with pytest.raises(WorkdirError, match="is a device, pipe or socket"):
        pack_directory(tmp_path)
    ignore.unlink()
    ignore.symlink_to("/dev/zero")
    assert packed_names(tmp_path) == []
    ignore.unlink()
    ignore.write_bytes(b"#" * (MIB + 1))
    with pytest.raises(WorkdirError, match="is larger than"):
        pack_directory(tmp_path)
