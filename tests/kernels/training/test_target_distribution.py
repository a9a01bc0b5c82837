"""The target's distribution of a chunk: against softmax in fp64, over a draft vocabulary, at infinities, in every dtype."""

import pytest
import torch

from headstart.kernels.training.target_distribution import target_distribution


def draw(rows, vocab_size, draft_size=None, dtype=torch.float64):
    """Logits [rows, V] and the ids of a draft vocabulary, or None."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)).to(dtype)
    ids = None if draft_size is None else torch.randperm(vocab_size, generator=generator)[:draft_size].sort().values
    return logits, ids


def probabilities(distribution):
    """p of every token of the slice, in fp64: the reference has it, the kernel's figures say it."""
    if distribution.p is not None:
        return distribution.p.double().cpu()
    found = distribution.logits.double() - distribution.top.double()[:, None] - distribution.log_sum.double()[:, None]
    return found.exp().cpu()


# One token, fewer than a block, a block, two and a remainder; with and without a draft vocabulary of as many sizes.
SIZES = [
    (1, None),
    (23, None),
    (256, None),
    (8192, None),
    (17001, None),
    (23, 1),
    (301, 256),
    (9001, 8195),
    (9001, 9001),
]


@pytest.mark.parametrize(("vocab_size", "draft_size"), SIZES)
def test_it_is_softmax_over_the_whole_vocabulary(device, vocab_size, draft_size):
    for dtype in [torch.float32] + [torch.bfloat16, torch.float16] * (device == "cuda"):
        logits, ids = draw(5, vocab_size, draft_size, dtype)
        exact = logits.double().softmax(-1)
        part = exact if ids is None else exact[:, ids]
        found = target_distribution(logits.to(device), None if ids is None else ids.to(device), top_k=3)
        assert torch.equal(found.logits.cpu(), logits if ids is None else logits[:, ids])
        assert found.logits.dtype == dtype
        torch.testing.assert_close(probabilities(found), part, rtol=5e-6, atol=0)
        if ids is None:
            assert found.mass is None
        else:
            torch.testing.assert_close(found.mass.double().cpu(), part.sum(-1), rtol=2e-6, atol=0)
        likely, tokens = part.topk(min(3, part.shape[1]), -1)
        torch.testing.assert_close(found.likely.double().cpu(), likely, rtol=5e-6, atol=0)
        if dtype == torch.float32:  # narrower logits tie
            assert torch.equal(found.likely_tokens.cpu(), tokens)


def test_fp64_stays_fp64_on_the_cpu():
    logits, ids = draw(5, 301, 40)
    found = target_distribution(logits, ids)
    part = logits.softmax(-1)[:, ids]
    torch.testing.assert_close(found.p, part, rtol=1e-13, atol=0)
    torch.testing.assert_close(found.plogp, (part * part.log()).sum(-1), rtol=1e-13, atol=0)
    assert found.likely is found.likely_tokens is None


def test_bfloat16_is_summed_in_float32():
    logits, ids = draw(5, 301, 40, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):  # which must not reach into the sums
        found = target_distribution(logits, ids)
    exact = logits.double().softmax(-1)[:, ids]
    assert found.p.dtype == found.mass.dtype == found.plogp.dtype == torch.float32
    torch.testing.assert_close(found.plogp.double(), (exact * exact.log()).sum(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("ids", [None, [0, 2, 299]])
def test_far_away_logits_lose_no_digits_and_minus_infinity_has_no_probability(device, ids):
    logits, _ = draw(3, 300, dtype=torch.float32)
    logits[0] += 1e4
    logits[1, 2:] = -torch.inf
    logits[2, 299] = 1e4
    exact = logits.double().softmax(-1)
    ids = None if ids is None else torch.tensor(ids)
    found = target_distribution(logits.to(device), None if ids is None else ids.to(device))
    part = exact if ids is None else exact[:, ids]
    torch.testing.assert_close(probabilities(found), part, rtol=5e-6, atol=1e-30)
    if found.plogp is not None:
        assert found.plogp.isfinite().all()
    if ids is not None:
        torch.testing.assert_close(found.mass.double().cpu(), part.sum(-1), rtol=2e-6, atol=0)


def test_rows_without_a_distribution_say_so(device):
    logits, _ = draw(4, 300, dtype=torch.float32)
    logits[0] = -torch.inf
    logits[1, 7] = torch.inf
    logits[2, 299] = torch.nan
    found = target_distribution(logits.to(device))
    wrong = (found.plogp if found.log_sum is None else found.log_sum).isnan()
    assert wrong.tolist() == [True, True, True, False]
    assert probabilities(found)[:3].isnan().any(1).all()


def test_rows_do_not_depend_on_each_other(device):
    logits, ids = (x.to(device) for x in draw(7, 301, 40, torch.float32))
    whole = target_distribution(logits, ids, top_k=5)
    for some in (slice(0, 1), slice(6, 7), slice(2, 5)):
        few = target_distribution(logits[some].clone(), ids, top_k=5)
        for name, value in few._asdict().items():
            assert value is getattr(whole, name) is None or torch.equal(value, getattr(whole, name)[some]), name


def test_strided_logits_and_no_rows_are_taken(device):
    logits, ids = (x.to(device) for x in draw(5, 301, 40, torch.float32))
    whole = target_distribution(logits, ids)
    strided = target_distribution(logits.T.contiguous().T, ids)
    torch.testing.assert_close(probabilities(strided), probabilities(whole), rtol=5e-6, atol=0)
    assert target_distribution(logits[:0], ids, top_k=3).likely.shape == (0, 3)


def test_what_does_not_fit_is_refused():
    logits, ids = draw(5, 23, 7)
    with pytest.raises(ValueError, match=r"target_distribution takes logits \[C, V\]"):
        target_distribution(logits[0])
    with pytest.raises(ValueError, match=r"draft_ids \[Vd\] or None"):
        target_distribution(logits, ids[None])


def test_the_kernel_refuses_fp64(kernel_device):
    logits = torch.zeros(2, 5, dtype=torch.float64, device=kernel_device)
    with pytest.raises(ValueError, match=r"takes float32, bfloat16, float16, got torch\.float64"):
        target_distribution(logits)
