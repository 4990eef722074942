"""Autograd: graphs, hooks, double backward, custom functions and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.device.differential.snippets import Inputs, Table


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient")


class _WrongShape(_Failing):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sum()


class _MarkedDirty(_Failing):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def _backward(x: Tensor, y: Tensor, **options: Any) -> Tensor | None:
    y.sum().backward(**options)
    return x.grad


SNIPPETS = Table(
    backward=lambda on: _backward(x := on.normal(3, grad=True), x.exp()),
    backward_needs_scalar=lambda on: on.normal(3, grad=True).exp().backward(),
    backward_with_gradient=lambda on: (x := on.normal(3, grad=True), x.exp().backward(on.count(3)), x.grad),
    backward_wrong_gradient=lambda on: on.normal(3, grad=True).exp().backward(on.count(4)),
    backward_of_leaf_without_grad=lambda on: on.normal(3).sum().backward(),
    backward_twice=lambda on: (y := on.normal(3, grad=True).exp().sum(), y.backward(), y.backward()),
    backward_of_integers=lambda on: on.count(3, dtype=torch.int64, grad=True),
    grad_of_broadcast=lambda on: _backward(x := on.normal(3, 1, grad=True), x * on.normal(3, 4)),
    grad_of_expand=lambda on: _backward(x := on.normal(3, 1, grad=True), x.expand(3, 4).exp()),
    grad_of_index=lambda on: _backward(x := on.normal(4, grad=True), x[on.tensor([0, 0, 2])]),
    grad_of_view=lambda on: _backward(x := on.normal(3, 4, grad=True), x.t()[1:].reshape(-1) ** 2),
    grad_of_copy_to_cpu=lambda on: _backward(x := on.normal(3, grad=True), x.cpu() ** 2),
    grad_of_copy_from_cpu=lambda on: _backward(x := torch.ones(3, requires_grad=True), x.to(on.device) ** 2),
    grad_of_dtype_change=lambda on: _backward(x := on.normal(3, grad=True), x.double() ** 2),
    grad_of_where=lambda on: _backward(x := on.normal(3, grad=True), torch.where(on.bools(3), x, -x)),
    grad_of_max=lambda on: _backward(x := on.normal(3, 4, grad=True), x.max(1).values),
    grad_of_ties=lambda on: _backward(x := torch.ones(4, device=on.device, requires_grad=True), x.max()),
    grad_of_sort=lambda on: _backward(x := on.normal(5, grad=True), x.sort().values * on.count(5)),
    grad_of_cumsum=lambda on: _backward(x := on.normal(5, grad=True), x.cumsum(0) ** 2),
    grad_of_prod_with_zero=lambda on: _backward(x := on.count(4, grad=True), x.prod()),
    grad_of_norm_at_zero=lambda on: _backward(
        x := torch.zeros(3, device=on.device, requires_grad=True), x.norm()
    ),
    grad_of_sqrt_at_zero=lambda on: _backward(
        x := torch.zeros(2, device=on.device, requires_grad=True), x.sqrt()
    ),
    grad_of_abs_at_zero=lambda on: _backward(
        x := torch.zeros(2, device=on.device, requires_grad=True), x.abs()
    ),
    grad_of_clamp=lambda on: _backward(x := on.normal(5, grad=True), x.clamp(-0.5, 0.5)),
    grad_of_conv=lambda on: torch.autograd.grad(
        F.conv2d(on.normal(1, 2, 5, 5), w := on.normal(3, 2, 3, 3, grad=True)).square().sum(), w
    ),
    grad_of_batch_norm=lambda on: _backward(
        x := on.normal(4, 3, grad=True), F.batch_norm(x, None, None, training=True) ** 3
    ),
    grad_of_layer_norm=lambda on: _backward(x := on.normal(4, 3, grad=True), F.layer_norm(x, (3,)) ** 3),
    grad_of_embedding=lambda on: torch.autograd.grad(
        F.embedding(on.integers(5, below=4), w := on.normal(4, 3, grad=True), padding_idx=0).sum(), w
    ),
    grad_of_cross_entropy=lambda on: _backward(
        x := on.normal(4, 5, grad=True), F.cross_entropy(x, on.integers(4, below=5), label_smoothing=0.1)
    ),
    grad_of_matrix_inverse=lambda on: _backward(x := on.normal(3, 3, grad=True), torch.linalg.inv(x)),
    grad_of_eigenvalues=lambda on: _backward(
        x := on.normal(3, 3, grad=True), torch.linalg.eigvalsh(x + x.t())
    ),
    grad_of_svd=lambda on: _backward(x := on.normal(3, 2, grad=True), torch.linalg.svdvals(x)),
    grad_of_fft=lambda on: _backward(x := on.normal(6, grad=True), torch.fft.rfft(x).abs()),
    grad_of_attention=lambda on: _backward(
        x := on.normal(1, 2, 3, 4, grad=True), F.scaled_dot_product_attention(x, x, x)
    ),
    retain_graph=lambda on: (
        x := on.normal(3, grad=True),
        y := x.exp().sum(),
        y.backward(retain_graph=True),
        y.backward(),
        x.grad,
    ),
    unused_input=lambda on: torch.autograd.grad(on.normal(3, grad=True).sum(), on.normal(3, grad=True)),
    unused_input_allowed=lambda on: torch.autograd.grad(
        on.normal(3, grad=True).sum(), on.normal(3, grad=True), allow_unused=True
    ),
    materialized_grads=lambda on: torch.autograd.grad(
        on.normal(3, grad=True).sum(), on.normal(3, grad=True), allow_unused=True, materialize_grads=True
    ),
    batched_grad=lambda on: torch.autograd.grad(
        (x := on.normal(3, grad=True)) ** 2, x, torch.eye(3, device=on.device), is_grads_batched=True
    ),
    double_backward=lambda on: torch.autograd.grad(
        torch.autograd.grad((x := on.normal(3, grad=True)).pow(3).sum(), x, create_graph=True)[0].sum(), x
    ),
    double_backward_of_conv=lambda on: torch.autograd.grad(
        torch.autograd.grad(
            F.conv2d(x := on.normal(1, 1, 4, 4, grad=True), on.normal(1, 1, 2, 2)).pow(3).sum(),
            x,
            create_graph=True,
        )[0]
        .pow(2)
        .sum(),
        x,
    ),
    triple_backward=lambda on: torch.autograd.functional.hessian(lambda x: x.pow(3).sum(), on.normal(3)),
    jacobian=lambda on: torch.autograd.functional.jacobian(lambda x: x.exp() * x[0], on.normal(3)),
    functional_vjp=lambda on: torch.autograd.functional.vjp(lambda x: x.exp(), on.normal(3), on.count(3)),
    functional_hvp=lambda on: torch.autograd.functional.hvp(
        lambda x: x.exp().sum(), on.normal(3), on.count(3)
    ),
    in_place_on_leaf=lambda on: on.normal(3, grad=True).add_(1),
    in_place_on_saved=lambda on: (
        x := on.normal(3, grad=True).exp(),
        y := x.exp(),
        x.add_(1),
        y.sum().backward(),
    ),
    in_place_on_view_of_leaf=lambda on: on.normal(3, grad=True)[0].add_(1),
    in_place_then_backward=lambda on: _backward(x := on.normal(3, grad=True), x.clone().mul_(2).add_(1)),
    in_place_through_view=lambda on: (
        x := on.normal(3, grad=True),
        y := x.clone(),
        y[1:].mul_(5),
        y.sum().backward(),
        x.grad,
    ),
    detach_in_place=lambda on: (x := on.normal(3, grad=True).exp(), x.detach_())[0],
    requires_grad_of_result=lambda on: (on.normal(3, grad=True) > 0, on.normal(3, grad=True).argmax()),
    grad_function_name=lambda on: type((on.normal(3, grad=True) * 2).grad_fn).__name__,
    grad_function_of_linear=lambda on: F.linear(on.normal(2, 3), on.normal(4, 3, grad=True)).grad_fn.name(),
    next_functions=lambda on: len((on.normal(3, grad=True) * on.normal(3, grad=True)).grad_fn.next_functions),
    leaf_flags=lambda on: [(x := on.normal(3, grad=True)).is_leaf, (x * 2).is_leaf, on.count(1).is_leaf],
    retain_grad=lambda on: (
        x := on.normal(3, grad=True),
        y := x * 2,
        y.retain_grad(),
        y.sum().backward(),
        y.grad,
        y.retains_grad,
    ),
    grad_of_non_leaf=lambda on: (x := on.normal(3, grad=True), y := x * 2, y.sum().backward(), y.grad)[3],
    set_grad_wrong_shape=lambda on: setattr(on.normal(3, grad=True), "grad", on.normal(4)),
    set_grad_wrong_device=lambda on: setattr(on.normal(3, grad=True), "grad", torch.zeros(3, device="meta")),
    set_grad_wrong_dtype=lambda on: setattr(
        on.normal(3, grad=True), "grad", on.normal(3, dtype=torch.float64)
    ),
    accumulated_grad=lambda on: (
        x := on.normal(3, grad=True),
        x.sum().backward(),
        (x * 2).sum().backward(),
        x.grad,
    ),
    custom_function=lambda on: _backward(x := on.normal(3, grad=True), _Cube.apply(x)),
    custom_function_double=lambda on: torch.autograd.grad(
        torch.autograd.grad(_Cube.apply(x := on.normal(3, grad=True)).sum(), x, create_graph=True)[0].sum(), x
    ),
    custom_function_raises=lambda on: _Failing.apply(on.normal(3, grad=True)).sum().backward(),
    custom_function_wrong_shape=lambda on: _WrongShape.apply(on.normal(3, grad=True)).sum().backward(),
    custom_function_in_place=lambda on: _backward(
        x := on.normal(3, grad=True), _MarkedDirty.apply(x.clone())
    ),
    gradcheck=lambda on: torch.autograd.gradcheck(_Cube.apply, on.normal(3, dtype=torch.float64, grad=True)),
    gradcheck_of_conv=lambda on: torch.autograd.gradcheck(
        F.conv1d,
        (on.normal(1, 2, 4, dtype=torch.float64, grad=True), on.normal(1, 2, 2, dtype=torch.float64)),
    ),
    checkpoint=lambda on: _backward(
        x := on.normal(3, grad=True), checkpoint(lambda y: y.exp().sin(), x, use_reentrant=False)
    ),
    checkpoint_reentrant=lambda on: _backward(
        x := on.normal(3, grad=True), checkpoint(lambda y: y.exp().sin(), x, use_reentrant=True)
    ),
    checkpoint_with_dropout=lambda on: _backward(
        x := on.normal(30, grad=True), checkpoint(lambda y: F.dropout(y, 0.5) ** 2, x, use_reentrant=False)
    ),
    checkpoint_sequential=lambda on: _backward(
        x := on.normal(3, grad=True),
        checkpoint_sequential([torch.exp, torch.sin, torch.tanh], 2, x, use_reentrant=False),
    ),
    forward_mode=lambda on: torch.func.jvp(lambda x: x.exp() * x, (on.normal(3),), (on.count(3),)),
    grad_of_zero_size=lambda on: _backward(x := on.normal(0, 3, grad=True), x @ on.normal(3, 2)),
)


@SNIPPETS.define
def tensor_hook_changes_gradient(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    handle = x.register_hook(lambda grad: grad * 10)
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    return x.grad


@SNIPPETS.define
def hook_of_intermediate(on: Inputs) -> object:
    x, seen = on.normal(3, grad=True), []
    y = x * 2
    y.register_hook(seen.append)
    y.exp().sum().backward()
    return seen


@SNIPPETS.define
def hook_that_raises(on: Inputs) -> object:
    x = on.normal(3, grad=True)

    def fail(grad: Tensor) -> None:
        raise KeyError("hook")

    x.register_hook(fail)
    x.sum().backward()
    return x.grad


@SNIPPETS.define
def hook_of_wrong_shape(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    x.register_hook(lambda grad: grad[:1])
    x.sum().backward()
    return x.grad


@SNIPPETS.define
def post_accumulate_hook(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))
    (x**2).sum().backward()
    return x.grad


@SNIPPETS.define
def node_hooks(on: Inputs) -> object:
    x, seen = on.normal(3, grad=True), []
    y = x.exp()
    y.grad_fn.register_prehook(lambda grads: seen.append(("pre", grads)))
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append(("post", inputs, outputs)))
    y.sum().backward()
    return seen


@SNIPPETS.define
def module_hooks(on: Inputs) -> object:
    layer, seen = torch.nn.Linear(3, 2, bias=False, device=on.device), []
    with torch.no_grad():
        layer.weight.copy_(on.normal(2, 3))
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,))
    layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append((inputs, outputs)))
    x = on.normal(4, 3, grad=True)
    layer(x).sum().backward()
    return seen, x.grad, layer.weight.grad


@SNIPPETS.define
def gradient_penalty(on: Inputs) -> object:
    layer = torch.nn.Linear(3, 1, device=on.device)
    with torch.no_grad():
        layer.weight.copy_(on.normal(1, 3))
        layer.bias.zero_()
    x = on.normal(4, 3, grad=True)
    (grad,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).pow(2).mean().backward()
    return layer.weight.grad


@SNIPPETS.define
def saved_tensor_freed(on: Inputs) -> object:
    y = on.normal(3, grad=True).exp()
    node = y.grad_fn
    y.sum().backward()
    return node._saved_result


@SNIPPETS.define
def multi_grad_hook(on: Inputs) -> object:
    seen: list[Any] = []
    x, y = on.normal(2, grad=True), on.normal(2, grad=True)
    handle = torch.autograd.graph.registermulti_grad_hook((x, y), seen.append)
    (x * y).sum().backward()
    handle.remove()
    return seen
