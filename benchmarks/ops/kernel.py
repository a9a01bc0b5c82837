"""`headstart bench kernel`: one operation at the sizes of a named shape, against the library and the floor.

The weights, keys or rows that an operation reads are rotated past the last-level cache, as the layers of a model do, and all of a
round is one CUDA graph; figures are per call. The floor is the larger of bytes over the rate of a copy and operations over the rate
of the library's 8192 x 8192 x 8192 product, both measured in the same run.
"""

import torch

from ...evaluation.results import Report
from ...evaluation.timing import release
from ..shape import check_fits, config_of_shape
from .attention import bench_attention, bench_commit, bench_prefill_attention, bench_rotary
from .kernel_bench import COLUMNS, KernelBench, Sizes
from .losses import bench_distill_loss
from .products import bench_gated_mlp, bench_linear, bench_res_block
from .rows import (
    bench_block_convolution,
    bench_embedding,
    bench_layer_norm,
    bench_rms_norm,
    bench_sample,
    bench_verify,
)
from .rules import bench_rules
from .trained_parts import bench_trained_parts


def bench_kernel(settings, device, dtype, command, output=None, commit=None):
    """Measure one operation, or "all". Prints the table, then the JSON object, which is returned."""
    device = torch.device(device)
    names = list(OPERATIONS) if settings.op == "all" else [settings.op]
    if device.type != "cuda" and settings.op == "prefill_attention":
        raise ValueError(
            "prefill_attention runs on a GPU only: elsewhere prompts go through the pass that verifies trees"
        )
    sizes = Sizes.of(config_of_shape(settings.shape))
    check_fits(settings.shape, device, dtype, num_bytes=largest_product, what="the largest weights")
    report = Report("kernel", COLUMNS, device, command, vars(settings), output, commit)
    bench = KernelBench(settings, sizes, device, dtype, report)
    for name in names:
        if device.type == "cuda" or name != "prefill_attention":
            release(device)
            with torch.no_grad():
                OPERATIONS[name](bench)
    return report.finish()


def largest_product(config, dtype):
    """Bytes of the largest weights of one product: more than one product's are never held at once."""
    return dtype.itemsize * max(out * width for out, width in Sizes.of(config).products.values())


def sweep_kernel(settings, device, dtype, command, output=None, commit=None):
    """Try launch configurations of linear for the shape's products; prints the winners, then the JSON object, which is returned."""
    if settings.op != "linear":
        raise ValueError(f"--sweep is for linear, whose launches stand in a table; got {settings.op!r}")
    from .linear_sweep import sweep_linear

    report = Report("kernel-sweep", {}, device, command, vars(settings), output, commit)
    products = Sizes.of(config_of_shape(settings.shape)).products
    report.rows = sweep_linear(products, settings.rows, torch.device(device), dtype)
    return report.finish()


OPERATIONS = {
    "linear": bench_linear,
    "gated_mlp": bench_gated_mlp,
    "attention": bench_attention,
    "prefill_attention": bench_prefill_attention,
    "rms_norm": bench_rms_norm,
    "layer_norm": bench_layer_norm,
    "rotary": bench_rotary,
    "embedding": bench_embedding,
    "res_block": bench_res_block,
    "sample": bench_sample,
    "verify": bench_verify,
    "block_convolution": bench_block_convolution,
    "rules": bench_rules,
    "distill_loss": bench_distill_loss,
    "trained_parts": bench_trained_parts,
    "commit": bench_commit,
}
