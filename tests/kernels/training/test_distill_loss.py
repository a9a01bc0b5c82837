"""The kernel of the losses against the reference in fp64: at every size, at extreme logits, in bfloat16, and what it refuses.

The reference against the formula and figures by hand: test_distill_loss_formula.py.
"""

import math

import pytest
import torch

from headstart.kernels.training.distill_loss import LOSSES, NO_RANK, distill_loss, distill_loss_reference
from headstart.kernels.training.target_distribution import (
    target_distribution,
    target_distribution_reference,
    with_likely,
)
from headstart.train.loss.losses import Loss

V = 23
EVERY = [Loss(name, eta, weight) for name in LOSSES for eta in (3.0, 10.0) for weight in (0.0, 0.7)]
KINDS = [loss for loss in EVERY if loss.eta == 3.0]
RATE = 0.3  # of acceptance, which lk's weight of kl hangs on


def distribution_of(target, loss, draft_ids=None):
    return target_distribution(target, draft_ids, loss.top_k if loss.top_k_weight else 0)


def exact_distribution_of(target, loss, draft_ids=None):
    """The same by the reference, which takes fp64 wherever it runs."""
    distribution = target_distribution_reference(target, draft_ids)
    return with_likely(distribution, loss.top_k) if loss.top_k_weight else distribution


def run(logits, labels, distribution, loss, valid=None, factor=1.0, op=distill_loss):
    """(figures, gradient) on a copy of the logits."""
    gradient = logits.detach().clone()
    valid = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if valid is None else valid
    figures = op(
        gradient,
        labels,
        valid,
        distribution,
        name=loss.name,
        kl_weight=loss.kl_weight(RATE),
        top_k_weight=loss.top_k_weight,
        factor=factor,
        measure=True,
    )
    return figures, gradient


def make(draft_ids=None, rows=7, scale=1.5):
    g = torch.Generator().manual_seed(0)
    target = torch.randn(rows, V, generator=g, dtype=torch.float64) * scale
    size = V if draft_ids is None else len(draft_ids)
    logits = torch.randn(rows, size, generator=g, dtype=torch.float64) * scale
    return logits, torch.randint(0, size, (rows,), generator=g), target


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_bfloat16_logits_lose_no_more_than_rounding_them_does(loss):
    g = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(9, 301, generator=g) * 4 for _ in range(2))
    labels = torch.randint(0, 301, (9,), generator=g)
    with torch.autocast("cpu", torch.bfloat16):  # which must not reach into the sums
        figures, gradient = run(logits.bfloat16(), labels, distribution_of(target, loss), loss)
    expected, exact = run(logits.bfloat16().double(), labels, distribution_of(target.double(), loss), loss)
    assert figures.loss.dtype == figures.alpha.dtype == torch.float32
    torch.testing.assert_close(figures.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=1e-6)


def text_of(vocab_size, target_size, rows=6):
    """Logits of a head that knows something of the target, the target's, labels (one -1) and which rows count (one not)."""
    g = torch.Generator().manual_seed(vocab_size)
    target = 3 * torch.randn(rows, target_size, generator=g)
    ids = None if vocab_size == target_size else torch.randperm(target_size, generator=g)[:vocab_size].sort().values
    logits = (target if ids is None else target[:, ids]) + torch.randn(rows, vocab_size, generator=g)
    labels = torch.randint(0, vocab_size, (rows,), generator=g)
    labels[:2] = logits[:2].argmax(-1)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[-2] = False
    if ids is not None:
        labels[-1] = -1
    return logits, target, ids, labels, valid


def compare(found, gradient, expected, exact, loss, rtol=2e-6, atol=2e-6):
    torch.testing.assert_close(found.loss.cpu().double(), expected.loss, rtol=rtol, atol=4 * atol)
    torch.testing.assert_close(gradient.cpu().double(), exact, rtol=4 * rtol, atol=atol)
    assert torch.equal(found.rank.cpu(), expected.rank)
    assert (found.alpha is None) == (expected.alpha is None)
    if found.alpha is not None:
        torch.testing.assert_close(found.alpha.cpu().double(), expected.alpha, rtol=rtol, atol=atol)


# Odd, a block, more than one, and the smallest there is.
SIZES = [(1, 1), (23, 23), (301, 301), (8192, 8192), (9001, 9001), (13, 23), (301, 9001), (8195, 20001)]


@pytest.mark.parametrize(("vocab_size", "target_size"), SIZES)
@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_kernel_is_the_reference(loss, vocab_size, target_size, kernel_device):
    logits, target, ids, labels, valid = text_of(vocab_size, target_size)
    if loss.name == "hard":
        valid = valid & (labels >= 0)
    distribution = exact_distribution_of(target.double(), loss, ids)
    if loss == Loss("hard"):
        distribution = None
    given = (logits.double(), labels, distribution, loss, valid, 0.25)
    expected, exact = run(*given, op=distill_loss_reference)
    # In the middle of memory that nothing may touch.
    around = torch.full((len(logits) + 2, vocab_size), torch.nan, device=kernel_device)
    around[1:-1] = logits.to(kernel_device)
    told = (
        None
        if distribution is None
        else distribution_of(target.to(kernel_device), loss, None if ids is None else ids.to(kernel_device))
    )
    figures = distill_loss(
        around[1:-1],
        labels.to(kernel_device),
        valid.to(kernel_device),
        told,
        name=loss.name,
        kl_weight=loss.kl_weight(RATE),
        top_k_weight=loss.top_k_weight,
        factor=0.25,
    )
    compare(figures, around[1:-1], expected, exact, loss)
    assert around[[0, -1]].isnan().all()
    assert torch.equal(around[-3], torch.zeros_like(around[-3]))  # the row that does not count
    assert (figures.loss[-2], figures.rank[-2]) == (0, NO_RANK)
    if vocab_size > 1:
        assert exact.abs().max() > 0.001
        assert (figures.rank[:2] == 1).all()


@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_extreme_logits(loss, device):
    """Rows a normaliser of 1e4 away from zero, rows with minus infinities, and a head that hardly knows the target."""
    logits, target, _, labels, valid = text_of(301, 301)
    labels = labels % 40 + 60
    valid[:] = True
    logits[0] += 1e4
    target[1] -= 1e4
    logits[2], target[2] = logits[2] + 9e3, target[2] + 1e4
    target[3, :50] = -torch.inf  # the target says never, and the head not
    target[4, :50] = logits[4, :50] = -torch.inf  # both
    logits[5] = -8 * target[5]
    expected, exact = run(
        logits.double(), labels, exact_distribution_of(target.double(), loss), loss, valid, op=distill_loss_reference
    )
    assert expected.loss.isfinite().all()
    assert expected.alpha[5] < 1e-3
    place = [x.to(device) for x in (logits, labels)]
    figures, gradient = run(*place, distribution_of(target.to(device), loss), loss)
    compare(figures, gradient, expected, exact, loss, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_what_has_no_distribution_has_a_loss_of_nan(loss, device):
    logits, target = torch.zeros(6, 300, device=device), torch.zeros(6, 300, device=device)
    logits[0, 7] = target[1, 7] = torch.nan
    logits[2] = target[3] = -torch.inf
    logits[4, 7] = torch.inf
    labels = torch.full((6,), 3, device=device)
    figures, _ = run(logits, labels, distribution_of(target, loss), loss)
    wrong = [0, 2, 4] if loss == Loss("hard") else [0, 1, 2, 3, 4]
    assert figures.loss[wrong].isnan().all()
    assert figures.loss[5].isfinite()


def test_a_token_that_the_head_alone_rules_out_makes_kl_infinite(device):
    logits, target = torch.zeros(2, 300, device=device), torch.zeros(2, 300, device=device)
    logits[0, 7] = -torch.inf
    figures, gradient = run(
        logits, torch.zeros(2, dtype=torch.int64, device=device), target_distribution(target), Loss("kl")
    )
    assert figures.loss[0] == torch.inf
    assert gradient[0].isfinite().all()
    assert figures.loss[1].item() == pytest.approx(0, abs=1e-6)


def test_ranks_are_places_in_the_order_that_top_1_is_taken_in(device):
    """Ties go to the lowest id; -1 stands for a label outside the draft vocabulary."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]], device=device).repeat(6, 1)
    labels = torch.tensor([0, 1, 2, 3, 4, -1], device=device)
    figures, _ = run(logits, labels, target_distribution(logits.clone()), Loss("kl"))
    assert figures.rank.tolist() == [4, 1, 2, 5, 3, NO_RANK]
    assert figures.loss.isfinite().all()  # of a soft loss the label is no part


@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_rows_that_do_not_count_get_zeros_whatever_they_hold(loss, device):
    logits, target, _, labels, _ = (x if x is None else x.to(device) for x in text_of(301, 301))
    logits[1] = target[2] = torch.nan
    logits[3], target[3] = -torch.inf, -torch.inf
    valid = torch.tensor([True, False, False, False, False, True], device=device)
    figures, gradient = run(logits, labels, distribution_of(target, loss), loss, valid)
    assert not gradient[1:5].any()
    assert (figures.loss[1:5] == 0).all()
    assert (figures.alpha[1:5] == 0).all()
    assert (figures.rank[1:5] == NO_RANK).all()
    assert (gradient[[0, 5]].abs().amax(1) > 1e-3).all()


def test_a_factor_of_zero_leaves_the_losses(device):
    logits, target, _, labels, valid = (x if x is None else x.to(device) for x in text_of(301, 301))
    figures, gradient = run(logits, labels, target_distribution(target), Loss("kl"), valid, factor=0.0)
    once, _ = run(logits, labels, target_distribution(target), Loss("kl"), valid)
    assert torch.equal(figures.loss, once.loss)
    assert figures.loss[0] > 0.01
    assert not gradient.any()


def test_what_is_not_measured_is_left_out(device):
    logits, target, _, labels, valid = (x if x is None else x.to(device) for x in text_of(301, 301))
    for name in LOSSES:
        measured, gradient = run(logits, labels, target_distribution(target), Loss(name), valid)
        again = logits.clone()
        figures = distill_loss(
            again,
            labels,
            valid,
            target_distribution(target),
            name=name,
            kl_weight=Loss(name).kl_weight(RATE),
            measure=False,
        )
        assert figures.alpha is figures.rank is None
        assert torch.equal(figures.loss, measured.loss)
        assert torch.equal(again, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [loss for loss in KINDS if not loss.top_k_weight], ids=str)
def test_nothing_of_the_logits_size_is_allocated(loss):
    logits, target = torch.randn(2, 64, 128256, device="cuda", dtype=torch.bfloat16)
    labels, valid = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.ones(64, dtype=torch.bool, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    distill_loss(logits, labels, valid, target_distribution(target), name=loss.name, kl_weight=loss.kl_weight(RATE))
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 20


BIG = [(128256, None), (128256, 32000)]


@pytest.mark.gpu
@pytest.mark.parametrize(("target_size", "draft_size"), BIG)
@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_bfloat16_at_size_errs_at_most_twice_as_much_as_torch(loss, target_size, draft_size):
    logits, target, ids, labels, valid = text_of(draft_size or target_size, target_size, rows=16)
    if loss.name == "hard":
        valid = valid & (labels >= 0)
    logits, target = logits.bfloat16().cuda(), target.bfloat16().cuda()
    labels, valid, ids = labels.cuda(), valid.cuda(), None if ids is None else ids.cuda()
    distribution = distribution_of(target, loss, ids)
    exact_distribution, torch_distribution = (
        target_distribution_reference(target.to(dtype), ids) for dtype in (torch.float64, torch.float32)
    )
    if distribution.likely is not None:  # bfloat16 logits tie: the same ten for all
        exact_distribution, torch_distribution = (
            one._replace(likely=one.p.gather(-1, distribution.likely_tokens), likely_tokens=distribution.likely_tokens)
            for one in (exact_distribution, torch_distribution)
        )
    expected, exact = run(logits.double(), labels, exact_distribution, loss, valid, op=distill_loss_reference)
    ours, gradient = run(logits, labels, distribution, loss, valid)
    theirs, torch_gradient = run(logits, labels, torch_distribution, loss, valid, op=distill_loss_reference)
    assert torch.equal(ours.rank, expected.rank)
    for name, one, other, right, floor in (
        ("loss", ours.loss, theirs.loss, expected.loss, 1e-6),
        ("alpha", ours.alpha, theirs.alpha, expected.alpha, 1e-6),
        ("gradient", gradient, torch_gradient, exact, 0.0),
    ):
        error, allowed = ((x.double() - right).abs() for x in (one, other))
        assert error.max() <= 2 * allowed.max() + floor, name
        assert error.mean() <= 2 * allowed.mean() + floor, name


@pytest.mark.gpu
def test_rows_beyond_32_bit_addresses():
    """The last rows of logits of more than 2^31 elements are as they are alone."""
    rows, vocab_size = 2**31 // 128256 + 3, 128256
    g = torch.Generator("cuda").manual_seed(0)
    tail = torch.randn(2, vocab_size, device="cuda", generator=g, dtype=torch.bfloat16)
    logits = torch.zeros(rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros_like(logits)
    logits[-2:], target[-2:] = tail, tail.flip(0)
    labels, valid = (
        torch.zeros(rows, dtype=torch.int64, device="cuda"),
        torch.zeros(rows, dtype=torch.bool, device="cuda"),
    )
    valid[-2:] = True
    alone, gradient = run(tail, labels[-2:], target_distribution(tail.flip(0)), Loss("kl"))
    figures = distill_loss(logits, labels, valid, target_distribution(target), name="kl")
    assert torch.equal(figures.loss[-2:], alone.loss)
    assert torch.equal(logits[-2:], gradient)
    assert not logits[:-2].any()


def test_what_does_not_fit_is_refused():
    logits, labels, target = make()
    distribution, valid = target_distribution(target), torch.ones(len(labels), dtype=torch.bool)
    with pytest.raises(ValueError, match="loss must be one of hard, kl, lk, lk-log, hard-l1, tv, got 'ce'"):
        Loss("ce")
    with pytest.raises(ValueError, match="the loss must be one of hard, kl, lk, lk-log, hard-l1, got 'tv'"):
        distill_loss(logits, labels, valid, distribution, name="tv")
    for weight in (None, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"lk takes a kl_weight from 0 to 1, got {weight}"):
            distill_loss(logits, labels, valid, distribution, name="lk", kl_weight=weight)
    with pytest.raises(ValueError, match="needs the target's distribution"):
        distill_loss(logits, labels, valid, None, name="kl")
    with pytest.raises(ValueError, match="give target_distribution a top_k"):
        distill_loss(logits, labels, valid, distribution, name="kl", top_k_weight=1.0)
    with pytest.raises(ValueError, match=r"takes contiguous logits \[C, V\].*strided"):
        distill_loss(logits[:, ::2], labels, valid, distribution, name="kl")
    with pytest.raises(ValueError, match=r"labels \[C\]"):
        distill_loss(logits, labels[1:], valid, distribution, name="kl")
    with pytest.raises(ValueError, match="the draft vocabulary's ids"):
        distill_loss(logits[:, :13].contiguous(), labels, valid, distribution, name="kl")
