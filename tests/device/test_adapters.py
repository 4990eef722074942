"""Libraries that choose devices by name accept remote_accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genie.device import adapters
from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")

# safetensors is a Rust extension with a list of device names; accelerate goes through the devices it knows.
STAND_INS = {
    "safetensors/__init__.py": """
import torch as pytorch

class safe_open:
    def __init__(self, filename, framework, device="cpu"):
        if device != "cpu" and not isinstance(device, int):
            raise ValueError(f"device {device} is invalid")
        self.tensors = pytorch.load(filename)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.tensors = None
    def keys(self):
        return list(self.tensors)
    def get_tensor(self, name):
        return self.tensors[name]
""",
    "safetensors/torch.py": """
from safetensors import safe_open

def load_file(filename, device="cpu"):
    with safe_open(filename, framework="pt", device=device) as f:
        return {name: f.get_tensor(name) for name in f.keys()}
""",
    "accelerate/__init__.py": "",
    "accelerate/state.py": """
import torch

class PartialState:
    @property
    def default_device(self):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
""",
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages with the interface of safetensors and accelerate, and a saved file."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"weight": torch.arange(6.0).view(2, 3)}, tmp_path / "saved")
    before = list(sys.meta_path)
    yield tmp_path / "saved"
    sys.meta_path[:] = before
    for name in [each for each in sys.modules if each.partition(".")[0] in ("safetensors", "accelerate")]:
        del sys.modules[name]


def test_safetensors_are_loaded_to_a_device(stand_ins: Path) -> None:
    import_module = __import__("safetensors.torch")
    assert import_module.safe_open is import_module.torch.safe_open
    for device in (D1, torch.device(D1)):
        loaded = import_module.torch.load_file(stand_ins, device=device)
        assert str(loaded["weight"].device) == D1
        assert loaded["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with import_module.safe_open(stand_ins, framework="pt", device=D0) as file:
        assert file.keys() == ["weight"]
        assert str(file.get_tensor("weight").device) == D0
    assert import_module.torch.load_file(stand_ins)["weight"].device.type == "cpu"
    with pytest.raises(ValueError, match="device tpu is invalid"):
        import_module.torch.load_file(stand_ins, device="tpu")


def test_slices_of_safetensors_are_copied_to_a_device() -> None:
    class File:
        def get_slice(self, name: str) -> torch.Tensor:
            return torch.arange(6.0).view(2, 3)

    part = adapters.RemoteSafeOpen(File(), D0).get_slice("weight")
    assert part.shape == (2, 3)
    assert str(part[1:, :2].device) == D0
    assert part[1:, :2].tolist() == [[3, 4]]


def test_accelerate_on_the_cpu_is_warned_about(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = __import__("accelerate.state").state
    with pytest.warns(UserWarning, match="ACCELERATE_TORCH_DEVICE=remote_accelerator:0"):
        assert state.PartialState().default_device == torch.device("cpu")


def test_device_mesh_accepts_the_name() -> None:
    import torch.distributed as dist
    from torch.distributed import device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("remote_accelerator", (1,))
        assert mesh.device_type == "remote_accelerator"
        assert device_mesh.init_device_mesh is dist.init_device_mesh
        with pytest.raises(RuntimeError, match="Device type with index is not supported"):
            dist.init_device_mesh("remote_accelerator:0", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # raised by torch at import
def test_compile_backend_needs_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry as backends

    assert backends.lookup_backend("genie").__module__ == "genie.device.adapters"


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_default_backend_compiles_on_the_executor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(D0)
    x = torch.ones(3, 4, device=D0)
    compiled = torch.compile(model)
    expected = model(x)
    for _ in range(3):
        torch.testing.assert_close(compiled(x).cpu(), expected.cpu())
    compiled(x).sum().backward()
    reports = torch.remote_accelerator.graph_reports(0)  # type: ignore[attr-defined]
    assert any(report.how == "inductor" for report in reports), reports
