"""Memory formats: the strides of results for channels_last, transposed, expanded and empty inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.device.differential.snippets import Inputs, Table


def _image(on: Inputs, *, grad: bool = False) -> Tensor:
    return on.normal(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_(grad)


def _volume(on: Inputs) -> Tensor:
    return on.normal(2, 4, 3, 4, 5).to(memory_format=torch.channels_last_3d)


def _formats(on: Inputs) -> list[Tensor]:
    plain = on.normal(2, 8, 6, 6)
    return [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.transpose(1, 3),
        plain[:, :, :1].expand(2, 8, 6, 6),
        plain[:0],
        plain[:, ::2, 1:],
    ]


def _attention_kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str:
    """The kernel that torch has selected, by the node of the graph."""
    output = F.scaled_dot_product_attention(query.requires_grad_(), key, value, **options)
    return type(output.grad_fn).__name__


SNIPPETS = Table(
    to_channels_last=_image,
    to_channels_last_3d=_volume,
    contiguous_channels_last=lambda on: on.normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    back_to_contiguous=lambda on: _image(on).contiguous(),
    channels_last_wrong_rank=lambda on: on.normal(3, 4).to(memory_format=torch.channels_last),
    upload_keeps_channels_last=lambda on: (
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last).to(on.device)
    ),
    download_keeps_channels_last=lambda on: _image(on).cpu(),
    empty_channels_last=lambda on: torch.empty(
        2, 3, 4, 5, device=on.device, memory_format=torch.channels_last
    ).stride(),
    empty_like_preserves=lambda on: torch.empty_like(_image(on)).stride(),
    empty_like_transposed=lambda on: torch.empty_like(on.normal(3, 4).t()).stride(),
    empty_like_expanded=lambda on: torch.empty_like(on.normal(3, 1).expand(3, 4)).stride(),
    clone_preserves=lambda on: [x.clone() for x in _formats(on)],
    clone_contiguous=lambda on: _image(on).clone(memory_format=torch.contiguous_format),
    to_dtype_preserves=lambda on: [x.to(torch.float64) for x in _formats(on)],
    to_dtype_of_transposed=lambda on: on.normal(3, 4).t().half(),
    add=lambda on: [x + 1 for x in _formats(on)],
    add_mixed_formats=lambda on: _image(on) + on.normal(2, 8, 6, 6),
    add_channels_last_second=lambda on: on.normal(2, 8, 6, 6) + _image(on),
    add_broadcast=lambda on: _image(on) + on.normal(8, 1, 1),
    add_transposed=lambda on: on.normal(3, 4).t() + on.normal(4, 3),
    mul_transposed_both=lambda on: on.normal(3, 4).t() * on.normal(3, 4).t(),
    relu=lambda on: [F.relu(x) for x in _formats(on)],
    gelu=lambda on: [F.gelu(x) for x in _formats(on)],
    dropout_eval=lambda on: F.dropout(_image(on), training=False),
    where=lambda on: torch.where(_image(on) > 0, _image(on), 0),
    comparison=lambda on: _image(on) > 0,
    conv2d=lambda on: [F.conv2d(x, on.normal(4, 8, 3, 3)) for x in _formats(on)[:4]],
    conv2d_channels_last_weight=lambda on: F.conv2d(
        on.normal(2, 8, 6, 6), on.normal(4, 8, 3, 3).to(memory_format=torch.channels_last)
    ),
    conv2d_1x1=lambda on: F.conv2d(_image(on), on.normal(4, 8, 1, 1)),
    conv2d_one_channel=lambda on: F.conv2d(
        on.normal(2, 1, 6, 6).to(memory_format=torch.channels_last), on.normal(4, 1, 3, 3)
    ),
    conv2d_groups=lambda on: F.conv2d(_image(on), on.normal(8, 1, 3, 3), groups=8),
    conv2d_stride_padding=lambda on: F.conv2d(
        _image(on), on.normal(4, 8, 3, 3), on.normal(4), stride=2, padding=1
    ),
    conv3d=lambda on: F.conv3d(_volume(on), on.normal(2, 4, 2, 2, 2)),
    conv1d_transposed_input=lambda on: F.conv1d(on.normal(2, 9, 4).transpose(1, 2), on.normal(3, 4, 3)),
    conv_transpose2d=lambda on: F.conv_transpose2d(_image(on), on.normal(8, 4, 3, 3)),
    conv_empty_batch=lambda on: F.conv2d(_image(on)[:0], on.normal(4, 8, 3, 3)),
    max_pool2d=lambda on: [F.max_pool2d(x, 2, return_indices=True) for x in _formats(on)[:4]],
    avg_pool2d=lambda on: [F.avg_pool2d(x, 2) for x in _formats(on)[:4]],
    adaptive_avg_pool2d=lambda on: [F.adaptive_avg_pool2d(x, 3) for x in _formats(on)[:4]],
    adaptive_avg_pool2d_to_one=lambda on: F.adaptive_avg_pool2d(_image(on), 1),
    adaptive_max_pool2d=lambda on: F.adaptive_max_pool2d(_image(on), 3),
    max_pool3d=lambda on: F.max_pool3d(_volume(on), 2),
    pixel_shuffle=lambda on: [F.pixel_shuffle(x, 2) for x in _formats(on)[:4]],
    pixel_unshuffle=lambda on: [F.pixel_unshuffle(x, 2) for x in (_image(on), on.normal(2, 8, 6, 6))],
    channel_shuffle=lambda on: F.channel_shuffle(_image(on), 2),
    interpolate_nearest=lambda on: [F.interpolate(x, scale_factor=2) for x in _formats(on)[:4]],
    interpolate_bilinear=lambda on: F.interpolate(_image(on), size=(9, 9), mode="bilinear"),
    interpolate_bicubic=lambda on: F.interpolate(_image(on), size=(9, 9), mode="bicubic"),
    interpolate_trilinear=lambda on: F.interpolate(_volume(on), scale_factor=2, mode="trilinear"),
    batch_norm=lambda on: [F.batch_norm(x, None, None, training=True) for x in _formats(on)[:4]],
    batch_norm_eval=lambda on: F.batch_norm(_image(on), on.normal(8), on.normal(8).abs() + 1),
    group_norm=lambda on: [F.group_norm(x, 2, on.normal(8), on.normal(8)) for x in _formats(on)[:4:3]],
    group_norm_channels_last=lambda on: F.group_norm(_image(on), 2),
    instance_norm=lambda on: F.instance_norm(_image(on)),
    layer_norm_transposed=lambda on: F.layer_norm(on.normal(3, 4, 5).transpose(0, 1), (5,)),
    rms_norm_transposed=lambda on: F.rms_norm(on.normal(3, 4, 5).transpose(0, 1), (5,)),
    local_response_norm=lambda on: F.local_response_norm(_image(on), 2),
    softmax_channels=lambda on: [F.softmax(x, 1) for x in _formats(on)],
    log_softmax_transposed=lambda on: F.log_softmax(on.normal(4, 3).t(), 0),
    sum_channels_last=lambda on: [_image(on).sum(1), _image(on).sum((2, 3), keepdim=True)],
    mean_of_formats=lambda on: [x.mean(1) for x in _formats(on)[:4]],
    amax_transposed=lambda on: on.normal(2, 3, 4).permute(2, 0, 1).amax(0),
    cumsum_transposed=lambda on: on.normal(3, 4).t().cumsum(0),
    sort_transposed=lambda on: on.normal(4, 3).t().sort(0),
    topk_transposed=lambda on: on.normal(4, 6).t().topk(2, 0),
    argsort_channels_last=lambda on: _image(on).argsort(1, stable=True),
    cat_channels_last=lambda on: torch.cat([_image(on), _image(on)], 1),
    cat_mixed_formats=lambda on: torch.cat([_image(on), on.normal(2, 8, 6, 6)]),
    stack_channels_last=lambda on: torch.stack([_image(on), _image(on)]),
    pad_constant=lambda on: [F.pad(x, (1, 1)) for x in _formats(on)],
    pad_reflect=lambda on: [F.pad(x, (1, 1, 1, 1), mode="reflect") for x in _formats(on)[:4]],
    pad_replicate=lambda on: F.pad(_volume(on), (1, 1, 1, 1, 1, 1), mode="replicate"),
    pad_circular=lambda on: F.pad(_image(on), (1, 1, 1, 1), mode="circular"),
    flip=lambda on: [x.flip(2) for x in _formats(on)],
    roll=lambda on: [x.roll(1, 2) for x in _formats(on)],
    rot90=lambda on: _image(on).rot90(1, (2, 3)),
    repeat=lambda on: _image(on).repeat(1, 2, 1, 1),
    repeat_interleave=lambda on: _image(on).repeat_interleave(2, 1),
    tril_transposed=lambda on: on.normal(3, 4).t().tril(),
    index_select_channels_last=lambda on: _image(on).index_select(1, on.tensor([0, 2])),
    gather_transposed=lambda on: on.normal(4, 4).t().gather(0, on.integers(4, 4, below=4).t()),
    masked_fill_expanded=lambda on: on.normal(3, 1).expand(3, 4).masked_fill(on.bools(3, 4), 0),
    index_transposed=lambda on: on.normal(4, 5, 6).permute(2, 0, 1)[on.tensor([0, 3])],
    bmm_transposed=lambda on: torch.bmm(on.normal(2, 3, 4).transpose(1, 2), on.normal(2, 3, 5)),
    matmul_expanded=lambda on: on.normal(3, 4) @ on.normal(2, 4, 1).expand(2, 4, 5),
    einsum=lambda on: torch.einsum("bij,bjk->bki", on.normal(2, 3, 4), on.normal(2, 4, 5)),
    tensordot=lambda on: torch.tensordot(on.normal(2, 3, 4), on.normal(4, 3, 5), dims=([1, 2], [1, 0])),
    linear_transposed=lambda on: F.linear(on.normal(3, 2, 4).transpose(0, 1), on.normal(5, 4), on.normal(5)),
    embedding_transposed=lambda on: F.embedding(on.integers(3, 4).t(), on.normal(10, 5)),
    grid_sample=lambda on: F.grid_sample(_image(on), on.normal(2, 3, 3, 2), align_corners=False),
    unfold_images=lambda on: F.unfold(_image(on), 3),
    fold=lambda on: F.fold(on.normal(2, 12, 9).transpose(1, 2).transpose(1, 2), (4, 4), 2),
    fft_transposed=lambda on: torch.fft.fft(on.normal(4, 6).t(), dim=0),
    linalg_inverse=lambda on: torch.linalg.inv(on.normal(2, 3, 3) + 4 * torch.eye(3, device=on.device)),
    linalg_qr=lambda on: torch.linalg.qr(on.normal(4, 3).t()),
    linalg_cholesky=lambda on: torch.linalg.cholesky(
        (x := on.normal(3, 3)) @ x.t() + torch.eye(3, device=on.device)
    ),
    linalg_solve=lambda on: torch.linalg.solve(on.normal(3, 3), on.normal(4, 3).t()),
    cdist=lambda on: torch.cdist(on.normal(4, 3).t(), on.normal(4, 5).t()),
    quantile_transposed=lambda on: on.normal(3, 4).t().quantile(0.5, dim=0),
    attention_heads=lambda on: F.scaled_dot_product_attention(
        *(on.normal(2, 5, 4, 8).transpose(1, 2) for _ in range(3))
    ),
    attention_causal=lambda on: F.scaled_dot_product_attention(
        *(on.normal(2, 4, 5, 8) for _ in range(3)), is_causal=True
    ),
    attention_mask=lambda on: F.scaled_dot_product_attention(
        *(on.normal(2, 4, 5, 8) for _ in range(3)),
        attn_mask=on.bools(5, 5) | torch.eye(5, device=on.device).bool(),
    ),
    attention_float_mask=lambda on: F.scaled_dot_product_attention(
        *(on.normal(2, 4, 5, 8) for _ in range(3)), attn_mask=on.normal(2, 1, 5, 5)
    ),
    attention_grouped_queries=lambda on: F.scaled_dot_product_attention(
        on.normal(2, 4, 5, 8), on.normal(2, 2, 5, 8), on.normal(2, 2, 5, 8), enable_gqa=True
    ),
    attention_bfloat16_mask=lambda on: F.scaled_dot_product_attention(
        *(on.normal(2, 4, 5, 8, dtype=torch.bfloat16) for _ in range(3)),
        attn_mask=on.normal(1, 1, 5, 5, dtype=torch.bfloat16),
    ),
    attention_odd_heads=lambda on: F.scaled_dot_product_attention(*(on.normal(1, 2, 5, 7) for _ in range(3))),
    attention_choice=lambda on: torch._fused_sdp_choice(*(on.normal(1, 2, 5, 8) for _ in range(3))),
    attention_choice_with_mask=lambda on: torch._fused_sdp_choice(
        *(on.normal(1, 2, 5, 8) for _ in range(3)), attn_mask=on.normal(5, 5)
    ),
    attention_kernel=lambda on: _attention_kernel(*(on.normal(1, 2, 5, 8) for _ in range(3))),
    attention_kernel_with_mask=lambda on: _attention_kernel(
        *(on.normal(1, 2, 5, 8) for _ in range(3)), attn_mask=on.normal(5, 5)
    ),
    attention_kernel_with_bool_mask=lambda on: _attention_kernel(
        *(on.normal(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3)), attn_mask=on.bools(5, 5)
    ),
    attention_kernel_of_grouped_queries=lambda on: _attention_kernel(
        on.normal(1, 4, 5, 8), on.normal(1, 2, 5, 8), on.normal(1, 2, 5, 8), enable_gqa=True
    ),
    attention_kernel_with_dropout=lambda on: _attention_kernel(
        *(on.normal(1, 2, 5, 8) for _ in range(3)), dropout_p=0.5
    ),
    attention_kernel_of_transposed=lambda on: _attention_kernel(
        *(on.normal(1, 2, 8, 5).mT for _ in range(3))
    ),
    attention_kernel_of_other_head_size=lambda on: _attention_kernel(
        on.normal(1, 2, 5, 8), on.normal(1, 2, 5, 8), on.normal(1, 2, 5, 4)
    ),
    suggest_format_of_conv=lambda on: F.conv2d(_image(on), on.normal(4, 8, 3, 3)).is_contiguous(
        memory_format=torch.channels_last
    ),
    resize_channels_last=lambda on: on.normal(2, 3, 4, 5).resize_(
        1, 3, 4, 5, memory_format=torch.channels_last
    ),
    resize_preserve=lambda on: on.normal(4).resize_(2, 2, memory_format=torch.preserve_format),
    copy_between_formats=lambda on: torch.zeros(2, 8, 6, 6, device=on.device).copy_(_image(on)),
    empty_reductions=lambda on: [on.count(0, 3).sum(0), on.count(3, 0).sum(1), on.count(0).sum()],
    max_of_empty=lambda on: on.count(0).max(),
    matmul_of_empty=lambda on: on.count(3, 0) @ on.count(0, 4),
    softmax_of_empty=lambda on: F.softmax(on.count(0, 3), 1),
    cat_with_empty=lambda on: torch.cat([on.count(0), on.count(2, 3)]),
    linear_of_empty=lambda on: F.linear(on.count(0, 3), on.normal(4, 3), on.normal(4)),
)


@SNIPPETS.define
def network_in_channels_last(on: Inputs) -> object:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, stride=2)
    ).to(on.device, memory_format=torch.channels_last)
    return net(on.normal(2, 3, 9, 9).to(memory_format=torch.channels_last))


@SNIPPETS.define
def gradients_in_channels_last(on: Inputs) -> object:
    image, weight = _image(on, grad=True), on.normal(4, 8, 3, 3, grad=True)
    F.max_pool2d(F.relu(F.conv2d(image, weight)), 2).square().sum().backward()
    return image.grad, weight.grad


@SNIPPETS.define
def gradients_of_attention(on: Inputs) -> object:
    query, key, value = (on.normal(2, 4, 5, 8, grad=True) for _ in range(3))
    F.scaled_dot_product_attention(query, key, value, attn_mask=on.normal(5, 5)).square().sum().backward()
    return query.grad, key.grad, value.grad


@SNIPPETS.define
def gradient_of_attention_mask(on: Inputs) -> object:
    mask = on.normal(5, 5, grad=True)
    F.scaled_dot_product_attention(
        *(on.normal(2, 4, 5, 8) for _ in range(3)), attn_mask=mask
    ).sum().backward()
    return mask.grad


@SNIPPETS.define
def gradients_of_grouped_queries(on: Inputs) -> object:
    query, key, value = (on.normal(2, heads, 5, 8, grad=True) for heads in (4, 2, 2))
    F.scaled_dot_product_attention(query, key, value, enable_gqa=True).square().sum().backward()
    return query.grad, key.grad, value.grad


@SNIPPETS.define
def attention_with_math_backend(on: Inputs) -> object:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(on.normal(1, 2, 5, 8) for _ in range(3)))
