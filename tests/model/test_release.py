"""Which releases work together."""

from __future__ import annotations

import pytest

from genie.errors import VersionError
from genie.model.release import OWN_RELEASE, Release, check_releases_work_together, parse_release
from genie.version import __version__


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.1.0", (0, 1)),
        ("1.12", (1, 12)),
        ("2.3.4rc1", (2, 3)),
        ("2.3.dev0+local.7", (2, 3)),
        ("2.3-alpha", (2, 3)),
        ("2.3rc1", (2, 3)),
    ],
)
def test_release_is_major_and_minor_version(version: str, release: tuple[int, int]) -> None:
    assert parse_release(version) == release


@pytest.mark.parametrize("version", ["", "1", "x.1", "1.x", "1.2\n", "-1.2", "1..2", "9999999.1", "1.2x\n"])
def test_other_text_is_no_version(version: str) -> None:
    with pytest.raises(VersionError, match="is not a version of Genie"):
        parse_release(version)


def test_minor_versions_one_apart_work_together() -> None:
    release = Release(1, 4)
    assert [minor for minor in range(9) if release.works_with(Release(1, minor))] == [3, 4, 5]
    assert not release.works_with(Release(2, 4))


def test_error_names_both_versions_and_the_side_to_upgrade() -> None:
    newer = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + 2}.0"
    with pytest.raises(
        VersionError, match=f"the controller a:1 runs Genie {newer}, this client runs {__version__}"
    ) as caught:
        check_releases_work_together(peer_version=newer, peer="the controller a:1", this_side="this client")
    assert caught.value.hint.startswith("upgrade this client first, one minor version at a time")
