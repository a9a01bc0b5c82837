"""Draws, best tokens and normalisers over the vocabulary: values, ties, extreme words, rows that keep to themselves."""

import math

import pytest
import torch

from headstart.kernels.jit import jit, tl
from headstart.kernels.sampling import best_token, sample
from headstart.kernels.sampling.keep_top import keep_top, kept_scores
from headstart.kernels.sampling.philox import (
    DRAFT_NOISE,
    ROUGHNESS,
    chunk_words,
    gumbel,
    gumbel_of_word,
    random_words,
    rough_exponential,
    salted,
)
from headstart.kernels.sampling.sample import (
    draw_tokens,
    log_sum_exp,
    sample_tokens,
    scores_reference,
    top_tokens,
    top_tokens_reference,
)
from headstart.tests.inference.speculation.draw_children import draw_children


def keyed(rows, device, temperature, seed=0):
    """temperature, seed, sample, position of `rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    heat = torch.tensor(temperature).expand(rows).float() if isinstance(temperature, float) else temperature.float()
    integers = [torch.randint(high, (rows,), generator=generator) for high in (2**62, 5, 100_000)]
    return [x.to(device) for x in (heat, *integers)]


@jit
def _noise(words, seed, sample, position, drawn, exact, START: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    found = chunk_words(START, tl.load(seed), tl.load(sample), tl.load(position), 0, COUNT)
    tl.store(drawn + i, found.to(tl.int64))
    given = tl.load(words + i).to(tl.uint32)
    tl.store(exact + i, gumbel_of_word(given))


def noise_of(words, device, start=0, key=(0, 0, 0)):
    """What the kernels make of 32-bit words [256]: drawn words from `start` on, the noise of the given ones."""
    drawn = torch.empty(256, dtype=torch.int64, device=device)
    exact = torch.empty(256, device=device)
    key = [torch.tensor([x], device=device) for x in key]
    _noise[(1,)](words.to(device), *key, drawn, exact, start, 256)
    return drawn.cpu(), exact.cpu()


def exact_gumbel(words):
    return -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32)).float()


@pytest.mark.parametrize("start", [0, 1024, 127 * 1024])
def test_kernels_draw_the_integers_of_the_reference(kernel_device, start):
    for key in ((5, 0, 17), (2**40 + 3, 3, 100_000), (2**63 - 1, 2**31 - 1, 2**31 - 1)):
        drawn, _ = noise_of(torch.zeros(256, dtype=torch.int64), kernel_device, start, key)
        expected = random_words(*[torch.tensor(x) for x in key], start + 256)[start:]
        assert torch.equal(drawn, expected)


def test_gumbel_noise_agrees_with_the_reference_to_two_ulp(kernel_device):
    extremes = torch.tensor(
        [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1, 1580030168, 4026531839, 4026531840]
    )
    for seed in range(20 if kernel_device == "cuda" else 4):
        words = torch.randint(2**32, (256,), generator=torch.Generator().manual_seed(seed))
        words[: len(extremes)] = extremes
        words[len(extremes) : 64] = 2**32 - 1 - torch.randint(2**20, (64 - len(extremes),))
        expected = exact_gumbel(words)
        _, exact = noise_of(words, kernel_device)
        assert exact.isfinite().all()
        ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
        assert ((exact - expected).abs() <= 2 * ulp).all()
    assert exact_gumbel(torch.tensor(2**32 - 1)).item() == pytest.approx(33 * math.log(2), rel=1e-6)


@jit
def _roughness(start, differences, COUNT: tl.constexpr):
    word = (start + tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)).to(tl.uint32)
    exact = -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10) * 1.4426950408889634
    tl.store(differences + tl.program_id(0), tl.max(tl.abs(rough_exponential(word).to(tl.float64) / exact - 1.0), 0))


def test_rough_exponentials_are_as_near_as_they_say(kernel_device):
    """Over all words on a GPU; elsewhere at the ends, in the middle and at a few between."""
    count = 4096 if kernel_device == "cuda" else 1024
    starts = [0, 2**31 - 512, 2**32 - 1024, *range(10**8, 2**32, 5 * 10**8)]
    blocks = 1
    if kernel_device == "cuda":
        starts, blocks = [0], 2**32 // count
    for start in starts:
        found = torch.empty(blocks, device=kernel_device)
        _roughness[(blocks,)](torch.tensor(start).item(), found, count)
        assert 0 < found.max() < ROUGHNESS.value / 2


def test_a_row_whose_best_scores_are_near_each_other_is_drawn_as_exactly(kernel_device):
    """Logits are the noise's negative, give or take its last bits: every token of the row is in question."""
    vocab_size = 3000
    heat, *key = keyed(4, "cpu", torch.tensor([1.0, 0.5, 2.0, 1e-3]))
    noise = gumbel(*key, vocab_size)
    for apart in (0.0, 1e-6, 1e-5, 1e-4):
        logits = (apart * torch.randn(noise.shape, generator=torch.Generator().manual_seed(7)) - noise) * heat[:, None]
        arguments = [x.to(kernel_device) for x in (logits, heat, *key)]
        scores, found = scores_reference(logits, heat, *key), sample_tokens(*arguments).cpu()
        # The device's noise may differ in its last bits, so an equal may win.
        lost = scores.amax(1) - scores.gather(1, found[:, None]).squeeze(1)
        assert (lost <= 4e-6).all(), (apart, lost)
        best, first = top_tokens(*arguments[:1], 2, *arguments[1:]).cpu().unbind(1)[0], found
        assert torch.equal(best, first), "the ranking takes the noise itself, of every token"


@pytest.mark.parametrize("vocab_size", [5, 1024, 2100])
def test_draws_are_those_of_the_formula(device, vocab_size):
    for dtype in (torch.float32, torch.bfloat16)[: 2 if device == "cuda" else 1]:
        torch.manual_seed(vocab_size)
        logits = (torch.randn(6, vocab_size) * 3).to(dtype)
        heat, seed, sample, position = keyed(6, "cpu", torch.tensor([0.0, 1.0, 0.7, 1e-5, 3.0, 100.0]))
        scores = logits.float() / torch.where(heat > 0, heat, 1)[:, None]
        scores += gumbel(seed, sample, position, vocab_size) * (heat > 0)[:, None]
        arguments = [x.to(device) for x in (logits, heat, seed, sample, position)]
        assert sample_tokens(*arguments).tolist() == scores.argmax(-1).tolist()
        assert sample_tokens(arguments[0]).tolist() == logits.float().argmax(-1).tolist()
        for width in (1, 4, min(64 if device == "cuda" else 11, vocab_size)):
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :width]
            assert top_tokens(arguments[0], width, *arguments[1:]).tolist() == best.tolist()


def test_rows_may_share_keys_and_stand_later(device):
    logits = torch.randn(6, 1100, generator=torch.Generator().manual_seed(0)).to(device)
    heat, seed, sample, position = keyed(2, device, torch.tensor([0.0, 1.0]))
    later = (position + torch.arange(3, device=device)[:, None]).flatten()
    expected = top_tokens(logits, 3, heat.repeat(3), seed.repeat(3), sample.repeat(3), later)
    assert torch.equal(top_tokens(logits, 3, heat, seed, sample, position), expected)
    with pytest.raises(ValueError, match="a whole part"):
        top_tokens(logits[:5], 3, heat, seed, sample, position)


@pytest.mark.parametrize("vocab_size", [5, 1100])
def test_nodes_draw_with_noise_of_their_own_from_the_distributions_they_share(device, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    scores = 2 * torch.randn(2, 3, vocab_size, generator=generator)
    scores[1, 1, 2:] = -torch.inf  # two tokens for three slots
    heat, *key = keyed(3, "cpu", torch.tensor([0.0, 0.6, 1.3]))
    distributions, nodes = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 7, 63])
    arguments = [x.to(device) for x in (distributions, nodes, heat, *key)]
    found = draw_tokens(scores.to(device), 3, *arguments).cpu()
    for i, node in enumerate(nodes.tolist()):
        noise = gumbel(*key, vocab_size, salted(DRAFT_NOISE, node)) * (heat > 0)[:, None]
        log_q = scores[distributions[i]] / torch.where(heat > 0, heat, 1)[:, None]
        assert torch.equal(found[i], draw_children(log_q, 3, "sampled", noise))
    assert found[1, 1, 2] == -1
    assert torch.equal(found[:, 0], draw_children(scores[distributions, 0], 3, "greedy"))
    if vocab_size > 5:
        assert not torch.equal(found[1, 2], found[2, 2])


def test_indices_may_have_32_bits(device):
    logits = torch.randn(4, 300, device=device)
    heat, *key = keyed(4, device, 1.0)
    key[0] %= 1000
    assert torch.equal(sample_tokens(logits, heat, *key), sample_tokens(logits, heat, *[x.int() for x in key]))


def test_ties_go_to_the_lowest_token(device):
    logits = torch.zeros(5, 2100, device=device)
    logits[0, [7, 1030, 2099]] = 1.0
    logits[1, [2098, 2099]] = torch.inf
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 1500] = -1e30
    logits[4] = -0.0
    logits[4, 5:] = 0.0
    for heat in (0.0, 1e-5):
        arguments = keyed(5, device, heat)
        if heat:  # the noise must be far below the last place of the scores
            logits = logits.masked_fill(logits == 0, 0.0) + torch.where(logits.isfinite(), 1e4, 0.0)
        found = top_tokens(logits, 3, *arguments)
        assert found[0].tolist() == [7, 1030, 2099] or heat
        assert found[1].tolist() == [2098, 2099, 0] or heat
        assert found[2].tolist() == [0, 1, 2]
        assert found[3].tolist() == [1500, 0, 1]
        assert found[4].tolist() == [0, 1, 2] or heat
        assert torch.equal(sample_tokens(logits, *arguments), found[:, 0])
        assert torch.equal(found, top_tokens_reference(logits.cpu(), 3, *[x.cpu() for x in arguments]).to(device))


def test_nan_never_wins(device):
    logits = torch.randn(2, 50, device=device)
    logits[:, 3] = torch.nan
    logits[1] = torch.nan
    for heat in (0.0, 1.0):
        found = sample_tokens(logits, *keyed(2, device, heat)).tolist()
        assert found[0] != 3
        assert found[1] == 0


@pytest.mark.parametrize("vocab_size", [1, 9, 4096, 5000])
def test_log_sum_exp_is_as_exact_as_torchs_own(device, vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(7, vocab_size, device=device) * 4
    exact = torch.logsumexp(logits.double(), -1)
    library = (torch.logsumexp(logits, -1).double() - exact).abs().max()
    assert (log_sum_exp(logits).double() - exact).abs().max() <= 2 * library + 1e-6
    assert log_sum_exp(logits).dtype == torch.float32
    logits[0], logits[1, -1] = -torch.inf, torch.inf
    logits[2, vocab_size // 2 :] = -torch.inf
    found = log_sum_exp(logits)
    assert found[0] == -torch.inf
    assert found[1] == torch.inf
    assert not found.isnan().any()


@pytest.mark.parametrize("chunk", [1024, 2048, 4096])
def test_the_size_of_the_chunks_changes_no_token(kernel_device, chunk, monkeypatch):
    logits = torch.randn(3, 5000, device=kernel_device).mul(2).round()  # ties across chunks
    rows = keyed(3, kernel_device, torch.tensor([0.0, 1.0, 0.3]))
    expected = top_tokens_reference(logits.cpu(), 5, *[x.cpu() for x in rows])
    monkeypatch.setattr(sample, "_CHUNK", chunk)
    monkeypatch.setattr(best_token, "CHUNKS", {3: (chunk, 4)})
    assert torch.equal(top_tokens(logits, 5, *rows).cpu(), expected)
    assert torch.equal(sample_tokens(logits, *rows).cpu(), expected[:, 0])


def test_rows_of_the_reference_depend_on_no_other_row():
    logits = torch.randn(40, 1111, generator=torch.Generator().manual_seed(0)) * 3
    rows = keyed(40, "cpu", torch.rand(40, generator=torch.Generator().manual_seed(1)))
    top_k, top_p = torch.arange(40) % 7 * 9, 0.3 + 0.1 * (torch.arange(40) % 8)
    min_p = 0.02 * (torch.arange(40) % 3)
    for op in (
        lambda x, r, *_: top_tokens(x, 5, *r),
        lambda x, *_: log_sum_exp(x),
        lambda x, r, k, p, m: kept_scores(keep_top(x, r[0], k, p, m)),
    ):
        whole = op(logits, rows, top_k, top_p, min_p)
        for count in (1, 2, 7, 16, 33):
            for start in (0, 40 - count):
                some = slice(start, start + count)
                assert torch.equal(
                    op(logits[some].clone(), [x[some] for x in rows], top_k[some], top_p[some], min_p[some]),
                    whole[some],
                )


@pytest.mark.gpu
def test_rows_depend_on_no_other_row_and_agree_with_the_cpu():
    torch.manual_seed(0)
    for vocab_size, dtype in ((32_003, torch.float32), (128_256, torch.bfloat16)):
        logits = (torch.randn(200, vocab_size, device="cuda") * 3).to(dtype)
        heat = torch.rand(200) * (torch.arange(200) % 3 > 0)
        rows = keyed(200, "cuda", heat)
        number = torch.arange(200, device="cuda")
        filters = (number % 7 * 9, 0.3 + 0.1 * (number % 8), 0.02 * (number % 3))
        ops = {
            "sample": lambda x, r, *_: sample_tokens(x, *r),
            "top": lambda x, r, *_: top_tokens(x, 10, *r),
            "sum": lambda x, *_: log_sum_exp(x),
            "keep": lambda x, r, *filters: kept_scores(keep_top(x, r[0], *filters)),
            "mass": lambda x, r, *filters: keep_top(x, r[0], *filters).total,
        }
        for name, op in ops.items():
            whole = op(logits, rows, *filters)
            for count in (*range(1, 65, 1 if name in ("sample", "top", "sum") else 9), 199):
                for start in (0, 200 - count):
                    some = slice(start, start + count)
                    few = op(logits[some], [x[some] for x in rows], *[x[some] for x in filters])
                    assert torch.equal(few, whole[some]), (name, count, start)
        few = [x[:24].cpu() for x in rows]
        scores = scores_reference(logits[:24].cpu(), *few)
        assert sample_tokens(logits, *rows)[:24].tolist() == scores.argmax(-1).tolist()
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :10]
        assert top_tokens(logits, 10, *rows)[:24].tolist() == best.tolist()
        expected = keep_top(logits[:24].cpu(), few[0], *[x[:24].cpu() for x in filters])
        found = keep_top(logits, rows[0], *filters)
        assert torch.equal(kept_scores(found)[:24].cpu(), kept_scores(expected))


@pytest.mark.gpu
def test_every_op_can_be_captured_in_a_graph():
    logits = torch.randn(3, 5000, device="cuda")
    rows = keyed(3, "cuda", torch.tensor([0.0, 1.0, 0.5]))
    filters = [torch.tensor(x, device="cuda") for x in ([0, 5, 0], [1.0, 1.0, 0.5], [0.0, 0.1, 0.1])]

    def op():
        kept = kept_scores(keep_top(logits, rows[0], *filters))
        return sample_tokens(logits, *rows), top_tokens(logits, 5, *rows), log_sum_exp(logits), kept

    op()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op()
    logits.copy_(torch.randn(3, 5000))
    graph.replay()
    for found, expected in zip(captured, op()):
        assert torch.equal(found, expected)


def test_shapes_that_do_not_fit_are_refused():
    logits = torch.zeros(2, 5)
    row = torch.zeros(2)
    with pytest.raises(ValueError, match="one entry per row"):
        sample_tokens(logits, row[:1], row, row, row)
    with pytest.raises(ValueError, match="width from 1 to 5"):
        top_tokens(logits, 6)
    with pytest.raises(ValueError, match=r"logits \[M, V\]"):
        log_sum_exp(row)
    with pytest.raises(ValueError, match=r"distributions and nodes \[I\]"):
        draw_tokens(logits, 2, row, row, row, row, row, row)
    with pytest.raises(ValueError, match="width from 1 to 5"):
        draw_tokens(logits[None], 6, row, row, row, row, row, row)
