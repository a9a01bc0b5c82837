"""What min-p, top-k and top-p keep: by a loop over the tokens, on ties, in every size of the kernel's steps."""

import math
from pathlib import Path

import pytest
import torch

from headstart.kernels.sampling import keep_top as module, lowest_key
from headstart.kernels.sampling.keep_top import keep_top, keep_top_reference, kept_scores, kept_scores_reference, scale
from headstart.tests.kernels.mutants import mutated


def by_hand(logits, heat, top_k, top_p, min_p):
    """One row, token by token in Python."""
    scores = [x / heat for x in logits.double().tolist()] if heat else logits.tolist()
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    if not heat:
        return set(order)
    order = order[:top_k] if top_k else order
    order = [v for v in order if math.exp(scores[v] - scores[order[0]]) >= min_p]
    weights = [math.exp(scores[v] - scores[order[0]]) for v in order]
    total, before, keep = sum(weights), 0.0, set()
    for v, weight in zip(order, weights):
        if before / total < top_p or top_p >= 1:
            keep.add(v)
        before += weight
    return keep


@pytest.mark.parametrize("vocab_size", [6, 300, 2100])
def test_filters_keep_the_likeliest_tokens(device, vocab_size):
    torch.manual_seed(vocab_size)
    logits = torch.randn(8, vocab_size) * 2
    logits[5] = logits[5].round()  # ties
    logits[6, 1:] = -torch.inf
    heat = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0, 1.0, 1.5])
    top_k = torch.tensor([0, 3, 2, 0, 40, 4, 5, 10**6])
    top_p = torch.tensor([1.0, 1.0, 0.1, 0.75, 0.9, 0.6, 0.9, 0.001])
    min_p = torch.tensor([0.2, 0.3, 0.9, 0.0, 0.05, 1.0, 0.5, 0.7])
    found = kept_scores(keep_top(*[x.to(device) for x in (logits, heat, top_k, top_p, min_p)])).cpu()
    scaled = logits / torch.where(heat > 0, heat, 1)[:, None]
    assert found.dtype == torch.float32
    for row in range(8):
        keep = by_hand(logits[row], heat[row].item(), top_k[row].item(), top_p[row].item(), min_p[row].item())
        expected = torch.full((vocab_size,), -torch.inf)
        expected[list(keep)] = scaled[row, list(keep)]
        assert torch.equal(found[row], expected), row


def problem(vocab_size, device="cpu", rows=24, seed=0):
    """logits, temperature, top-k, top-p, min-p of rows of all kinds: ties, one score, nothing but minus infinity, NaN ..."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    logits[3:8] = logits[3:8].bfloat16().float()
    logits[8] = 1
    logits[9] = -torch.inf
    logits[10, 5:] = -torch.inf
    logits[11, ::3] = torch.nan
    logits[12] = torch.randint(4, (vocab_size,), generator=generator).float()
    logits[13] *= 30
    logits[17, 3:] = -torch.inf
    logits[19, :24], logits[19, 24:] = 0, -5
    logits[21, 7], logits[21, vocab_size // 2] = torch.inf, torch.inf
    row = torch.arange(rows) + seed
    filters = (
        torch.tensor([1.0, 0.7, 0.0, 1.3, 1e-3])[row % 5],
        torch.tensor([0, 5, 50, 0, 1, vocab_size, 3000, 20])[row % 8],
        torch.tensor([1.0, 0.9, 0.5, 0.3, 0.999])[row // 2 % 5],
        torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.5])[row % 7],
    )
    filters[1][17], filters[1][19], filters[2][19] = 5, 24, 1.0  # more than there are; as many as there are best ones
    return [x.to(device) for x in (logits, *filters)]


def differences(found, expected):
    """What a Kept of the kernel has otherwise than the reference's, by name."""
    wrong = []
    if not torch.equal(found.count.cpu(), expected.count):
        wrong.append("count")
    if not torch.equal(kept_scores(found).cpu(), kept_scores_reference(expected)):
        wrong.append("scores")
    if not torch.equal(found.top.cpu(), expected.top):
        wrong.append("top")
    if not torch.allclose(found.total.cpu(), expected.total, rtol=1e-6, atol=0):
        wrong.append("total")
    scores, vocab_size = kept_scores_reference(expected), expected.logits.shape[1]
    for row, count in enumerate(expected.count.tolist()):
        if count < vocab_size and expected.temperature[row] > 0 and (scores[row] > -torch.inf).any():
            listed = found.tokens[row, :count].tolist()
            if listed != (scores[row] > -torch.inf).nonzero().squeeze(1).tolist():
                wrong.append(f"tokens of row {row}")
    return wrong


def reference(problem):
    """The reference on the CPU, also where kernels run there."""
    kept = keep_top_reference(*[x.cpu() for x in problem])
    return kept._replace(logits=kept.logits.float())


# Sizes of the kernel's steps, so small that all of its ways are gone.
NAMES = ("_GROUP", "_TILE", "_CHUNK", "_FEW", "_MOST", "_SCAN", "_SPAN", "_BINS")
STEPS = [(4, 64, 256, 16, 32, 64, 128, 32), (8, 64, 256, 64, 128, 128, 256, 256)]


def set_steps(monkeypatch, kernel, steps):
    for name, size in zip(NAMES, steps):
        monkeypatch.setattr(kernel, name, size)


def test_the_kernel_keeps_what_the_reference_keeps(kernel_device):
    on_gpu = kernel_device == "cuda"
    for vocab_size in (127, 1013, 151936) if on_gpu else (300,):
        for seed in range(5 if on_gpu else 1):
            given = problem(vocab_size, kernel_device, seed=seed)
            assert not differences(keep_top(*given), reference(given)), (vocab_size, seed)


@pytest.mark.interpreter
@pytest.mark.parametrize("steps", STEPS)
def test_the_sizes_of_its_steps_change_nothing(monkeypatch, steps):
    set_steps(monkeypatch, module, steps)
    given = problem(300) if steps == STEPS[0] else [x[::2] for x in problem(300)]
    assert not differences(keep_top(*given), reference(given))


@pytest.mark.gpu
def test_the_kernel_keeps_it_of_every_dtype_too():
    for dtype, seed in ((torch.bfloat16, 1), (torch.float16, 2)):
        logits, *filters = problem(128_256, "cuda", seed=seed)
        given = logits.to(dtype), *filters
        assert not differences(keep_top(*given), reference(given))


# A line of the kernel, what is put in its place, and the one of the rows that tells: a row takes tenths of a second here.
MUTANTS = [
    ("tl.log(floor) - 0.01", "tl.log(floor) + 0.5", 14),
    ("bound = score_of(least)\n            else", "bound = score_of(least) + 10.0\n            else", 22),
    ("while (from_low - from_high > 1)", "while (from_low - from_high > 4)", 3),
    ("& (key >= least) & (likely >= floor)", "& (likely >= floor)", 17),
    ("& (key >= least) & (likely >= floor)", "& (key >= least)", 23),
    ("likely >= floor, likely * UNITS", "likely > floor, likely * UNITS", 14),
    ("bin < found, amount, 0", "bin <= found, amount, 0", 6),
    ("mask=index < bin, other=0", "mask=index <= bin, other=0", 18),
    ("tl.where(bin == BINS, LOWEST, least)", "least", 10),
    ("from_3 + before >= wanted", "from_3 >= wanted", 18),
    ("        least = tl.min(keys, 0)\n", "", 19),
    ("(tl.sum(mass_1, 0) + before)", "(tl.sum(mass_1, 0))", 3),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(("before", "after", "row"), MUTANTS)
def test_a_fault_in_the_kernel_is_seen(monkeypatch, tmp_path, before, after, row):
    set_steps(monkeypatch, module, STEPS[0])
    given = problem(300)
    given[2][14], given[3][14], given[4][14] = 0, 0.5, 1.0  # of which only ties with the likeliest are left
    given[0][14] = given[0][14].round()
    given[2][23], given[3][23], given[4][23] = 5, 1.0, 0.4  # min-p leaves less than top-k
    given = [x[row : row + 1] for x in given]
    assert not differences(keep_top(*given), reference(given))
    kernel = module
    if before in Path(module.__file__).read_text():
        kernel = mutated(module, before, after, tmp_path)
        set_steps(monkeypatch, kernel, STEPS[0])
    else:
        mutant = mutated(lowest_key, before, after, tmp_path)
        for name in vars(mutant).keys() & vars(module).keys():
            if not name.startswith("_"):
                monkeypatch.setattr(module, name, getattr(mutant, name))
    assert differences(kernel.keep_top(*given), reference(given))


def test_scores_are_never_nan_and_a_row_that_asks_for_nothing_keeps_all(kernel_device):
    given = problem(3000, kernel_device) if kernel_device == "cuda" else [x[::2] for x in problem(150)]
    found = kept_scores(keep_top(*given))
    assert not found.isnan().any()
    assert torch.equal(scale(*given[:2])[0], found[0])


def test_shapes_that_do_not_fit_are_refused():
    logits, *filters = problem(40)
    with pytest.raises(ValueError, match="keep_top takes one entry per row"):
        keep_top(logits, *filters[:3], filters[3][:2])
    with pytest.raises(ValueError, match="less than 2097152 tokens"):
        keep_top(torch.zeros(0, 1 << 21), *(x[:0] for x in filters))
