"""Normalisers of rows against softmax in fp64."""

import pytest
import torch

from headstart.kernels.speculation.row_distributions import probabilities, row_distributions


def distribution_of(scores, temperature, distributions):
    heat = torch.where(temperature > 0, temperature, 1)[:, None].double()
    return ((scores.double() - distributions.top[:, None].double()) / heat).exp() / distributions.total[
        :, None
    ].double()


@pytest.mark.parametrize("vocab_size", [1, 13, 4096, 9001])
def test_distributions_are_those_of_softmax(device, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    scores = 8 * torch.randn(6, vocab_size, generator=generator)
    scores[1, : vocab_size // 2] = -torch.inf
    scores[2, vocab_size // 2 + 1 :] = torch.nan  # counts as minus infinity
    scores[4] += 1e4
    temperature = torch.tensor([1.0, 0.7, 0.1, 2.0, 1.0, 0.0])
    for dtype in (torch.float32, torch.bfloat16)[: 2 if device == "cuda" else 1]:
        told = scores.to(dtype)
        distributions = row_distributions(told.to(device), temperature.to(device))
        distributions = type(distributions)(*(x.cpu() for x in distributions))
        clean = told.double().masked_fill(told.isnan(), -torch.inf)
        expected = (clean[:5] / temperature[:5, None].double()).softmax(-1)
        assert torch.allclose(
            distribution_of(clean[:5], temperature[:5], type(distributions)(*(x[:5] for x in distributions))),
            expected,
            rtol=2e-6,
        )
        assert distributions.best.tolist() == clean.argmax(-1).tolist()
        assert distributions.total[5] == 1
        assert torch.allclose(probabilities(told, temperature)[:5].double(), expected, rtol=1e-3, atol=1e-6)
        assert torch.equal(probabilities(told, temperature)[5].nonzero().flatten(), distributions.best[5:])


def test_ties_go_to_the_lowest_token_and_rows_do_not_see_each_other(device):
    scores = torch.zeros(4, 5000)
    scores[0, [4999, 4100, 77]] = 3
    scores[1:] = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.5, 0.9])
    together = row_distributions(scores.to(device), temperature.to(device))
    assert together.best[0] == 77
    for row in range(4):  # the temperatures of the first rows hold for those that follow
        alone = row_distributions(scores[row : row + 1].to(device), temperature[row % 2 : row % 2 + 1].to(device))
        assert all(torch.equal(x, y[row : row + 1]) for x, y in zip(alone, together))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="row_distributions takes"):
        row_distributions(torch.zeros(4, 3), torch.zeros(3))
