"""Records valid calls of allowed ops for the fuzzer: `python -m tests.executor.fuzz_recording`.

Runs samples of torch's op database, forward and backward, and writes the calls that reach the dispatcher
below autograd to fuzz_calls.txt, at most a few of each overload. The fuzzer changes arguments of these calls.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from genie.executor.session import ALLOWED_OPS
from tests.executor.client import DTYPES
from tests.executor.fuzz_calls import RECORDED_CALLS

_CALLS_PER_OVERLOAD_MAX = 3
_SAMPLES_PER_OP = 6
_ELEMENTS_MAX = 4096
# Integer tensors up to this size are recorded with their values; of larger ones only the range.
_VALUES_MAX = 24
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class UnrecordableError(Exception):
    """An argument that fuzz_calls.txt cannot express."""


class _CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and name in ALLOWED_OPS:
            overload = f"{name}.{func._schema.overload_name}".removesuffix(".")
            calls = self.calls.setdefault(overload, [])
            if len(calls) < _CALLS_PER_OVERLOAD_MAX:
                with contextlib.suppress(UnrecordableError):
                    call = json.dumps(_encode_call(func._schema, args, kwargs or {}), separators=(",", ":"))
                    if call not in calls:
                        calls.append(call)
        return func(*args, **(kwargs or {}))


def _encode_call(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    values = []
    for index, argument in enumerate(schema.arguments):
        if index < len(args):
            value = args[index]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise UnrecordableError
        values.append(_encode(value))
    return values


def _encode(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return _encode_tensor(value)
        case list() | tuple():
            return [_encode(item) for item in value]
        case torch.dtype():
            if value not in _DTYPE_NAMES:
                raise UnrecordableError
            return DTYPES[_DTYPE_NAMES[value]][0]
        case torch.layout():
            return 0
        case torch.memory_format():
            return _MEMORY_FORMATS[value]
        case torch.device():
            return {"device": 0}
        case torch.Generator():
            return None
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
    raise UnrecordableError


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if (
        tensor.layout != torch.strided
        or tensor.dtype not in _DTYPE_NAMES
        or tensor.numel() > _ELEMENTS_MAX
        or tensor.device.type != "cpu"
    ):
        raise UnrecordableError
    encoded: dict[str, Any] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
    if tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
        plain = tensor.detach().clone()
        if plain.numel() <= _VALUES_MAX:
            encoded["values"] = plain.flatten().tolist()
        else:
            encoded["range"] = [int(plain.min()), int(plain.max())]
    return encoded


# --- calls that the op database does not reach with small samples ---------------------------------


def _calls_with_indices() -> Iterator[Callable[[], Any]]:
    aten = torch.ops.aten
    rows, weight = torch.rand(2, 3), torch.rand(5, 3)
    labels, whole = torch.tensor([[1, 2], [2, 1]]), torch.tensor([3, 1, 2])
    offsets, bags, indices = torch.tensor([0, 2]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 4, 0, 2])
    yield lambda: _run_ctc_loss(labels)
    yield lambda: _run_ctc_loss(torch.tensor([1, 2, 1]))
    for mode in (0, 1, 2):
        yield lambda mode=mode: aten._embedding_bag(
            weight, indices, offsets, False, mode, False, None, False, -1
        )
        yield lambda mode=mode: aten._embedding_bag_forward_only(weight, indices, offsets, False, mode)
        yield lambda mode=mode: aten._embedding_bag_dense_backward(
            rows,
            indices,
            bags,
            torch.tensor([2, 2]),
            torch.tensor([[1, 4, 1], [0, 2, 2]]),
            5,
            False,
            mode,
            None,
            -1,
        )
    yield lambda: aten._embedding_bag_per_sample_weights_backward(rows, weight, indices, offsets, bags, 0, -1)
    yield lambda: aten._embedding_bag(weight, indices, offsets, False, 0, False, torch.rand(4), False, -1)
    yield lambda: aten._embedding_bag(
        weight, indices, torch.tensor([0, 2, 4]), False, 1, False, None, True, -1
    )
    yield lambda: aten.embedding_renorm_(weight.clone(), indices, 0.5, 2.0)
    yield lambda: aten.embedding_dense_backward(torch.rand(4, 3), indices, 5, -1, True)
    yield lambda: aten.bincount(whole, torch.rand(3), 4)
    yield lambda: aten.isin.Scalar_Tensor(1, whole)
    yield lambda: aten.bucketize.Scalar(1, whole)
    yield lambda: aten.searchsorted.Scalar(whole.sort()[0], 2)
    yield lambda: aten.scatter.reduce(rows, 1, labels % 2, rows, reduce="add")
    yield lambda: aten.scatter.value_reduce(rows, 1, labels % 2, 2.0, reduce="multiply")
    yield lambda: aten.unique_dim(rows, 0)
    yield lambda: aten.unique_dim_consecutive(rows, 0)
    yield lambda: aten.gcd(whole, whole)
    yield lambda: aten.multilabel_margin_loss_forward(rows, torch.tensor([[1, -1, 0], [2, 0, -1]]), 1)
    yield lambda: aten.cummaxmin_backward(rows, rows, torch.zeros(2, 3, dtype=torch.int64), 1)
    yield lambda: aten._sobol_engine_draw(
        torch.zeros(2, dtype=torch.int64), 3, torch.ones(2, 30, dtype=torch.int64), 2, 1, torch.float32
    )
    yield lambda: aten._pack_padded_sequence(torch.rand(4, 2, 3), torch.tensor([4, 3]), False)


def _run_ctc_loss(targets: torch.Tensor) -> None:
    aten = torch.ops.aten
    log_probs = torch.rand(4, 2, 3).log_softmax(2)
    lengths: list[Any] = [[4, 3], [2, 1]]
    tensors = [torch.tensor(numbers) for numbers in lengths]
    for op, backward, given in (
        (aten._ctc_loss.default, aten._ctc_loss_backward.default, lengths),
        (aten._ctc_loss.Tensor, aten._ctc_loss_backward.Tensor, tensors),
    ):
        loss, alpha = op(log_probs, targets, *given, 0, False)
        backward(torch.ones(2), log_probs, targets, *given, loss, alpha, 0, False)


def _calls_of_images() -> Iterator[Callable[[], Any]]:
    aten = torch.ops.aten
    planes, volumes = torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 4, 4)
    yield lambda: aten._scaled_dot_product_flash_attention_for_cpu(planes, planes, planes)
    yield lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(
        planes, planes, planes, planes, planes, torch.rand(1, 2, 4), 0.0, False
    )
    yield lambda: aten._upsample_bicubic2d_aa(planes, [3, 3], False)
    yield lambda: aten._upsample_bicubic2d_aa_backward(torch.rand(1, 2, 3, 3), [3, 3], [1, 2, 4, 4], False)
    yield lambda: aten._upsample_bilinear2d_aa_backward(torch.rand(1, 2, 3, 3), [3, 3], [1, 2, 4, 4], False)
    yield lambda: aten._upsample_nearest_exact2d(planes, [3, 5])
    yield lambda: aten._upsample_nearest_exact2d_backward(torch.rand(1, 2, 3, 5), [3, 5], [1, 2, 4, 4])
    yield lambda: aten._upsample_nearest_exact3d(volumes, [3, 5, 2])
    yield lambda: aten._upsample_nearest_exact3d_backward(
        torch.rand(1, 2, 3, 5, 2), [3, 5, 2], [1, 2, 4, 4, 4]
    )
    yield lambda: aten.upsample_nearest3d(volumes, [3, 5, 2])
    yield lambda: aten.upsample_nearest3d_backward(torch.rand(1, 2, 3, 5, 2), [3, 5, 2], [1, 2, 4, 4, 4])
    yield lambda: aten.reflection_pad2d(planes, [1, 1, 2, 0])
    yield lambda: aten.reflection_pad2d_backward(torch.rand(1, 2, 6, 6), planes, [1, 1, 2, 0])
    yield lambda: aten.reflection_pad3d(volumes, [1, 1, 2, 0, 0, 1])
    yield lambda: aten.reflection_pad3d_backward(torch.rand(1, 2, 5, 6, 6), volumes, [1, 1, 2, 0, 0, 1])
    yield lambda: aten.replication_pad3d(volumes, [1, 1, 2, 0, 0, 1])
    yield lambda: aten.replication_pad3d_backward(torch.rand(1, 2, 5, 6, 6), volumes, [1, 1, 2, 0, 0, 1])
    yield lambda: aten._slow_conv2d_forward(planes, torch.rand(3, 2, 2, 2), [2, 2], None, [1, 1], [0, 0])
    yield lambda: aten._slow_conv2d_backward.output_mask(
        torch.rand(1, 3, 3, 3), planes, torch.rand(3, 2, 2, 2), [2, 2], [1, 1], [0, 0], [True, True, True]
    )
    yield lambda: aten.slow_conv3d_forward(
        volumes, torch.rand(3, 2, 2, 2, 2), [2, 2, 2], None, [1] * 3, [0] * 3
    )
    yield lambda: aten.slow_conv_dilated2d(
        planes, torch.rand(3, 2, 2, 2), [2, 2], None, [1, 1], [0, 0], [2, 2]
    )
    yield lambda: aten.slow_conv_dilated3d(
        volumes, torch.rand(3, 2, 2, 2, 2), [2] * 3, None, [1] * 3, [0] * 3
    )
    yield lambda: aten.slow_conv_transpose2d(planes, torch.rand(2, 3, 2, 2), [2, 2], None, [1, 1], [0, 0])
    yield lambda: aten.slow_conv_transpose3d(
        volumes, torch.rand(2, 3, 2, 2, 2), [2] * 3, None, [1] * 3, [0] * 3
    )
    yield lambda: aten.native_channel_shuffle(planes, 2)


def _other_calls() -> Iterator[Callable[[], Any]]:
    aten = torch.ops.aten
    rows, planes = torch.rand(2, 3), torch.rand(1, 2, 4, 4)
    yield lambda: aten._aminmax(rows)
    yield lambda: aten._logcumsumexp(rows, 1)
    yield lambda: aten._linalg_eigvals(torch.rand(3, 3))
    yield lambda: aten._masked_softmax(rows, rows > 0.5, 1, 2)
    yield lambda: aten._masked_softmax_backward(rows, rows, rows > 0.5, 1)
    yield lambda: aten._weight_norm_interface(rows, torch.rand(2, 1), 0)
    yield lambda: aten._weight_norm_interface_backward(rows, rows, torch.rand(2, 1), torch.rand(2, 1), 0)
    yield lambda: aten._native_batch_norm_legit.no_stats(planes, torch.rand(2), None, True, 0.1, 1e-5)
    yield lambda: aten.batch_norm_update_stats(planes, torch.rand(2), torch.rand(2), 0.1)
    yield lambda: aten.native_dropout(rows, 0.5, True)
    yield lambda: aten._stack([rows, rows], 1)
    yield lambda: aten._int_mm(torch.ones(17, 8, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8))
    yield lambda: aten.glu_jvp(torch.rand(2, 2), torch.rand(2, 4), torch.rand(2, 4), 1)


# --- the op database ------------------------------------------------------------------------------


def _samples(op: Any) -> Iterator[Any]:
    dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
    grad = op.supports_autograd and dtype.is_floating_point
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), _SAMPLES_PER_OP)


def _run(op: Any, sample: Any) -> None:
    result = op.op(sample.input, *sample.args, **sample.kwargs)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    sums = [o.abs().sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if sums:
        sum(sums[1:], sums[0]).backward()


def main() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    recorder = _CallRecorder()
    failed: Counter[str] = Counter()
    further = itertools.chain(_calls_with_indices(), _calls_of_images(), _other_calls())
    for number, call in enumerate(further):
        try:
            with recorder:
                call()
        except Exception as error:
            print(f"further call {number}: {error}")
    for op in op_db:
        try:
            for sample in _samples(op):
                with recorder:
                    _run(op, sample)
        except Exception as error:  # a sample that this build of torch cannot run
            failed[type(error).__name__] += 1
    lines = [f"{name}\t{call}\n" for name in sorted(recorder.calls) for call in recorder.calls[name]]
    RECORDED_CALLS.write_text("".join(lines), "ascii")
    print(f"{len(lines)} calls of {len(recorder.calls)} overloads; not run: {dict(failed)}")


if __name__ == "__main__":
    main()
