"""Each loss and its written-out gradient against autograd on the formula in fp64, and against figures worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from headstart.train.losses import LOSSES, Loss, row_losses, target_law

V = 23
IDS = torch.tensor([0, 2, 3, 7, 8, 11, 12, 15, 16, 17, 19, 21, 22])  # a draft vocabulary of 13 of the 23
EVERY = [Loss(name, eta, weight) for name in LOSSES for eta in (3.0, 10.0) for weight in (0.0, 0.7)]


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
    elif loss.name == "kl":
        value = kl
    elif loss.name == "lk":
        w = (-loss.eta * alpha).exp().detach()
        value = w * kl + (1 - w) * (1 - alpha)
    else:
        value = -alpha.log()
    if loss.top_k_weight:
        for row in range(len(q)):
            best = sorted(range(len(slice_)), key=lambda i: -p[row, i].item())[:10]
            extra = torch.zeros_like(value)
            extra[row] = 1.0
            value = value - extra * loss.top_k_weight * sum(p[row, i] * q[row, i].log() for i in best)
    return value


def make(draft_ids=None, rows=7, scale=1.5):
    g = torch.Generator().manual_seed(0)
    target = torch.randn(rows, V, generator=g, dtype=torch.float64) * scale
    size = V if draft_ids is None else len(draft_ids)
    logits = torch.randn(rows, size, generator=g, dtype=torch.float64) * scale
    return logits.requires_grad_(), torch.randint(0, size, (rows,), generator=g), target


def value_and_gradient(function, logits, factors):
    logits.grad = None
    value = function(logits)
    (value * factors).sum().backward()
    return value.detach(), logits.grad.clone()


@pytest.mark.parametrize("draft_ids", [None, IDS], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_value_and_gradient_are_those_of_the_formula(loss, draft_ids):
    logits, labels, target = make(draft_ids)
    factors = torch.linspace(0.5, 2.0, len(logits), dtype=torch.float64)  # rows weigh differently
    law = target_law(target, draft_ids) if loss.needs_law else None
    ours = value_and_gradient(lambda z: row_losses(z, labels, law, loss), logits, factors)
    theirs = value_and_gradient(lambda z: by_formula(z, labels, target, loss, draft_ids), logits, factors)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert theirs[1].abs().max() > 0.01


def test_losses_and_parameters_differ_from_each_other():
    logits, labels, target = make()
    values = [row_losses(logits, labels, target_law(target), loss).sum().item() for loss in EVERY]
    # eta counts in lk alone.
    assert len({round(value, 9) for value in values}) == len(EVERY) - 2 * 3


# Two tokens. p = (3/4, 1/4), q = (1/4, 3/4): alpha = 1/4 + 1/4 = 1/2, kl = 3/4 ln 3 - 1/4 ln 3 = ln 3 / 2.
# d alpha / dz = (kept - S q) with kept = (1/4, 0), S = 1/4: (3/16, -3/16).  d kl / dz = q - p = (-1/2, 1/2).
W = math.exp(-1.5)
BY_HAND = {
    "hard": (math.log(4), (-3 / 4, 3 / 4)),  # of token 0
    "kl": (math.log(3) / 2, (-1 / 2, 1 / 2)),
    "lk": (W * math.log(3) / 2 + (1 - W) / 2, (-W / 2 - (1 - W) * 3 / 16, W / 2 + (1 - W) * 3 / 16)),
    "lk-log": (math.log(2), (-3 / 8, 3 / 8)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_two_tokens_by_hand(name):
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64, requires_grad=True)
    law = target_law(torch.tensor([[math.log(3), 0.0]], dtype=torch.float64))
    value = row_losses(logits, torch.tensor([0]), law, Loss(name, eta=3.0))
    value.backward()
    expected, gradient = BY_HAND[name]
    assert value.item() == pytest.approx(expected, abs=1e-14)
    assert logits.grad[0].tolist() == pytest.approx(gradient, abs=1e-14)


def test_draft_vocabulary_by_hand():
    """p = (1/2, 1/4, 1/8, 1/8), of which the draft knows tokens 1 and 3: slice (1/4, 1/8), P = 3/8; q = (1/5, 4/5)."""
    law = target_law(torch.tensor([[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log(), torch.tensor([1, 3]))
    assert law.mass.item() == pytest.approx(3 / 8)
    kl = math.log(5 / 4) / 4 + math.log(5 / 32) / 8  # below zero: the mass outside counts nothing
    alpha = 1 / 5 + 1 / 8
    w = math.exp(-3 * alpha)
    values = {"kl": kl, "lk": w * kl + (1 - w) * (1 - alpha), "lk-log": -math.log(alpha), "hard": -math.log(4 / 5)}
    # d kl / dz = P q - p = (3/40 - 1/4, 3/10 - 1/8); d alpha / dz = (1/5, 0) - 1/5 (1/5, 4/5) = (4/25, -4/25)
    gradients = {"kl": (-7 / 40, 7 / 40), "lk-log": (-0.16 / alpha, 0.16 / alpha), "hard": (0.2, -0.2)}
    for name, expected in values.items():
        logits = torch.tensor([[0.0, math.log(4)]], dtype=torch.float64, requires_grad=True)
        value = row_losses(logits, torch.tensor([1]), law, Loss(name))
        value.backward()
        assert value.item() == pytest.approx(expected, abs=1e-14), name
        if name in gradients:
            assert logits.grad[0].tolist() == pytest.approx(gradients[name], abs=1e-14), name


def test_top_k_term_counts_the_ten_likeliest_tokens_alone():
    """Twelve tokens: p falls by halves; q is even, so that -log q is ln 12 everywhere."""
    p = torch.tensor([2.0**-i for i in range(12)], dtype=torch.float64)
    p = p / p.sum()
    logits = torch.zeros(1, 12, dtype=torch.float64, requires_grad=True)
    loss = Loss("hard", top_k_weight=2.0)
    value = row_losses(logits, torch.tensor([11]), target_law(p.log()[None]), loss)
    value.backward()
    kept = p[:10].sum().item()
    assert value.item() == pytest.approx(math.log(12) * (1 + 2 * kept), abs=1e-13)
    expected = [(1 + 2 * kept) / 12 - 2 * share.item() for share in p[:10]] + [(1 + 2 * kept) / 12] * 2
    expected[11] -= 1
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("loss", [Loss("kl"), Loss("lk"), Loss("lk-log")], ids=str)
def test_the_targets_own_law_costs_nothing_and_moves_nothing(loss):
    logits = make()[2].requires_grad_()
    value = row_losses(logits, torch.zeros(len(logits), dtype=torch.int64), target_law(logits.detach()), loss)
    value.sum().backward()
    assert value.abs().max() < 1e-12
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["lk", "lk-log"])
def test_a_hopeless_draft_still_gets_a_finite_loss_and_a_gradient(name):
    """alpha underflows in fp32: the target is sure of one token, the draft of another."""
    law = target_law(torch.tensor([[300.0, 0.0, 0.0]]))
    logits = torch.tensor([[0.0, 300.0, 0.0]], requires_grad=True)
    value = row_losses(logits, torch.tensor([0]), law, Loss(name))
    value.backward()
    assert value.isfinite().all()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().max() <= 1 + 1e-6
    near = torch.tensor([[0.0, 30.0, 0.0]], requires_grad=True)  # alpha is 1e-13: lk-log still pulls with all its might
    row_losses(near, torch.tensor([0]), law, Loss(name)).backward()
    assert near.grad[0, 0] < -0.9
    assert near.grad[0, 1] > 0.9


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_bfloat16_logits_lose_no_more_than_rounding_them_does(loss):
    g = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(9, 301, generator=g) * 4 for _ in range(2))
    labels = torch.randint(0, 301, (9,), generator=g)
    rounded, exact = logits.bfloat16().requires_grad_(), logits.bfloat16().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # which must not reach into the sums
        value = row_losses(rounded, labels, target_law(target), loss)
    expected = row_losses(exact, labels, target_law(target.double()), loss)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    value.sum().backward()
    expected.sum().backward()
    assert rounded.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


def test_cross_entropy_and_kl_are_torchs_own():
    logits, labels, target = make()
    hard = row_losses(logits, labels, None, Loss("hard"))
    torch.testing.assert_close(hard, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-13, atol=0)
    kl = row_losses(logits, labels, target_law(target), Loss("kl"))
    expected = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-13)


def test_unknown_losses_are_refused():
    with pytest.raises(ValueError, match="loss must be one of hard, kl, lk, lk-log, got 'tv'"):
        Loss("tv")
