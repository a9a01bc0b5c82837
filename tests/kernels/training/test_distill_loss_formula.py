"""Each loss and its written-out gradient against autograd on the formula in fp64, and against figures worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from headstart.kernels.training.distill_loss import LOSSES
from headstart.kernels.training.target_distribution import target_distribution
from headstart.tests.kernels.training.test_distill_loss import EVERY, RATE, distribution_of, make, run
from headstart.train.loss.losses import Loss

IDS = torch.tensor([0, 2, 3, 7, 8, 11, 12, 15, 16, 17, 19, 21, 22])  # a draft vocabulary of 13 of the 23


def by_formula(logits, labels, target_logits, loss, draft_ids=None):
    """The definition on plain probabilities, in the target's ids: what autograd differentiates."""
    p = target_logits.softmax(-1)
    slice_ = torch.arange(p.shape[-1]) if draft_ids is None else draft_ids
    q = logits.exp() / logits.exp().sum(-1, keepdim=True)
    p = p[:, slice_]
    kl = sum(p[:, i] * (p[:, i].log() - q[:, i].log()) for i in range(len(slice_)))
    alpha = sum(torch.minimum(p[:, i], q[:, i]) for i in range(len(slice_)))
    if loss.name == "hard":
        value = -q[torch.arange(len(q)), labels].log()
    elif loss.name == "hard-l1":
        distance = sum((p[:, i] - q[:, i]).abs() for i in range(len(slice_))) + 1 - p.sum(-1)  # outside q is 0
        value = -0.1 * q[torch.arange(len(q)), labels].log() + 0.9 * distance
    elif loss.name == "kl":
        value = kl
    elif loss.name == "lk":
        w = math.exp(-loss.eta * RATE)
        value = w * kl + (1 - w) * (1 - alpha)
    else:
        value = -alpha.log()
    if loss.top_k_weight:
        for row in range(len(q)):
            best = sorted(range(len(slice_)), key=lambda i: -p[row, i].item())[:10]
            extra = torch.zeros_like(value)
            extra[row] = 1.0
            value = value - extra * loss.top_k_weight * sum(p[row, i] * q[row, i].log() for i in best)
    return value, alpha


@pytest.mark.parametrize("draft_ids", [None, IDS], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_value_and_gradient_are_those_of_the_formula(loss, draft_ids):
    logits, labels, target = make(draft_ids)
    figures, gradient = run(logits, labels, distribution_of(target, loss, draft_ids), loss, factor=0.3)
    logits.requires_grad_()
    value, alpha = by_formula(logits, labels, target, loss, draft_ids)
    (0.3 * value).sum().backward()
    for one, other in ((figures.loss, value.detach()), (figures.alpha, alpha.detach()), (gradient, logits.grad)):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert logits.grad.abs().max() > 0.01


def test_losses_and_parameters_differ_from_each_other():
    logits, labels, target = make()
    values = [run(logits, labels, distribution_of(target, loss), loss)[0].loss.sum().item() for loss in EVERY]
    # eta counts in lk alone.
    assert len({round(value, 9) for value in values}) == len(EVERY) - 2 * 4


# Two tokens. p = (3/4, 1/4), q = (1/4, 3/4): alpha = 1/4 + 1/4 = 1/2, kl = 3/4 ln 3 - 1/4 ln 3 = ln 3 / 2.
# d alpha / dz = (kept - S q) with kept = (1/4, 0), S = 1/4: (3/16, -3/16).  d kl / dz = q - p = (-1/2, 1/2).
W = math.exp(-3 * RATE)
BY_HAND = {
    "hard": (math.log(4), (-3 / 4, 3 / 4)),  # of token 0
    "kl": (math.log(3) / 2, (-1 / 2, 1 / 2)),
    "lk": (W * math.log(3) / 2 + (1 - W) / 2, (-W / 2 - (1 - W) * 3 / 16, W / 2 + (1 - W) * 3 / 16)),
    "lk-log": (math.log(2), (-3 / 8, 3 / 8)),
    # |p - q| = (1/2, 1/2), whose sum is 2 (1 - alpha)
    "hard-l1": (0.1 * math.log(4) + 0.9 * 1, (-0.1 * 3 / 4 - 1.8 * 3 / 16, 0.1 * 3 / 4 + 1.8 * 3 / 16)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_two_tokens_by_hand(name):
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    distribution = target_distribution(torch.tensor([[math.log(3), 0.0]], dtype=torch.float64))
    figures, found = run(logits, torch.tensor([0]), distribution, Loss(name, eta=3.0))
    expected, gradient = BY_HAND[name]
    assert figures.loss.item() == pytest.approx(expected, abs=1e-14)
    assert figures.alpha.item() == pytest.approx(1 / 2, abs=1e-14)
    assert figures.rank.item() == 2
    assert found[0].tolist() == pytest.approx(gradient, abs=1e-14)


def test_draft_vocabulary_by_hand():
    """p = (1/2, 1/4, 1/8, 1/8), of which the draft knows tokens 1 and 3: slice (1/4, 1/8), P = 3/8; q = (1/5, 4/5)."""
    distribution = target_distribution(
        torch.tensor([[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log(), torch.tensor([1, 3])
    )
    assert distribution.mass.item() == pytest.approx(3 / 8)
    kl = math.log(5 / 4) / 4 + math.log(5 / 32) / 8  # below zero: the mass outside counts nothing
    alpha = 1 / 5 + 1 / 8
    w = math.exp(-3 * RATE)
    values = {"kl": kl, "lk": w * kl + (1 - w) * (1 - alpha), "lk-log": -math.log(alpha), "hard": -math.log(4 / 5)}
    # d kl / dz = P q - p = (3/40 - 1/4, 3/10 - 1/8); d alpha / dz = (1/5, 0) - 1/5 (1/5, 4/5) = (4/25, -4/25)
    gradients = {"kl": (-7 / 40, 7 / 40), "lk-log": (-0.16 / alpha, 0.16 / alpha), "hard": (0.2, -0.2)}
    for name, expected in values.items():
        logits = torch.tensor([[0.0, math.log(4)]], dtype=torch.float64)
        figures, gradient = run(logits, torch.tensor([1]), distribution, Loss(name))
        assert figures.loss.item() == pytest.approx(expected, abs=1e-14), name
        assert figures.alpha.item() == pytest.approx(alpha, abs=1e-14), name
        if name in gradients:
            assert gradient[0].tolist() == pytest.approx(gradients[name], abs=1e-14), name


def test_top_k_term_counts_the_ten_likeliest_tokens_alone():
    """Twelve tokens: p falls by halves; q is even, so that -log q is ln 12 everywhere."""
    p = torch.tensor([2.0**-i for i in range(12)], dtype=torch.float64)
    p = p / p.sum()
    loss = Loss("hard", top_k_weight=2.0)
    logits = torch.zeros(1, 12, dtype=torch.float64)
    figures, gradient = run(logits, torch.tensor([11]), distribution_of(p.log()[None], loss), loss)
    kept = p[:10].sum().item()
    assert figures.loss.item() == pytest.approx(math.log(12) * (1 + 2 * kept), abs=1e-13)
    expected = [(1 + 2 * kept) / 12 - 2 * share.item() for share in p[:10]] + [(1 + 2 * kept) / 12] * 2
    expected[11] -= 1
    assert gradient[0].tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("loss", [Loss("kl"), Loss("lk"), Loss("lk-log")], ids=str)
def test_the_targets_own_distribution_costs_nothing_and_moves_nothing(loss):
    logits = make()[2]
    figures, gradient = run(logits, torch.zeros(len(logits), dtype=torch.int64), target_distribution(logits), loss)
    assert figures.loss.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12
    assert (figures.alpha - 1).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["lk", "lk-log"])
def test_a_hopeless_draft_still_gets_a_finite_loss_and_a_gradient(name, device):
    """alpha underflows in fp32: the target is sure of one token, the draft of another."""
    distribution = target_distribution(torch.tensor([[300.0, 0.0, 0.0]] * 2, device=device))
    logits = torch.tensor([[0.0, 300.0, 0.0], [0.0, 30.0, 0.0]], device=device)  # alpha of the second is 1e-13
    figures, gradient = run(logits, torch.zeros(2, dtype=torch.int64, device=device), distribution, Loss(name))
    assert figures.loss.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient.abs().max() <= 1 + 1e-6
    # lk-log, and lk through its kl, still pull with all their might.
    might = 0.9 * (1 if name == "lk-log" else W)
    assert gradient[1, 0] < -might
    assert gradient[1, 1] > might


def test_cross_entropy_and_kl_are_torchs_own():
    logits, labels, target = make()
    hard = run(logits, labels, None, Loss("hard"))[0]
    torch.testing.assert_close(hard.loss, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-13, atol=0)
    assert hard.alpha is None
    kl = run(logits, labels, target_distribution(target), Loss("kl"))[0].loss
    expected = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-13)
