"""`headstart bench kernel linear --sweep`: find the fastest launch of a product, for kernels/linear/linear_table.py.

Every number of splits of K is measured, because it decides bits and must be the same for all rows; tiles, stages and warps change
no bit. The table is not written: its entries are chosen by hand, and a changed number of splits changes every output.
"""

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from tqdm import tqdm

from ...evaluation.timing import release, time_of
from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.linear.linear import decode_parts, empty_rows, prefill_parts
from ...kernels.linear.linear_prefill import maps_fit
from ...kernels.linear.linear_table import (
    DECODE_ROWS,
    HANDOVER,
    SPLIT_ALIGNMENT,
    Launch,
    PrefillLaunch,
    num_shares,
    num_splits,
    tile_rows,
)

SHARED_MEMORY = 227 << 10  # bytes of an H200's multiprocessor that one program may take
MULTIPROCESSORS = 132  # of an H200
PAST_L2 = 300e6  # bytes of weights that a measurement walks through, six times the L2


class Case(NamedTuple):
    """One launch of one product: w [N, K] times `count` rows."""

    name: str
    N: int
    K: int
    count: int
    splits: int
    launch: Launch | PrefillLaunch

    def run(self, x, w):
        if self.name == "gate_up":
            gate_up_silu(x, w, launch=self.launch)
        elif isinstance(self.launch, PrefillLaunch):
            prefill_parts(x, w, splits=self.splits, launch=self.launch)
        else:
            decode_parts(x, w, splits=self.splits, launch=self.launch)


def decode_launches(rows, operands=1):
    """Launches that fit, for a row tile of `rows` and `operands` weight tiles at once."""
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
    tiles = ((128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8), (64, 256, 4), (160, 128, 4), (192, 128, 4))
    for (rows, features, warps), stages, apart in itertools.product(
        tiles, (3, 4, 5, 6), (False, True)[: 1 + (splits > 1)]
    ):
        if operands == 2 and rows == 256:
            continue
        launch = PrefillLaunch(rows, features // operands, 64, stages, warps, 8, apart)
        stored = 0 if launch.in_halves else rows * min(features, 128) * (2 if splits == 1 else 4)
        if (features + rows) * 64 * 2 * stages + stored <= SHARED_MEMORY and (
            apart or splits == 1 or not launch.in_halves
        ):
            yield launch
    for launch in sorted({launch for by_rows in HANDOVER.values() for launch in by_rows.values()}):
        yield launch._replace(features=launch.features // operands)


def shared_launches():
    """Launches for the decode kernel's widest row tile whose programs hand over sums (linear_handover.py).

    With tiles of 64 features a program reads two bytes of 128 rows for each byte of weights, all through the L2. Wider tiles read
    fewer, but are too few for all multiprocessors unless they are shared.
    """
    for features, stages, warps in ((64, 8, 4), (128, 6, 4), (128, 6, 8), (256, 4, 8)):
        yield PrefillLaunch(DECODE_ROWS, features, 64, stages, warps, 1, True, True)


def _runs(launch, N, splits, rows):
    """Whether a launch takes so many rows: one whose tiles are handed over needs a program for each row tile."""
    handover = isinstance(launch, PrefillLaunch) and launch.handover
    return not handover or num_shares(launch, N, splits, rows, MULTIPROCESSORS) > 0


def cases_of(products, rows, dtype):
    """Every launch worth trying.  products: {name: (N, K)} -> list of Case"""
    cases = []
    for (name, (N, K)), count in itertools.product(products.items(), rows):
        shapes = [torch.empty(size, K, dtype=dtype, device="meta") for size in (count, N)]
        prefill, operands = count > DECODE_ROWS and maps_fit(*shapes), 1 + (name == "gate_up")
        for splits in (1,) if name == "gate_up" else (1, 2, 4):
            if prefill:
                launches = prefill_launches(splits, operands)
            else:
                # gate_up_silu takes none at so few rows.
                widest = operands == 1 and tile_rows(count) == DECODE_ROWS and maps_fit(*shapes)
                shared = shared_launches() if widest else ()
                launches = [*decode_launches(tile_rows(count), operands), *shared]
            cases += [Case(name, N, K, count, splits, launch) for launch in launches if _runs(launch, N, splits, count)]
    return cases


def _compile(case, device, dtype):
    """Run one case once, so that Triton's cache on disk holds the compiled kernel."""
    from triton.runtime.errors import OutOfResources

    try:
        with torch.cuda.device(device):
            case.run(
                empty_rows(case.count, case.K, dtype, device), torch.empty(case.N, case.K, dtype=dtype, device=device)
            )
            torch.cuda.synchronize(device)
    except (OutOfResources, torch.cuda.OutOfMemoryError):
        pass  # measured or skipped later


def compile_ahead(cases, device, dtype):
    """Compile all cases in as many processes as there are cores: compiling takes most of a sweep's time."""
    workers = min(max((os.cpu_count() or 1) - 1, 1), 16)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        work = pool.map(_compile, cases, itertools.repeat(device), itertools.repeat(dtype), chunksize=4)
        for _ in tqdm(work, desc="compiling", total=len(cases), leave=False, disable=None, dynamic_ncols=True):
            pass


def sweep_linear(products, rows=(1, 16, 32, 64, 80, 128, 256, 2048), device="cuda", dtype=torch.bfloat16, repeats=7):
    """Times of every launch of every product at every number of rows; prints the winners.

    products: {name: (N, K)}; the product "gate_up" is measured as gate_up_silu. Returns rows of {product, N, K, rows, splits,
    launch, microseconds, floor_microseconds}, the floor being the weights at 4.23 TB/s. Raises ValueError off the GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"the sweep measures GPU launches, got the device {device}")
    cases, found = cases_of(products, rows, dtype), []
    compile_ahead(cases, device, dtype)
    for (N, K), of_product in itertools.groupby(cases, lambda case: (case.N, case.K)):
        copies = max(2, min(8, int(PAST_L2 / (N * K * 2)) + 1))
        weights = [torch.randn(N, K, device=device, dtype=dtype) * K**-0.5 for _ in range(copies)]
        for (name, count, splits), group in itertools.groupby(
            of_product, lambda case: (case.name, case.count, case.splits)
        ):
            x = empty_rows(count, K, dtype, device).normal_()
            lines = [line for line in (_measure(case, x, weights, repeats) for case in group) if line]
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


def _measure(case, x, weights, repeats):
    """The line of one case, or None if the compiler cannot fit it."""
    from triton.runtime.errors import OutOfResources

    try:
        times = time_of(lambda: [case.run(x, w) for w in weights], x.device, repeats, num_calls=len(weights))
    except OutOfResources:
        return None  # the estimate of decode_launches is too low for a few
    return dict(
        product=case.name, N=case.N, K=case.K, rows=case.count, splits=case.splits, launch=case.launch,
        microseconds=times.p50 * 1e3, floor_microseconds=case.N * case.K * 2 / 4.23e6,
    )  # fmt: skip
