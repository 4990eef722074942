"""Dtypes: promotion, casts, and what is not implemented."""

from __future__ import annotations

import torch

from tests.device.differential.snippets import Inputs, Table

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WIDE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)

SNIPPETS = Table(
    integer_divided=lambda on: on.count(3, dtype=torch.int64) / 3,
    integer_floor_divided=lambda on: on.count(3, dtype=torch.int64) // 2,
    integer_by_zero=lambda on: on.count(3, dtype=torch.int64) // 0,
    remainder_by_zero=lambda on: on.count(3, dtype=torch.int32) % 0,
    integer_plus_float=lambda on: on.count(3, dtype=torch.int64) + 0.5,
    half_plus_float_scalar=lambda on: on.normal(3, dtype=torch.float16) + 1e-3,
    half_plus_float_tensor=lambda on: on.normal(3, dtype=torch.float16) + on.normal(3),
    half_plus_zero_dim=lambda on: on.normal(3, dtype=torch.float16) + on.normal(1)[0],
    bfloat_times_half=lambda on: on.normal(3, dtype=torch.bfloat16) * on.normal(3, dtype=torch.float16),
    bool_plus_bool=lambda on: on.bools(4) + on.bools(4),
    bool_minus_bool=lambda on: on.bools(4) - on.bools(4),
    bool_and=lambda on: on.bools(4) & on.bools(4),
    bool_inverted=lambda on: ~on.bools(4),
    bool_negated=lambda on: -on.bools(4),
    uint8_wraps=lambda on: on.tensor([250], torch.uint8) + 10,
    int8_wraps=lambda on: on.tensor([120], torch.int8) * 2,
    uint8_negated=lambda on: -on.tensor([1, 2], torch.uint8),
    int_shift=lambda on: on.count(4, dtype=torch.int32) << 3,
    float_shift=lambda on: on.count(4) << 1,
    sum_of_bools=lambda on: on.bools(5).sum(),
    sum_of_int8=lambda on: on.count(5, dtype=torch.int8).sum(),
    sum_with_dtype=lambda on: on.count(5, dtype=torch.int8).sum(dtype=torch.float64),
    mean_of_integers=lambda on: on.count(5, dtype=torch.int64).mean(),
    prod_of_uint8=lambda on: on.tensor([2, 3], torch.uint8).prod(),
    cumsum_of_bools=lambda on: on.bools(5).cumsum(0),
    where_promotes=lambda on: torch.where(on.bools(3), on.count(3), on.count(3, dtype=torch.int32)),
    where_scalar=lambda on: torch.where(on.bools(3), 1.0, 0),
    cat_promotes=lambda on: torch.cat([on.count(2), on.count(2, dtype=torch.int64)]),
    stack_promotes=lambda on: torch.stack([on.count(2, dtype=torch.int8), on.count(2, dtype=torch.int32)]),
    result_type=lambda on: torch.result_type(on.count(2, dtype=torch.int8), 1.5),
    can_cast=lambda on: torch.can_cast(on.count(1).dtype, torch.int32),
    promote_types=lambda on: torch.promote_types(torch.bfloat16, on.normal(1, dtype=torch.float16).dtype),
    add_into_integer=lambda on: on.count(3, dtype=torch.int64).add_(1.5),
    divide_into_integer=lambda on: on.count(3, dtype=torch.int64).div_(2),
    matmul_of_integers=lambda on: on.count(2, 3, dtype=torch.int64) @ on.count(3, 2, dtype=torch.int64),
    matmul_of_mixed=lambda on: on.normal(2, 3) @ on.normal(3, 2, dtype=torch.float64),
    matmul_of_bools=lambda on: on.bools(2, 2) @ on.bools(2, 2),
    matmul_bfloat=lambda on: on.normal(4, 8, dtype=torch.bfloat16) @ on.normal(8, 4, dtype=torch.bfloat16),
    linear_mixed=lambda on: torch.nn.functional.linear(on.normal(2, 3, dtype=torch.float16), on.normal(4, 3)),
    softmax_half_to_float=lambda on: torch.softmax(
        on.normal(2, 5, dtype=torch.float16), 1, dtype=torch.float32
    ),
    softmax_of_integers=lambda on: torch.softmax(on.count(3, dtype=torch.int64), 0),
    exp_of_integers=lambda on: on.count(3, dtype=torch.int64).exp(),
    sqrt_of_bools=lambda on: on.bools(3).sqrt(),
    bitwise_of_floats=lambda on: on.count(3) & on.count(3),
    max_of_mixed=lambda on: torch.maximum(on.count(3), on.count(3, dtype=torch.int32)),
    pow_negative_integer=lambda on: on.count(3, dtype=torch.int64) ** -1,
    pow_scalar_base=lambda on: 2 ** on.count(5, dtype=torch.int32),
    clamp_integer_by_float=lambda on: on.count(5, dtype=torch.int32).clamp(max=2.5),
    arange_of_floats=lambda on: torch.arange(0, 1, 0.25, device=on.device),
    arange_of_integers=lambda on: torch.arange(5, device=on.device),
    arange_dtype=lambda on: torch.arange(3, dtype=torch.bfloat16, device=on.device),
    arange_wrong_sign=lambda on: torch.arange(0, 5, -1, device=on.device),
    linspace_integers=lambda on: torch.linspace(0, 10, 5, dtype=torch.int64, device=on.device),
    full_infers_dtype=lambda on: [torch.full((1,), x, device=on.device) for x in (1, 1.5, True, 1j)],
    tensor_infers_dtype=lambda on: [on.tensor(x) for x in (1, 1.5, True, 1j, [1, 2.5])],
    scalar_tensor=lambda on: torch.scalar_tensor(3, device=on.device),
    new_tensor=lambda on: on.count(2, dtype=torch.float64).new_tensor([1, 2]),
    new_full=lambda on: on.count(2, dtype=torch.int16).new_full((2,), 3),
    zeros_like_dtype=lambda on: torch.zeros_like(on.count(2, 3).t(), dtype=torch.int8),
    type_as=lambda on: on.count(3).type_as(on.count(1, dtype=torch.float64)),
    type_method=lambda on: on.count(3).type(torch.float16),
    numpy_scalar=lambda on: on.count(3) * __import__("numpy").float64(2.5),
    nan_to_num=lambda on: on.tensor([float("nan"), float("inf"), -1.0]).nan_to_num(),
    float_to_integer=lambda on: on.tensor([1.9, -1.9, 2.5]).to(torch.int32),
    float_to_bool=lambda on: on.tensor([0.0, -0.0, 1e-30, float("nan")]).bool(),
    integer_overflow_cast=lambda on: on.tensor([300, -1, 65536]).to(torch.uint8),
    double_to_half_overflow=lambda on: on.tensor([1e6, -1e6, 1e-9], torch.float64).half(),
    float8_saturates=lambda on: on.tensor([1000.0, -1000.0, 0.1]).to(torch.float8_e4m3fn).float(),
    float8_add=lambda on: on.normal(3).to(torch.float8_e4m3fn) + on.normal(3).to(torch.float8_e4m3fn),
    float8_e8m0_cast=lambda on: on.tensor([1.0, 2.0, 3.0]).to(torch.float8_e8m0fnu).view(torch.uint8),
    uint16_add=lambda on: on.count(3, dtype=torch.uint16) + on.count(3, dtype=torch.uint16),
    uint32_to_float=lambda on: on.count(3, dtype=torch.uint32).float(),
    uint64_compare=lambda on: on.count(3, dtype=torch.uint64) == 2,
    finfo_of_result=lambda on: torch.finfo((on.normal(1, dtype=torch.float16) * 2).dtype).bits,
    sort_bools=lambda on: on.bools(6).sort(stable=True),
    argmax_of_half=lambda on: on.normal(6, dtype=torch.float16).argmax(),
    round_half_to_even=lambda on: on.tensor([0.5, 1.5, 2.5, -0.5]).round(),
    round_decimals=lambda on: on.normal(4).round(decimals=2),
    frexp=lambda on: torch.frexp(on.normal(3)),
    bitwise_not_int=lambda on: ~on.count(3, dtype=torch.int16),
    logical_xor=lambda on: torch.logical_xor(on.count(3), on.count(3, dtype=torch.int32)),
    float_power=lambda on: torch.float_power(on.count(3, dtype=torch.int32), 2),
    true_divide_out_integer=lambda on: torch.div(
        on.count(3), 2, out=torch.empty(3, dtype=torch.int64, device=on.device)
    ),
    sign_of_zero=lambda on: torch.signbit(on.tensor([0.0, -0.0]) * -1),
)


@SNIPPETS.define
def casts_between_floats(on: Inputs) -> object:
    return [on.normal(5, dtype=one).to(other) for one in _FLOATS for other in _FLOATS]


@SNIPPETS.define
def casts_between_integers(on: Inputs) -> object:
    return [on.count(5, dtype=one).to(other) for one in _INTEGERS for other in _INTEGERS]


@SNIPPETS.define
def casts_of_rare_dtypes(on: Inputs) -> object:
    return [on.count(5).to(dtype) for dtype in _WIDE]


@SNIPPETS.define
def promotion_table(on: Inputs) -> object:
    every = (*_INTEGERS, *_FLOATS, torch.complex64)
    return [(on.tensor([1], one) + on.tensor([1], other)).dtype for one in every for other in every]


@SNIPPETS.define
def scalar_promotion_table(on: Inputs) -> object:
    every = (*_INTEGERS, *_FLOATS, torch.complex64)
    return [(on.tensor([1], one) * scalar).dtype for one in every for scalar in (True, 2, 1.5, 1j)]
