"""Digests of rows: those of the definition, of any change, and not of rows that do not count."""

import pytest
import torch

from headstart.kernels.row_digest import add_digest


def digest(x, places, first=64, before=0):
    total = torch.tensor([before], device=x.device)
    add_digest(total, x, places, first)
    return int(total)


@pytest.mark.parametrize(("dtype", "integer"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)])
@pytest.mark.parametrize("width", [7, 96, 2100])
def test_a_digest_adds_the_words_of_rows_that_count(device, dtype, integer, width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    places = torch.tensor([64, 3, 1 << 40, 63, 65])
    bits = x.view(integer)
    if dtype == torch.bfloat16 and width % 2 == 0:
        bits = bits.view(torch.int32)
    known = sum(bits[[0, 2, 4]].flatten().tolist())
    assert digest(x.to(device), places.to(device)) == known
    assert digest(x.to(device), places.to(device), before=-5) == known - 5
    assert digest(x[:0].to(device), places[:0].to(device), before=7) == 7


def test_one_bit_shows_where_the_row_counts(device):
    x, places = torch.randn(4, 64).bfloat16(), torch.tensor([0, 64, 64, 64])
    changed = x.clone()
    changed.view(torch.int16)[2, 17] ^= 1
    unread = x.clone()
    unread.view(torch.int16)[0, 17] ^= 1
    found = [digest(one.to(device), places.to(device)) for one in (x, changed, unread)]
    assert found[0] != found[1]
    assert found[0] == found[2]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"x \[M, H\] and places \[M\], got torch.int64 \(1,\), \(3, 4\) and \(2,\)"):
        add_digest(torch.zeros(1, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(2), 1)
