"""block_convolution: against the formula number by number, in parts, rows that keep to their block."""

import pytest
import torch

from headstart.kernels.block_convolution import block_convolution
from headstart.tests.kernels.row_by_row import assert_rows_agree

SHAPES = [
    (3, 4, 24, 2, 6),
    (1, 5, 31, 3, 1),
    (2, 7, 1056, 2, 66),
    (4, 1, 8, 1, 8),
]  # blocks, slots, channels, taps, groups


def operands(blocks, slots, width, taps, groups, num_parts=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(width)
    rows = blocks * slots
    x = torch.randn(num_parts, rows, width, generator=generator).to(dtype)
    base = torch.randn(taps, width, generator=generator).to(dtype)
    # A part of a product's columns, as the engine has them.
    both = torch.randn(rows, 2, taps, groups, generator=generator).to(dtype)
    return x, base, both


def formula(x, base, corrections, slots):
    """Every number by itself, in fp64."""
    (rows, width), groups = x.shape, corrections.shape[-1]
    x, base, corrections = x.double(), base.double(), corrections.double()
    found = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        for tap in range(min(len(base), row % slots + 1)):
            factor = base[tap] + corrections[row, tap].repeat_interleave(width // groups)
            found[row] += factor * x[row - tap]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_values_are_those_of_the_formula(device, shape, num_parts):
    for dtype in [torch.float32] + [torch.bfloat16] * (device == "cuda"):
        x, base, both = operands(*shape, num_parts, dtype)
        if num_parts > 1:  # as products leave them
            x = x.float()
        for side in (0, 1):
            given = x if num_parts > 1 else x[0]
            found = block_convolution(given.to(device), base.to(device), both.to(device)[:, side], shape[1])
            assert found.dtype == dtype
            wanted = formula(x.sum(0).to(dtype), base, both[:, side], shape[1])
            bound = 1e-5 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("mutant", ["the block before", "one tap late", "groups side by side"])
def test_other_formulas_are_seen(mutant):
    blocks, slots = SHAPES[0][:2]
    x, base, both = operands(*SHAPES[0])
    wanted = formula(x[0], base, both[:, 0], slots)
    if mutant == "the block before":
        found = block_convolution(x, base, both[:, 0], slots * blocks)
    elif mutant == "one tap late":
        found = block_convolution(x, base.flip(0), both[:, 0].flip(1), slots)
    else:
        found = block_convolution(x, base, both[:, 0].flip(2), slots)
    assert (found - wanted).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_do_not_depend_on_each_other(dtype):
    check_blocks(operands(20, 4, 96, 2, 6, dtype=dtype), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_do_not_depend_on_each_other_on_the_gpu(dtype):
    for width, groups in ((1100, 55), (5120, 320)):
        check_blocks(operands(20, 8, width, 2, groups, num_parts=2, dtype=dtype), "cuda")


def check_blocks(given, device):
    x, base, both = (one.to(device) for one in given)
    slots = x.shape[1] // 20
    joined = torch.cat((*x, both[:, 0].flatten(1)), 1).unflatten(0, (20, slots)).flatten(1)  # a row per block

    def whole(blocks):
        rows = blocks.view(len(blocks) * slots, -1)
        parts, corrections = rows.split((len(x) * x.shape[2], rows.shape[1] - len(x) * x.shape[2]), 1)
        parts = parts.unflatten(1, (len(x), -1)).transpose(0, 1)
        corrections = corrections.unflatten(1, both.shape[2:])
        return block_convolution(parts, base, corrections, slots).view(len(blocks), -1)

    assert_rows_agree(whole, joined)


def test_shapes_that_do_not_fit_are_refused():
    x, base, both = operands(*SHAPES[0])
    for wrong in (
        (x[None], base, both[:, 0], 4),
        (x, base[:, :5], both[:, 0], 4),
        (x, base, both[:, 0, :1], 4),
        (x, base, both[:, 0, :, :5], 4),
        (x, base, both[:, 0], 5),
    ):
        with pytest.raises(ValueError, match="block_convolution takes x"):
            block_convolution(*wrong)
    assert block_convolution(x[:, :0], base, both[:0, 0], 4).shape == (0, 24)
