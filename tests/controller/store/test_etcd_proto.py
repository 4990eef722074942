"""The generated files match the .proto files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.needs import require_module

_ROOT = Path(__file__).parents[3]
_FOLDER = Path("genie/controller/store/etcd_proto")


def test_generated_files_match_the_proto_files(tmp_path: Path) -> None:
    require_module("grpc_tools.protoc", package="grpcio-tools")
    (tmp_path / _FOLDER).mkdir(parents=True)
    protos = [str(_FOLDER / "kv.proto"), str(_FOLDER / "rpc.proto")]
    for proto in protos:
        shutil.copy(_ROOT / proto, tmp_path / proto)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    subprocess.run([*protoc, "--python_out=.", "--pyi_out=.", *protos], cwd=tmp_path, check=True)
    subprocess.run([*protoc, "--grpc_python_out=.", protos[1]], cwd=tmp_path, check=True)
    made = {file.name: file.read_text() for file in (tmp_path / _FOLDER).iterdir()}
    assert len(made) == 7
    kept = {name: (_ROOT / _FOLDER / name).read_text() for name in made}
    assert made == kept, "run the commands in etcd_proto/__init__.py"
