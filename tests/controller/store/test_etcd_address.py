"""The etcd URL: its format and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.controller.store.etcd import EtcdStore
from genie.controller.store.etcd_address import EtcdAddress, parse_etcd_url
from genie.errors import ConfigError


def test_etcd_plaintext_url_lists_endpoints() -> None:
    assert parse_etcd_url("etcd://one:1,two,[::1]:3,[fe80::1]") == EtcdAddress(
        ("one:1", "two:2379", "[::1]:3", "[fe80::1]:2379")
    )


def test_etcd_tls_url_lists_files_and_user() -> None:
    url = "etcds://one?ca=/c/a.pem&cert=/c/c.pem&key=/c/k%20y.pem&user=genie&password_file=/c/pw&namespace=/prod/"
    assert parse_etcd_url(url) == EtcdAddress(
        ("one:2379",),
        uses_tls=True,
        ca_file=Path("/c/a.pem"),
        certificate_file=Path("/c/c.pem"),
        key_file=Path("/c/k y.pem"),
        user="genie",
        password_file=Path("/c/pw"),
        namespace="/prod/",
    )


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://one", "not an etcd URL"),
        ("etcd://", "not HOST:PORT"),
        ("etcd://one,,two", "not HOST:PORT"),
        ("etcd://one:port", "HOST:PORT"),
        ("etcd://one:0", "HOST:PORT"),
        ("etcd://one:99999", "HOST:PORT"),
        ("etcd://me:secret@one", "password_file"),
        ("etcd://one/path", "namespace"),
        ("etcd://one?cacert=/x", "unknown parameter 'cacert'"),
        ("etcd://one?namespace", "invalid query string"),
        ("etcds://one?ca=", "'ca' is empty"),
        ("etcds://one?ca=/a&ca=/b", "repeated"),
        ("etcd://one?ca=/a", "etcds"),
        ("etcds://one?cert=/a", "cert and key"),
        ("etcds://one?user=me", "password_file"),
        ("etcd://one?user=me&password_file=/p", "without TLS"),
        ("etcd://one?namespace=genie", "namespace"),
        ("etcd://one?namespace=/" + "x" * 200 + "/", "namespace"),
    ],
)
def test_error_names_the_invalid_part_of_an_etcd_url(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_etcd_url(url)
    assert "secret" not in str(caught.value)


def test_password_is_allowed_over_loopback() -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        assert parse_etcd_url(f"etcd://{host}?user=me&password_file=/p").user == "me"


@pytest.mark.parametrize("parameter", ["ca", "cert", "key", "password_file"])
async def test_missing_file_is_named_with_its_parameter(parameter: str, tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.write_text("x")
    files = dict.fromkeys(("ca", "cert", "key", "password_file"), there) | {parameter: missing}
    query = "&".join(f"{name}={path}" for name, path in files.items())
    with pytest.raises(
        ConfigError, match=rf"could not read the file of \?{parameter}= in the store URL: {missing}"
    ):
        await EtcdStore.open(f"etcds://127.0.0.1:1?user=me&{query}")
