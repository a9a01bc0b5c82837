"""The physical floor: the shortest time that memory and arithmetic allow, from rates measured in the same run.

A decoding step cannot be faster than reading its weights and its keys and values once. The rate is that of a plain device-to-device
copy, bytes read and written counted; a kernel that only reads may go a little faster, so a ratio of slightly under 1 is possible.
"""

import math

import torch

from ..evaluation.timing import Repeatable, time_of

COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # well past the caches
SQUARE = {"cuda": 8192, "cpu": 512}  # side of the matrix product that gives the best rate of arithmetic


def copy_bandwidth(device):
    """Bytes read and written per second by a copy on `device`: the faster of the library's copy and a copying kernel.

    The library's copy is called, not captured: inside a CUDA graph it runs at two thirds of the rate on an H200.
    """
    device = torch.device(device)
    source = torch.zeros(COPIED_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    best = min(Repeatable(way, device, captured=False).time(repeats=10).p50 for way in ways)
    return 2 * source.nbytes / (best * 1e-3)


def product_rate(device, dtype):
    """Floating-point operations per second of the library's large square matrix product."""
    device = torch.device(device)
    side = SQUARE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / (time_of(lambda: a @ b, device, repeats=10).p50 * 1e-3)


def layer_tensors(layer):
    """Every weight of a decoder layer that a step reads."""
    attention, mlp = layer.attention, layer.mlp
    products = (*attention.qkv, *attention.out, *mlp.gate_up, *mlp.down)
    norms = (layer.input_norm.weight, attention.q_norm, attention.k_norm, layer.post_norm.weight)
    return [tensor for tensor in (*products, *norms) if tensor is not None]


def weight_bytes(decoder):
    """Bytes of weights that one pass of the target reads: layers, final norm and lm_head (and a few rows of the embedding)."""
    tensors = [tensor for layer in decoder.layers for tensor in layer_tensors(layer)]
    return sum(tensor.nbytes for tensor in [*tensors, decoder.norm.weight, decoder.lm_head])


def kv_bytes(decoder, batch, context):
    """Bytes of keys and values of `context` committed tokens of each of `batch` requests, all layers."""
    per_token = 2 * decoder.num_kv_heads * decoder.head_dim * decoder.dtype.itemsize
    return len(decoder.layers) * batch * context * per_token


def milliseconds(num_bytes, bandwidth, operations=0, rate=math.inf):
    """The floor of something that moves `num_bytes` and does `operations`."""
    return max(num_bytes / bandwidth, operations / rate) * 1e3
