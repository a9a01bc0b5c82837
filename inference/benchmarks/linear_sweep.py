"""`headstart bench kernel linear --sweep`: which launch of a product is fastest, for kernels/linear_table.py.

Every number of splits of K is measured, because it decides bits and is one for all rows; tiles, stages and warps change none. The
table is not written: its entries are chosen by hand, and a changed number of splits changes every output.
"""

import itertools

import torch
from tqdm import tqdm

from ...kernels.gated_mlp import gate_up_silu
from ...kernels.linear import decode_parts, empty_rows
from ...kernels.linear_prefill import maps_fit, prefill_linear
from ...kernels.linear_table import DECODE_ROWS, SPLIT_ALIGNMENT, Launch, PrefillLaunch, num_splits, tile_rows
from .timing import release, time_of

SHARED_MEMORY = 227 << 10  # bytes of an H200's multiprocessor that one program may take
PAST_L2 = 300e6  # bytes of weights that a measurement walks through, six times the L2


def decode_launches(rows, operands=1):
    """Launches that fit, for a row tile of `rows` and so many weight tiles at once."""
    for features, depth, stages, warps in itertools.product((64, 128), (64, SPLIT_ALIGNMENT), (3, 4, 6, 8), (4, 8)):
        taken = (features * operands + rows) * depth * 2 * stages
        accumulators = features * operands * rows // (32 * warps)
        if (
            taken <= SHARED_MEMORY
            and depth * stages >= 256
            and accumulators <= 160
            and (warps == 4 or features * depth >= 8192)
        ):
            yield Launch(features, depth, stages, warps)


def prefill_launches(splits, operands=1):
    """Launches that fit, for the kernel of many rows."""
    for (rows, features), stages, group in itertools.product(((128, 256), (256, 128), (128, 128)), (3, 4), (4, 8, 16)):
        if operands == 2 and (rows, features) != (128, 128):
            continue
        taken = (features * operands + rows) * 64 * 2 * stages + rows * min(features, 128) * (2 if splits == 1 else 4)
        if taken <= SHARED_MEMORY:
            yield PrefillLaunch(rows, features, 64, stages, 8, group)


def sweep_linear(products, rows=(1, 16, 32, 64, 80, 128, 256, 2048), device="cuda", dtype=torch.bfloat16, repeats=7):
    """Times of every launch of every product at every number of rows; prints the winners.

    products: {name: (N, K)}; one called "gate_up" is measured as gate_up_silu. Returns rows of {product, N, K, rows, splits,
    launch, microseconds, floor_microseconds}, the floor being the weights at 4.23 TB/s. Raises ValueError off the GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"the sweep measures GPU launches, got the device {device}")
    found = []
    for name, (N, K) in products.items():
        copies = max(2, min(8, int(PAST_L2 / (N * K * 2)) + 1))
        weights = [torch.randn(N, K, device=device, dtype=dtype) * K**-0.5 for _ in range(copies)]
        for count in rows:
            x = empty_rows(count, K, dtype, device).normal_()
            for splits in (1,) if name == "gate_up" else (1, 2, 4):
                lines = list(_sweep_one(name, x, weights, splits, repeats))
                found += lines
                if lines:
                    best = min(lines, key=lambda line: line["microseconds"])
                    chosen = " (the table's splits)" if splits == num_splits(N, K) else ""
                    print(
                        f"{name} {N} x {K}, {count} rows, {splits} splits: {best['microseconds']:.1f} us, weights alone "
                        f"{best['floor_microseconds']:.1f}: {best['launch']}{chosen}",
                        flush=True,
                    )
        del weights
        release(device)
    return found


def _sweep_one(name, x, weights, splits, repeats):
    """Lines of one product at one number of rows and of splits."""
    from triton.runtime.errors import OutOfResources

    (count, K), (N, _) = x.shape, weights[0].shape
    prefill, gated = count > DECODE_ROWS and maps_fit(x, weights[0]), name == "gate_up"
    launches = prefill_launches(splits, 1 + gated) if prefill else decode_launches(tile_rows(count), 1 + gated)
    # Most of the time goes into compiling each launch once.
    progress = dict(desc=f"{name}, {count} rows, {splits} splits", leave=False, disable=None, dynamic_ncols=True)
    for launch in tqdm(list(launches), **progress):

        def product(launch=launch):
            for w in weights:
                if gated:
                    gate_up_silu(x, w, launch=launch)
                elif prefill:
                    prefill_linear(x, w, splits=splits, launch=launch)
                else:
                    decode_parts(x, w, splits=splits, launch=launch)

        try:
            milliseconds = time_of(product, x.device, repeats, num_calls=len(weights)).p50
        except OutOfResources:
            continue  # the estimate above lets a few through that the compiler cannot place
        yield dict(
            product=name, N=N, K=K, rows=count, splits=splits, launch=launch,
            microseconds=milliseconds * 1e3, floor_microseconds=N * K * 2 / 4.23e6,
        )  # fmt: skip
