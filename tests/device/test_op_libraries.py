"""Ops of a library that the administrator of the node allows run on its executor."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from genie import config, device
from genie.errors import ConfigError, OpRefusedError
from genie.executor.op_libraries import load_op_libraries
from genie.native import libraries
from tests.device.conftest import D0, remote_device
from tests.executor.process import running_executor, start_executor

pytestmark = pytest.mark.usefixtures("without_shared_devices")

SOURCE = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

at::Tensor scale(const at::Tensor& x, double factor) { return at::mul(x, factor); }
std::tuple<at::Tensor, at::Tensor> split_sign(at::TensorList all) {
  TORCH_CHECK(!all.empty(), "split_sign needs a tensor");
  return {all[0].clamp_min(0), all[0].clamp_max(0)};
}
TORCH_LIBRARY(genie_compiled, m) {
  m.def("scale(Tensor x, float factor) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("split_sign(Tensor[] all) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(genie_compiled, CPU, m) {
  m.impl("scale", scale);
  m.impl("split_sign", split_sign);
}
"""
MODULE = """
import torch

library = torch.library.Library("genie_written", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")

def store(x, y):
    x.copy_(y)

library.define("store_(Tensor(a!) x, Tensor y) -> ()")
library.impl("store_", store, "CPU")
"""


def attach(port: int) -> None:
    device.attach([remote_device(0, lambda: port)])


def test_ops_of_an_allowed_python_module_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "genie_written_ops.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    __import__("genie_written_ops")
    settings = {"op_libraries": {"genie_written": "genie_written_ops"}}
    with running_executor(tmp_path / "executor", fresh=True, **settings) as executor:
        attach(executor.port)
        x = torch.arange(3.0, device=D0)
        doubled = torch.ops.genie_written.twice(x)
        assert str(doubled.device) == D0
        assert doubled.tolist() == [0, 2, 4]
        torch.ops.genie_written.store_(x, doubled)
        assert x.tolist() == [0, 2, 4]
        device.detach()
    with running_executor(tmp_path / "other") as executor:
        attach(executor.port)
        with pytest.raises(OpRefusedError, match="genie_written::twice is not allowed"):
            torch.ops.genie_written.twice(torch.ones(2, device=D0)).cpu()


@pytest.mark.long("compiles a library of ops")
def test_ops_of_an_allowed_shared_object_run(tmp_path: Path) -> None:
    source, built = tmp_path / "ops.cpp", tmp_path / "libops.so"
    source.write_text(SOURCE)
    compiler = libraries.find_compiler()
    if compiler is None:
        pytest.skip(libraries.missing_compiler_reason())
    platform = libraries.TorchPlatform.from_installation()
    subprocess.run(
        [*compiler, *platform.compile_flags(), str(source), *platform.link_flags(), "-o", str(built)],
        check=True,
        timeout=300,
    )
    torch.ops.load_library(str(built))
    with running_executor(tmp_path / "executor", op_libraries={"genie_compiled": str(built)}) as executor:
        attach(executor.port)
        x = torch.tensor([-1.0, 2.0], device=D0)
        for factor in (2.0, 3.0):
            assert torch.ops.genie_compiled.scale(x, factor).tolist() == [-factor, 2 * factor]
        positive, negative = torch.ops.genie_compiled.split_sign([x])
        assert (positive.tolist(), negative.tolist()) == ([0, 2], [-1, 0])


def test_executor_does_not_start_without_a_library_that_it_needs(tmp_path: Path) -> None:
    executor = start_executor(
        tmp_path, op_libraries={"mylib": "/nonexistent/libmylib.so"}, status_path=str(tmp_path / "status")
    )
    try:
        assert executor.wait_end() == ConfigError.exit_code
    finally:
        executor.kill()
    status = (tmp_path / "status").read_text()
    assert "could not load /nonexistent/libmylib.so for the namespace 'mylib'" in status


def test_namespace_of_torch_is_refused() -> None:
    with pytest.raises(ConfigError, match="the namespace 'aten' belongs to torch"):
        load_op_libraries({"aten": "math"})
    with pytest.raises(ConfigError, match="math defines no op in the namespace 'mylib'"):
        load_op_libraries({"mylib": "math"})


@pytest.mark.parametrize("text", ["mylib=relative/lib.so", "my-lib=/usr/lib/lib.so", "mylib=a b"])
def test_setting_names_the_allowed_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENIE_AGENT_EXECUTOR_OP_LIBRARIES", text)
    with pytest.raises(ConfigError, match=r"absolute path of a shared object"):
        config.load()
    monkeypatch.setenv("GENIE_AGENT_EXECUTOR_OP_LIBRARIES", "mylib=/usr/lib/lib.so,torchvision=torchvision")
    assert dict(config.load().agent.executor_op_libraries) == {
        "mylib": "/usr/lib/lib.so",
        "torchvision": "torchvision",
    }
