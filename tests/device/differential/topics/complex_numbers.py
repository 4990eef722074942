"""Complex numbers, lazy conjugates and lazy negation."""

from __future__ import annotations

import torch

from tests.device.differential.snippets import Inputs, Table

SNIPPETS = Table(
    conj=lambda on: on.complex(3).conj(),
    conj_of_conj=lambda on: on.complex(3).conj().conj(),
    conj_real=lambda on: (x := on.count(3), x.conj() is x),
    conj_physical=lambda on: on.complex(3).conj_physical(),
    conj_physical_in_place=lambda on: on.complex(3).conj_physical_(),
    resolve_conj=lambda on: on.complex(3).conj().resolve_conj(),
    negative_view=lambda on: torch._neg_view(on.count(3)),
    resolve_negative=lambda on: torch._neg_view(on.count(3)).resolve_neg(),
    imag=lambda on: on.complex(3).imag,
    imag_of_conj=lambda on: on.complex(3).conj().imag,
    real_of_conj=lambda on: on.complex(3).conj().real,
    view_as_real=lambda on: torch.view_as_real(on.complex(3)),
    view_as_real_of_conj=lambda on: torch.view_as_real(on.complex(3).conj()),
    view_as_complex=lambda on: torch.view_as_complex(on.normal(3, 2)),
    view_as_complex_impossible=lambda on: torch.view_as_complex(on.normal(3, 3)),
    matmul_conj=lambda on: on.complex(2, 3) @ on.complex(2, 3).conj().t(),
    matmul_adjoint=lambda on: on.complex(2, 3).adjoint() @ on.complex(2, 3),
    add_conj=lambda on: on.complex(3) + on.complex(3).conj(),
    copy_into_conj=lambda on: (x := on.complex(3), x.conj().copy_(on.complex(3))),
    copy_from_conj=lambda on: on.complex(3).copy_(on.complex(3).conj()),
    copy_into_imag=lambda on: (x := on.complex(3), x.imag.copy_(on.normal(3))),
    add_to_imag_of_conj=lambda on: (x := on.complex(3), x.conj().imag.add_(1)),
    fill_conj=lambda on: (x := on.complex(2), x.conj().fill_(1 + 2j)),
    item_of_conj=lambda on: on.complex(1).conj().item(),
    list_of_conj=lambda on: on.complex(2).conj().tolist(),
    numpy_of_conj=lambda on: torch.from_numpy(on.complex(2).conj().cpu().resolve_conj().numpy()),
    copy_to_cpu_of_conj=lambda on: on.complex(2).conj().to("cpu", copy=True),
    clone_of_conj=lambda on: on.complex(3).conj().clone(),
    clone_of_negative=lambda on: torch._neg_view(on.count(3)).clone(),
    sum_of_conj=lambda on: on.complex(4).conj().sum(),
    vdot=lambda on: torch.vdot(on.complex(3), on.complex(3)),
    vdot_of_conj=lambda on: torch.vdot(on.complex(3).conj(), on.complex(3)),
    abs=lambda on: on.complex(3).conj().abs(),
    angle=lambda on: on.complex(3).conj().angle(),
    is_conj_of_slice=lambda on: on.complex(4).conj()[1:3],
    transpose_of_conj=lambda on: on.complex(2, 3).conj().t(),
    index_conj=lambda on: on.complex(4).conj()[on.tensor([2, 0])],
    cat_conj=lambda on: torch.cat([on.complex(2), on.complex(2).conj()]),
    stack_conj=lambda on: torch.stack([on.complex(2).conj(), on.complex(2).conj()]),
    real_to_complex=lambda on: on.normal(3).to(torch.complex64),
    complex_constructor=lambda on: torch.complex(on.normal(3), on.normal(3)),
    polar=lambda on: torch.polar(on.normal(3).abs(), on.normal(3)),
    fft=lambda on: torch.fft.fft(on.normal(8)),
    rfft_inverse=lambda on: torch.fft.irfft(torch.fft.rfft(on.normal(8))),
    ifft_of_conj=lambda on: torch.fft.ifft(on.complex(8).conj()),
    fftshift=lambda on: torch.fft.fftshift(on.count(5)),
    compare_complex=lambda on: on.complex(3) < on.complex(3),
    complex_equality=lambda on: (x := on.complex(3), x.conj().conj() == x)[1],
    complex_exp=lambda on: on.complex(3).conj().exp(),
    complex_grad=lambda on: torch.autograd.grad((x := on.complex(3, grad=True)).abs().sum(), x),
    conj_grad=lambda on: torch.autograd.grad((x := on.complex(3, grad=True)).conj().abs().sum(), x),
    real_grad=lambda on: torch.autograd.grad((x := on.complex(3, grad=True)).real.sum(), x),
)


@SNIPPETS.define
def write_through_real_and_imag(on: Inputs) -> object:
    x = on.complex(2, 2)
    x.real.zero_()
    x.imag[0] = 5
    return x


@SNIPPETS.define
def conj_survives_deepcopy(on: Inputs) -> object:
    import copy

    return copy.deepcopy(on.complex(3).conj())
