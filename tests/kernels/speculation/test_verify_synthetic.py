"""The synthetic rule's kernel against its reference: same hash, same path, same bonus."""

import torch

from headstart.kernels.speculation.verify_synthetic import verify_synthetic, verify_synthetic_reference


def test_the_kernel_follows_its_reference(kernel_device):
    generator = torch.Generator().manual_seed(0)
    batch, path = 200, torch.tensor([0, 2, 3, 6])
    seed = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    committed = torch.randint(0, 100_000, (batch,), generator=generator)
    remaining = torch.randint(0, 6, (batch,), generator=generator)
    target_tokens = torch.randint(0, 1000, (batch, 7), generator=generator)
    rates = torch.tensor([0.9, 0.6, 0.3, 0.1], dtype=torch.float64)
    expected = verify_synthetic_reference(path, rates, seed, committed, remaining, target_tokens)
    assert expected[1].unique().tolist() == [0, 1, 2, 3]
    arguments = [x.to(kernel_device) for x in (path, rates, seed, committed, remaining, target_tokens)]
    for found, wanted in zip(verify_synthetic(*arguments), expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
