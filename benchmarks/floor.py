"""The physical floor: the shortest time that memory and arithmetic allow, from rates measured in the same run.

A decoding step cannot be faster than reading its weights and its keys and values once. The rate is that of a plain device-to-device
copy, bytes read and written counted; a kernel that only reads may go a little faster, so a ratio of slightly under 1 is possible.
Many rows take longer to multiply than to read: StepFloor counts both.
"""

import math
from dataclasses import dataclass

import torch

from ..evaluation.timing import Repeatable

COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # well past the caches
SQUARE = {"cuda": 8192, "cpu": 512}  # side of the matrix product that gives the best rate of arithmetic
PRODUCTS = 10  # that are timed
LASTING = {
    "cuda": 2000,
    "cpu": PRODUCTS,
}  # for a rate that lasts: three seconds, as a measured run of an engine takes at least


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


def product_rate(device, dtype, lasting=False):
    """Floating-point operations per second of the library's large square matrix product.

    lasting: the median over three seconds, most of which a GPU is at its power limit. Ten products after a pause gave 680 to 792
    TFLOP/s in 28 runs on H100s.
    """
    kind = torch.device(device).type
    repeats = LASTING[kind] if lasting else PRODUCTS
    return 2 * SQUARE[kind] ** 3 / (large_product(device, dtype).time(repeats).p50 * 1e-3)


def large_product(device, dtype):
    """The product that gives this rate: a Repeatable."""
    side = SQUARE[torch.device(device).type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return Repeatable(lambda: a @ b, device)


def layer_bytes(layer):
    """Bytes of every weight of a decoder layer that a step reads."""
    attention, mlp = layer.attention, layer.mlp
    products = attention.qkv, attention.out, mlp.gate_up, mlp.down
    norms = layer.input_norm.weight, attention.q_norm, attention.k_norm, layer.post_norm.weight
    others = [tensor for tensor in (*norms, *(product.bias for product in products)) if tensor is not None]
    return sum(one.nbytes for one in (*products, *others))


def weight_bytes(decoder, rows=1 << 30):
    """Bytes of weights that one pass of the target reads: layers, final norm and lm_head (and a few rows of the embedding).

    rows: of the pass, which decide how many experts a mixture reads.
    """
    if not decoder.is_packed:
        return decoder.read_bytes(rows)
    return sum(map(layer_bytes, decoder.layers)) + decoder.norm.weight.nbytes + decoder.lm_head.nbytes


def kv_bytes(decoder, batch, context):
    """Bytes of keys and values of `context` committed tokens of each of `batch` requests, all layers."""
    per_token = 2 * decoder.num_kv_heads * decoder.head_dim * decoder.dtype.itemsize
    return len(decoder.layers) * batch * context * per_token


def milliseconds(num_bytes, bandwidth, operations=0, rate=math.inf):
    """The floor of something that moves `num_bytes` and does `operations`."""
    return max(num_bytes / bandwidth, operations / rate) * 1e3


@dataclass(frozen=True)
class StepFloor:
    """The least seconds of decode steps, by phases that follow one another. Products of attention and of drafts are left out.

    Each pass of a draft reads its weights and keys anew: of few requests they may stay in the L2, so that less than the floor is
    possible.

    bandwidth: bytes per second; rate: floating-point operations per second, over time.
    """

    decoder: object
    bandwidth: float
    rate: float

    def of(self, steps, rows, context, head=None, depth=0, saved=None):
        """{"floor_products", "floor_keys", "floor_drafts"} of so many steps.

        rows: nodes of all requests and steps; context: committed tokens of all requests, read in all steps; head, depth: of drafts;
        saved: Drafter.saved_bytes of who drafts
        """
        weights, size = weight_bytes(self.decoder, rows / steps), self.decoder.dtype.itemsize
        multiplied = weight_bytes(self.decoder, 1)  # by each row: its own experts alone
        parts = {} if head is None else head.draft_bytes(self.decoder.lm_head.nbytes)
        parts = {part: whole - (saved or {}).get(part, 0) for part, whole in parts.items()}
        drafts = steps * (parts.get("first", 0) + (depth - 1) * parts.get("level", 0) + parts.get("advance", 0))
        drafts += 0 if head is None else head.draft_key_bytes(depth) * context
        return {
            "floor_products": max(steps * weights / self.bandwidth, 2 * multiplied / size * rows / self.rate),
            "floor_keys": kv_bytes(self.decoder, 1, context) / self.bandwidth,
            "floor_drafts": drafts / self.bandwidth,
        }
