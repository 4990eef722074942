"""torch.func, tracing, FX and export."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn import functional as F  # noqa: N812

from tests.device.differential.snippets import Inputs, Table


def _layer(on: Inputs) -> torch.nn.Module:
    layer = torch.nn.Linear(3, 2, device=on.device)
    with torch.no_grad():
        layer.weight.copy_(on.normal(2, 3))
        layer.bias.copy_(on.normal(2))
    return layer


SNIPPETS = Table(
    vmap=lambda on: vmap(lambda x: x.sum())(on.normal(3, 4)),
    vmap_dims=lambda on: vmap(torch.mul, in_dims=(1, None), out_dims=1)(on.normal(3, 4), on.normal(3)),
    vmap_matmul=lambda on: vmap(torch.mv)(on.normal(2, 3, 4), on.normal(2, 4)),
    vmap_nested=lambda on: vmap(vmap(torch.dot))(on.normal(2, 3, 4), on.normal(2, 3, 4)),
    vmap_index=lambda on: vmap(lambda x, i: x.gather(0, i))(on.normal(3, 4), on.integers(3, 2, below=4)),
    vmap_where=lambda on: vmap(lambda x: torch.where(x > 0, x, 0))(on.normal(3, 4)),
    vmap_branch=lambda on: vmap(lambda x: x if x > 0 else -x)(on.normal(3)),
    vmap_item=lambda on: vmap(lambda x: x.item())(on.normal(3)),
    vmap_in_place=lambda on: vmap(lambda x: x.clone().add_(1))(on.normal(3)),
    vmap_wrong_sizes=lambda on: vmap(torch.add)(on.normal(3), on.normal(4)),
    vmap_random_error=lambda on: vmap(lambda x: x + torch.rand_like(x))(on.normal(3)),
    vmap_random_different=lambda on: vmap(lambda x: x + torch.rand_like(x), randomness="different")(
        on.normal(3)
    ),
    vmap_random_same=lambda on: vmap(lambda x: x + torch.rand_like(x), randomness="same")(on.normal(3)),
    vmap_chunks=lambda on: vmap(torch.exp, chunk_size=2)(on.normal(5)),
    vmap_conv=lambda on: vmap(lambda x: F.conv1d(x, on.count(1, 2, 2)))(on.normal(3, 1, 2, 5)),
    vmap_attention=lambda on: vmap(F.scaled_dot_product_attention)(
        *(on.normal(2, 1, 2, 3, 4) for _ in range(3))
    ),
    vmap_linalg=lambda on: vmap(torch.linalg.inv)(on.normal(2, 3, 3)),
    grad=lambda on: grad(lambda x: x.sin().sum())(on.normal(3)),
    grad_of_grad=lambda on: grad(grad(lambda x: x.sin()))(on.normal(1)[0]),
    grad_needs_scalar=lambda on: grad(lambda x: x.sin())(on.normal(3)),
    grad_argnums=lambda on: grad(lambda x, y: (x * y).sum(), argnums=(0, 1))(on.normal(3), on.normal(3)),
    grad_with_aux=lambda on: grad(lambda x: (x.sum(), x * 2), has_aux=True)(on.normal(3)),
    grad_of_attention=lambda on: grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(
        on.normal(1, 2, 3, 4)
    ),
    per_sample_grad=lambda on: vmap(grad(lambda w, x: (w @ x).tanh().sum()), in_dims=(None, 0))(
        on.normal(2, 3), on.normal(4, 3)
    ),
    jvp=lambda on: jvp(torch.sin, (on.normal(3),), (on.normal(3),)),
    jvp_of_matmul=lambda on: jvp(
        torch.matmul, (on.normal(2, 3), on.normal(3, 2)), (on.normal(2, 3), on.normal(3, 2))
    ),
    vjp=lambda on: (f := vjp(torch.sin, on.normal(3)))[0] + f[1](on.count(3))[0],
    jacrev=lambda on: jacrev(lambda x: x.exp() * x[0])(on.normal(3)),
    jacfwd=lambda on: jacfwd(lambda x: x.exp() * x[0])(on.normal(3)),
    hessian=lambda on: hessian(lambda x: x.pow(3).sum())(on.normal(3)),
    linearize=lambda on: linearize(torch.sin, on.normal(3))[1](on.count(3)),
    func_checks_levels=lambda on: grad(lambda x: vmap(lambda y: (y * x).sum())(on.count(2, 3)).sum())(
        on.normal(3)
    ),
    functional_call=lambda on: functional_call(
        _layer(on), {"weight": on.normal(2, 3), "bias": on.normal(2)}, (on.normal(4, 3),)
    ),
    functional_call_missing=lambda on: functional_call(
        _layer(on), {"nothing": on.normal(1)}, (on.normal(4, 3),), strict=True
    ),
    functionalize=lambda on: torch.func.functionalize(lambda x: x.clone().view(-1).add_(1))(on.normal(2, 2)),
    fx_trace=lambda on: fx.symbolic_trace(_layer(on))(on.normal(4, 3)),
    fx_code=lambda on: fx.symbolic_trace(lambda x: (x + 1).relu()).code,
    fx_interpreter=lambda on: fx.Interpreter(fx.symbolic_trace(_layer(on))).run(on.normal(4, 3)),
    jit_trace=lambda on: torch.jit.trace(lambda x: x.exp() + 1, on.normal(3))(on.normal(3)),
    make_fx=lambda on: str(
        __import__("torch.fx.experimental.proxy_tensor", fromlist=["make_fx"])
        .make_fx(lambda x: x.sin().cos())(on.normal(3))
        .code
    ),
    make_fx_fake=lambda on: str(
        __import__("torch.fx.experimental.proxy_tensor", fromlist=["make_fx"])
        .make_fx(lambda x: x.sin() @ x, tracing_mode="fake")(on.normal(3))
        .code
    ),
    saved_jvp_of_custom=lambda on: torch.func.jvp(lambda x: x**3, (on.normal(2),), (on.count(2),)),
)


@SNIPPETS.define
def ensemble(on: Inputs) -> object:
    layers = [_layer(on) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    base = layers[0]

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(base, (parameters, buffers), (x,))

    return vmap(call, in_dims=(0, 0, None))(parameters, buffers, on.normal(4, 3))


@SNIPPETS.define
def fake_mode(on: Inputs) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y = mode.from_tensor(on.normal(3, 4)) @ torch.empty(4, 5, device=on.device)
        return tuple(y.shape), y.dtype, y.device.type == on.device.type


@SNIPPETS.define
def fake_convolution_keeps_format(on: Inputs) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        image = mode.from_tensor(on.normal(1, 3, 5, 5))
        return tuple(F.conv2d(image, torch.empty(2, 3, 3, 3, device=on.device)).shape)


@SNIPPETS.define
def dispatch_mode_sees_ops(on: Inputs) -> object:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    x, y = on.normal(2, 3), on.normal(3, 2)
    with Recorder() as recorder:
        (x @ y).relu().sum()
    return recorder.names


@SNIPPETS.define
def tensor_subclass(on: Inputs) -> object:
    class Named(torch.Tensor):
        pass

    y = on.normal(3).as_subclass(Named) + 1
    return type(y).__name__, y.as_subclass(torch.Tensor)


@SNIPPETS.define
def torch_function_mode(on: Inputs) -> object:
    from torch.overrides import TorchFunctionMode

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.add else result

    x = on.normal(3)
    with Doubling():
        return torch.add(x, 1)


@SNIPPETS.define
def export_program(on: Inputs) -> object:
    program = torch.export.export(_layer(on), (on.normal(4, 3),))
    return program.module()(on.normal(4, 3)), [str(node.op) for node in program.graph.nodes]


@SNIPPETS.define
def lazy_module(on: Inputs) -> object:
    layer = torch.nn.LazyLinear(2, bias=False, device=on.device)
    return layer(on.normal(4, 3)).shape, layer.weight.shape


@SNIPPETS.define
def parametrization(on: Inputs) -> object:
    from torch.nn.utils import parametrizations

    layer = parametrizations.weight_norm(_layer(on))
    return layer(on.normal(4, 3)), layer.weight


@SNIPPETS.define
def meta_module_to_device(on: Inputs) -> object:
    layer = torch.nn.Linear(3, 2, device="meta").to_empty(device=on.device)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(2)
    return layer(on.normal(4, 3))
