"""Saving, threads, processes, op libraries, random numbers, modules, optimizers and errors."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.device.differential.snippets import Inputs, Table


def _saved(value: Any, on: Inputs, **options: Any) -> Any:
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return torch.load(data, **options)


def _network(on: Inputs) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(on.device)


def _trained(on: Inputs, make: Any, *, steps: int = 3, **options: Any) -> object:
    net = _network(on)
    optimizer = make(net.parameters(), **options)
    x, y = on.normal(6, 4), on.integers(6, below=2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.detach() for p in net.parameters()]


def _applied(on: Inputs, module: nn.Module, *inputs: Tensor) -> object:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(on.normal(*parameter.shape) * 0.3)
    return module.to(on.device).eval()(*inputs)


def _in_thread(work: Any) -> Any:
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results


def _seeded(on: Inputs, draw: Any) -> object:
    torch.manual_seed(3)
    return draw(), draw()


SNIPPETS = Table(
    save_and_load=lambda on: _saved({"x": on.count(2, 3).t(), "n": 1}, on),
    save_views_share=lambda on: _saved([x := on.count(4), x[1:3]], on),
    save_parameter=lambda on: _saved(nn.Parameter(on.normal(3)), on),
    save_conj=lambda on: _saved(on.complex(2).conj(), on),
    save_channels_last=lambda on: _saved(on.normal(1, 2, 3, 3).to(memory_format=torch.channels_last), on),
    save_expanded=lambda on: _saved(on.count(3, 1).expand(3, 4), on),
    save_float8=lambda on: _saved(on.count(3).to(torch.float8_e4m3fn), on).float(),
    save_empty=lambda on: _saved(on.count(0, 3), on),
    save_grad=lambda on: _saved(on.normal(3, grad=True), on),
    load_on_cpu=lambda on: _saved(on.count(3), on, map_location="cpu"),
    load_on_device=lambda on: _saved(torch.arange(3.0), on, map_location=on.device),
    load_memory_mapped_fails=lambda on: _saved(on.count(3), on, mmap=True),
    save_state_dict=lambda on: _saved(_network(on).state_dict(), on),
    pickle=lambda on: pickle.loads(pickle.dumps(on.count(2, 3))),
    pickle_shares=lambda on: pickle.loads(pickle.dumps([x := on.count(3), x])),
    deepcopy=lambda on: copy.deepcopy(on.count(2, 3).t()),
    deepcopy_shares=lambda on: copy.deepcopy([x := on.count(3), x.view(3, 1), x]),
    deepcopy_non_leaf=lambda on: copy.deepcopy(on.normal(3, grad=True) * 2),
    deepcopy_with_grad=lambda on: (x := on.normal(3, grad=True), x.sum().backward(), copy.deepcopy(x).grad)[
        2
    ],
    shallow_copy=lambda on: copy.copy(on.count(3)),
    deepcopy_module=lambda on: copy.deepcopy(_network(on))(on.normal(2, 4)),
    attributes_are_copied=lambda on: (x := on.count(1), setattr(x, "note", "n"), copy.deepcopy(x).note)[2],
    reduce_names_device=lambda on: on.count(2).__reduce_ex__(2)[0].__name__,
    repr=lambda on: repr(on.count(2, 2)),
    repr_of_grad=lambda on: repr(on.normal(2, grad=True) * 0),
    repr_of_empty=lambda on: repr(on.count(0, 2)),
    repr_of_parameter=lambda on: repr(nn.Parameter(on.count(2))),
    repr_of_module=lambda on: repr(_network(on)),
    str_of_many=lambda on: str(on.count(2000)),
    hash_differs=lambda on: hash(x := on.count(1)) == hash(on.count(1)) or x is None,
    thread=lambda on: _in_thread(lambda: on.count(3) + 1),
    thread_raises=lambda on: _in_thread(lambda: on.count(3) @ on.count(4)),
    thread_backward=lambda on: _in_thread(
        lambda: torch.autograd.grad((x := on.normal(3, grad=True)).exp().sum(), x)
    ),
    thread_grad_mode=lambda on: _in_thread(torch.is_grad_enabled),
    default_dtype_in_thread=lambda on: _in_thread(torch.get_default_dtype),
    rand=lambda on: _seeded(on, lambda: torch.rand(3, device=on.device)),
    randn=lambda on: _seeded(on, lambda: torch.randn(17, device=on.device)),
    randn_half=lambda on: _seeded(on, lambda: torch.randn(5, device=on.device, dtype=torch.float16)),
    randn_complex=lambda on: _seeded(on, lambda: torch.randn(3, device=on.device, dtype=torch.complex64)),
    randint=lambda on: _seeded(on, lambda: torch.randint(0, 9, (5,), device=on.device)),
    randperm=lambda on: _seeded(on, lambda: torch.randperm(7, device=on.device)),
    rand_like=lambda on: _seeded(on, lambda: torch.rand_like(on.count(2, 3).t())),
    bernoulli=lambda on: _seeded(on, lambda: torch.bernoulli(torch.full((8,), 0.3, device=on.device))),
    bernoulli_invalid=lambda on: torch.bernoulli(on.tensor([2.0])),
    multinomial=lambda on: _seeded(
        on, lambda: torch.multinomial(on.tensor([1.0, 2.0, 3.0]), 5, replacement=True)
    ),
    multinomial_invalid=lambda on: torch.multinomial(on.tensor([-1.0, 2.0]), 1),
    normal_in_place=lambda on: _seeded(on, lambda: torch.empty(4, device=on.device).normal_(1, 2)),
    uniform_in_place=lambda on: _seeded(on, lambda: torch.empty(2, 3, device=on.device).t().uniform_(-1, 1)),
    exponential=lambda on: _seeded(on, lambda: torch.empty(4, device=on.device).exponential_()),
    poisson=lambda on: _seeded(on, lambda: torch.poisson(on.count(4))),
    dropout=lambda on: _seeded(on, lambda: F.dropout(torch.ones(16, device=on.device))),
    alpha_dropout=lambda on: _seeded(
        on, lambda: F.alpha_dropout(torch.ones(8, device=on.device), training=True)
    ),
    gumbel_softmax=lambda on: _seeded(on, lambda: F.gumbel_softmax(torch.zeros(5, device=on.device))),
    random_out=lambda on: _seeded(on, lambda: torch.rand(3, out=torch.empty(3, device=on.device))),
    generator=lambda on: torch.rand(3, device=on.device, generator=torch.Generator(on.device).manual_seed(5)),
    generator_of_wrong_device=lambda on: torch.rand(3, device="meta", generator=torch.Generator(on.device)),
    generator_state=lambda on: (
        g := torch.Generator(on.device).manual_seed(5),
        s := g.get_state(),
        a := torch.rand(2, generator=g, device=on.device),
        g.set_state(s),
        torch.equal(a, torch.rand(2, generator=g, device=on.device)),
    )[4],
    initial_seed=lambda on: torch.Generator(on.device).manual_seed(11).initial_seed(),
    init_kaiming=lambda on: _seeded(
        on, lambda: nn.init.kaiming_uniform_(torch.empty(3, 4, device=on.device))
    ),
    init_orthogonal=lambda on: (
        _seeded(on, lambda: nn.init.orthogonal_(torch.empty(3, 4, device=on.device))).__class__
    ),
    init_trunc_normal=lambda on: _seeded(
        on, lambda: nn.init.trunc_normal_(torch.empty(3, 4, device=on.device))
    ),
    distribution_sample=lambda on: _seeded(
        on, lambda: torch.distributions.Normal(on.count(3), torch.ones(3, device=on.device)).sample()
    ),
    distribution_kl=lambda on: torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=on.normal(4)) for _ in range(2))
    ),
    sgd=lambda on: _trained(on, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    adam=lambda on: _trained(on, torch.optim.Adam, lr=0.01),
    adam_foreach=lambda on: _trained(on, torch.optim.Adam, lr=0.01, foreach=True),
    adam_amsgrad=lambda on: _trained(on, torch.optim.Adam, lr=0.01, amsgrad=True),
    adamw=lambda on: _trained(on, torch.optim.AdamW, lr=0.01),
    rmsprop=lambda on: _trained(on, torch.optim.RMSprop, lr=0.01),
    adagrad=lambda on: _trained(on, torch.optim.Adagrad, lr=0.01),
    radam=lambda on: _trained(on, torch.optim.RAdam, lr=0.01, foreach=False),
    adamax_foreach=lambda on: _trained(on, torch.optim.Adamax, lr=0.01, foreach=True),
    optimizer_invalid_rate=lambda on: _trained(on, torch.optim.SGD, lr=-1),
    linear_module=lambda on: _applied(on, nn.Linear(3, 2, device=on.device), on.normal(4, 3)),
    linear_wrong_shape=lambda on: _applied(on, nn.Linear(3, 2, device=on.device), on.normal(4, 5)),
    bilinear_module=lambda on: _applied(
        on, nn.Bilinear(2, 3, 4, device=on.device), on.normal(5, 2), on.normal(5, 3)
    ),
    lstm_module=lambda on: _applied(on, nn.LSTM(3, 4, device=on.device), on.normal(5, 2, 3)),
    gru_module=lambda on: _applied(on, nn.GRU(3, 4, batch_first=True, device=on.device), on.normal(2, 5, 3)),
    lstm_cell_module=lambda on: _applied(on, nn.LSTMCell(3, 4, device=on.device), on.normal(2, 3)),
    bidirectional_module=lambda on: _applied(
        on, nn.RNN(3, 4, bidirectional=True, device=on.device), on.normal(5, 2, 3)
    ),
    attention_module=lambda on: _applied(
        on,
        nn.MultiheadAttention(8, 2, batch_first=True, device=on.device),
        *(on.normal(2, 3, 8) for _ in range(3)),
    ),
    encoder_layer_module=lambda on: _applied(
        on, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device=on.device), on.normal(2, 3, 8)
    ),
    embedding_module=lambda on: _applied(
        on, nn.Embedding(6, 3, padding_idx=0, device=on.device), on.integers(4, below=6)
    ),
    batch_norm_module=lambda on: _applied(on, nn.BatchNorm1d(3, device=on.device), on.normal(5, 3)),
    conv_module=lambda on: _applied(
        on, nn.Conv2d(3, 4, 3, padding="same", device=on.device), on.normal(1, 3, 5, 5)
    ),
    conv_wrong_channels=lambda on: _applied(on, nn.Conv2d(3, 4, 3, device=on.device), on.normal(1, 2, 5, 5)),
    conv_too_small=lambda on: F.conv2d(on.normal(1, 1, 2, 2), on.normal(1, 1, 3, 3)),
    loss_kl=lambda on: F.kl_div(
        F.log_softmax(on.normal(3, 4), 1), F.softmax(on.normal(3, 4), 1), reduction="batchmean"
    ),
    loss_bce=lambda on: F.binary_cross_entropy(torch.sigmoid(on.normal(4)), on.bools(4).float()),
    loss_bce_out_of_range=lambda on: F.binary_cross_entropy(on.tensor([2.0]), on.tensor([1.0])),
    loss_ctc=lambda on: F.ctc_loss(
        F.log_softmax(on.normal(6, 2, 5), 2),
        on.integers(2, 3, below=4) + 1,
        torch.tensor([6, 6]),
        torch.tensor([3, 2]),
    ),
    loss_huber=lambda on: F.huber_loss(on.normal(4), on.normal(4)),
    loss_mismatched_shapes=lambda on: F.l1_loss(on.normal(4), on.normal(3)),
    matmul_wrong_shapes=lambda on: on.normal(2, 3) @ on.normal(2, 3),
    add_wrong_shapes=lambda on: on.normal(2) + on.normal(3),
    cat_wrong_shapes=lambda on: torch.cat([on.normal(2, 3), on.normal(2, 4)]),
    cat_nothing=lambda on: torch.cat([]),
    stack_wrong_shapes=lambda on: torch.stack([on.normal(2), on.normal(3)]),
    reduce_wrong_dimension=lambda on: on.normal(2).sum(3),
    unsqueeze_wrong_dimension=lambda on: on.normal(2).unsqueeze(5),
    squeeze_repeated_dimension=lambda on: on.normal(1, 1).sum((0, 0)),
    permute_wrong=lambda on: on.normal(2, 3).permute(0, 0),
    negative_size=lambda on: torch.empty(-1, device=on.device),
    wrong_argument_type=lambda on: on.normal(2).sum("x"),
    unknown_argument=lambda on: torch.add(on.normal(2), 1, beta=2),
    unknown_attribute=lambda on: on.normal(2).no_such_attribute,
    inverse_of_singular=lambda on: torch.linalg.inv(torch.zeros(2, 2, device=on.device)),
    cholesky_of_indefinite=lambda on: torch.linalg.cholesky(-torch.eye(2, device=on.device)),
    cholesky_ex=lambda on: torch.linalg.cholesky_ex(-torch.eye(2, device=on.device)).info,
    solve_of_singular=lambda on: torch.linalg.solve(torch.zeros(2, 2, device=on.device), on.normal(2)),
    svd_of_nan=lambda on: torch.linalg.svdvals(on.tensor([[float("nan")]])),
    lu=lambda on: torch.linalg.lu_factor(on.normal(3, 3)),
    lstsq=lambda on: torch.linalg.lstsq(on.normal(4, 2), on.normal(4, 1)).solution,
    matrix_exp=lambda on: torch.linalg.matrix_exp(on.normal(3, 3)),
    determinant=lambda on: (torch.linalg.det(on.normal(3, 3)), torch.linalg.slogdet(on.normal(3, 3))),
    matrix_rank=lambda on: torch.linalg.matrix_rank(torch.ones(3, 3, device=on.device)),
    mixed_devices=lambda on: on.normal(2) + torch.ones(2, device="meta"),
    scalar_of_cpu=lambda on: on.normal(2) + torch.tensor(1.5),
    scalar_of_cpu_in_place=lambda on: on.normal(2).mul_(torch.tensor(2)),
    numpy_array_operand=lambda on: on.count(2) + __import__("numpy").float32(1),
    string_operand=lambda on: on.count(2) + "a",
    equal_of_shapes=lambda on: torch.equal(on.count(2), on.count(3)),
    allclose=lambda on: torch.allclose(on.count(3), on.count(3) + 1e-9),
    assert_close_differs=lambda on: torch.testing.assert_close(on.count(3), on.count(3) + 1),
    assert_async=lambda on: torch._assert_async(on.tensor(0)),
    check_nan_to_integer=lambda on: on.tensor(float("nan")).item(),
    huge_allocation=lambda on: torch.empty(2**60, device=on.device),
    huge_size_overflows=lambda on: torch.empty(2**62, device=on.device),
    huge_expand=lambda on: on.count(1).expand(2**40, 2**20).stride(),
    device_of_result=lambda on: (on.count(1) + 1).device.type == on.device.type,
    is_properties=lambda on: [
        (x := on.count(2)).is_contiguous(),
        x.is_floating_point(),
        x.is_sparse,
        x.layout,
        x.names,
    ],
    element_sizes=lambda on: [
        (x := on.count(2, dtype=torch.int16)).element_size(),
        x.nbytes,
        x.itemsize,
        x.numel(),
    ],
    is_pinned=lambda on: on.count(2).is_pinned(),
    sparse_result=lambda on: on.count(2).to_sparse().to_dense(),
    named_tensor=lambda on: on.count(2, 3).refine_names("a", "b").names,
    data_loader=lambda on: [
        batch.to(on.device) * 2 for batch in torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    ],
    pad_sequence=lambda on: nn.utils.rnn.pad_sequence([on.count(2), on.count(3)], batch_first=True),
    packed_sequence=lambda on: nn.utils.rnn.pack_padded_sequence(on.normal(4, 2, 3), [4, 2]).data,
    parameters_to_vector=lambda on: nn.utils.parameters_to_vector(_network(on).parameters()),
    einops_like=lambda on: on.count(2, 3, 4).permute(1, 0, 2).flatten(1).unflatten(1, (2, 4)),
    dlpack_of_device=lambda on: torch.from_dlpack(on.count(3).cpu()),
    nested_tensor=lambda on: [
        x.clone()
        for x in torch.nested.nested_tensor([on.count(2), on.count(3)], layout=torch.jagged).unbind()
    ],
)


@SNIPPETS.define
def several_threads(on: Inputs) -> object:
    results: list[Any] = [None] * 4
    inputs = [on.normal(8, 8) for _ in range(4)]

    def work(number: int) -> None:
        x = inputs[number]
        for _ in range(5):
            x = (x @ inputs[number]).tanh()
        results[number] = x

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@SNIPPETS.define
def fork_and_go_on(on: Inputs) -> object:
    x = on.count(3)
    child = os.fork()
    if child == 0:
        os._exit(7)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), x + 1


@SNIPPETS.define
def fork_works_on_cpu(on: Inputs) -> object:
    x = on.count(3)
    child = os.fork()
    if child == 0:
        os._exit(int(torch.ones(3).sum().item()))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), x * 2


@SNIPPETS.define
def loader_with_workers(on: Inputs) -> object:
    x = on.count(1)
    loader = torch.utils.data.DataLoader(
        torch.arange(4.0), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    return [batch.to(on.device) + x for batch in loader]


@SNIPPETS.define
def custom_op(on: Inputs) -> object:
    with torch.library._scoped_library("differential", "FRAGMENT"):
        op = torch.library.custom_op("differential::double", _double, mutates_args=())
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, grad: grad * 2)
        x = on.normal(3, grad=True)
        y = op(x)
        y.sum().backward()
        return y, x.grad


def _double(x: Tensor) -> Tensor:
    return x * 2


@SNIPPETS.define
def custom_op_in_place(on: Inputs) -> object:
    op = torch.library.custom_op("differential::increment", _increment, mutates_args={"x"})
    x = on.normal(3)
    op(x)
    return x


def _increment(x: Tensor) -> None:
    x.add_(1)


@SNIPPETS.define
def library_composite_op(on: Inputs) -> object:
    with torch.library._scoped_library("differential_composite", "DEF") as library:
        library.define("scaled(Tensor x, float scale=2.0) -> Tensor")
        library.impl("scaled", lambda x, scale=2.0: x * scale, "CompositeImplicitAutograd")
        return torch.ops.differential_composite.scaled(on.normal(3), 1.5)


@SNIPPETS.define
def library_op_without_kernel(on: Inputs) -> object:
    with torch.library._scoped_library("differential_missing", "DEF") as library:
        library.define("nothing(Tensor x) -> Tensor")
        return torch.ops.differential_missing.nothing(on.normal(3))


@SNIPPETS.define
def library_redefined(on: Inputs) -> object:
    results = []
    for number in range(3):
        with torch.library._scoped_library("differential_again", "DEF") as library:
            library.define("op(Tensor x) -> Tensor")
            library.impl("op", lambda x, number=number: x + number, "CompositeExplicitAutograd")
            results.append(torch.ops.differential_again.op(on.count(2)))
            del torch.ops.differential_again.op
    return results


@SNIPPETS.define
def load_state_dict_wrong_shape(on: Inputs) -> object:
    return _network(on).load_state_dict({"0.weight": on.normal(1)}, strict=False)


@SNIPPETS.define
def load_state_dict_from_cpu(on: Inputs) -> object:
    net = _network(on)
    net.load_state_dict({name: torch.ones(value.shape) for name, value in net.state_dict().items()})
    return net(on.normal(2, 4))


@SNIPPETS.define
def module_moves_keep_parameters(on: Inputs) -> object:
    net = nn.Linear(2, 2)
    before = [id(p) for p in net.parameters()]
    net.to(on.device).double().to("cpu")
    return before == [id(p) for p in net.parameters()], net.weight.dtype


@SNIPPETS.define
def optimizer_state_is_restored(on: Inputs) -> object:
    net = _network(on)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net(on.normal(3, 4)).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(net.parameters(), lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.step()
    return [p.detach() for p in net.parameters()], other.param_groups[0]["lr"]


@SNIPPETS.define
def gradient_scaler(on: Inputs) -> object:
    net = _network(on)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(on.device.type, init_scale=8.0)
    scaler.scale(net(on.normal(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [p.detach() for p in net.parameters()], scaler.get_scale()


@SNIPPETS.define
def learning_rate_schedule(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(4):
        optimizer.zero_grad()
        x.square().sum().backward()
        optimizer.step()
        schedule.step()
    return x, schedule.get_last_lr()


@SNIPPETS.define
def averaged_model(on: Inputs) -> object:
    net = _network(on)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    averaged.update_parameters(net)
    return list(averaged.module.parameters())


@SNIPPETS.define
def error_leaves_the_session_usable(on: Inputs) -> object:
    x, errors = on.count(3), []
    for mistake in (
        lambda: x + on.count(4),
        lambda: on.count(2)[on.tensor([9])].cpu() + 1,
        lambda: x @ on.count(5),
    ):
        try:
            mistake()
        except (RuntimeError, IndexError) as error:
            errors.append(isinstance(error, IndexError))
    return errors, x + 1


@SNIPPETS.define
def weak_reference_dies(on: Inputs) -> object:
    import gc
    import weakref

    x = on.count(3)
    reference = weakref.ref(x)
    del x
    gc.collect()
    return reference() is None


@SNIPPETS.define
def clip_gradients(on: Inputs) -> object:
    net = _network(on)
    net(on.normal(3, 4)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    return norm, [p.grad for p in net.parameters()]
