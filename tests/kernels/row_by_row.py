"""The rows of an op's result, alone and in company."""

import torch

COUNTS = (1, 2, 7, 15, 16, 17, 33, 64)


def assert_rows_agree(op, x):
    """op(x) row by row, in every count of rows and at several places, equals op of all rows."""
    whole = op(x)
    for count in COUNTS:
        for start in (0, 5, x.shape[0] - count):
            assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count]), (count, start)
