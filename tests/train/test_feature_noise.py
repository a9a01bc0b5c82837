"""The noise on the features that EAGLE heads are trained with: train/eagle.py."""

import pytest
import torch

from headstart.train import eagle


def test_noise_is_uniform_as_wide_as_its_document_is_short_and_its_own_in_every_row():
    features = torch.zeros(2, 256, 50)
    document_ids = torch.tensor([[0] * 128 + [1] * 64 + [-1] * 64, [0] * 256])
    noise = eagle.add_noise(features, document_ids, 0.2, [5, 6])
    for part, width in ((noise[0, :128], 0.8), (noise[0, 128:192], 1.6), (noise[1], 0.4)):
        assert part.abs().max() <= width / 2
        assert part.std() == pytest.approx(width / 12**0.5, rel=0.03)
        assert abs(part.mean()) < 0.02 * width
    assert torch.equal(eagle.add_noise(features[1:], document_ids[1:], 0.2, [6])[0], noise[1])
    seeds = [*eagle.noise_seeds(0, 3, range(8)), *eagle.noise_seeds(0, 4, range(8)), *eagle.noise_seeds(1, 3, range(8))]
    assert len(set(seeds)) == 24
    assert eagle.noise_seeds(0, 3, range(4, 8)) == seeds[4:8]
