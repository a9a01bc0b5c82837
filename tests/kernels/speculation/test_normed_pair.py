"""EAGLE-3's pair in one launch: the bits of an embedding, two norms and a join."""

import pytest
import torch

from headstart.kernels.speculation.normed_pair import normed_pair, normed_pair_reference


@pytest.mark.parametrize("width", [32, 72, 4096])
def test_bits_are_those_of_four_launches(kernel_device, width):
    generator = torch.Generator().manual_seed(0)
    for rows, dtype in ((1, torch.float32), (7, torch.bfloat16), (300, torch.float16))[
        : 1 if kernel_device == "cpu" else 3
    ]:
        table, state = (torch.randn(n, width, generator=generator).to(kernel_device, dtype) for n in (50, rows))
        norms = [torch.rand(width, generator=generator).to(kernel_device, dtype) for _ in range(2)]
        tokens = torch.randint(50, (rows,), generator=generator).to(kernel_device)
        given = tokens, table, norms[0], state, norms[1], 1e-5, 1e-3
        for found, expected in zip(normed_pair(*given), normed_pair_reference(*given)):
            assert torch.equal(found, expected)
        swapped = tokens, table, norms[0], state, norms[1], 1e-3, 1e-5
        assert not torch.equal(normed_pair(*given)[0], normed_pair(*swapped)[0])


def test_what_does_not_fit_is_refused():
    tokens, rows, norm = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="two norms"):
        normed_pair(tokens[:2], rows, norm, rows, norm, 0, 0)
    with pytest.raises(ValueError, match="two norms"):
        normed_pair(tokens, rows, norm, rows, norm[:4], 0, 0)
