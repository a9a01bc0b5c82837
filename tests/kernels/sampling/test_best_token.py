"""One token of every row: over a draft vocabulary, where nothing can be drawn, at extreme temperatures; faults that must show."""

import pytest
import torch

from headstart.kernels.sampling import best_token as module
from headstart.kernels.sampling.philox import TARGET_NOISE, gumbel
from headstart.kernels.sampling.sample import sample_tokens, scores_reference, top_tokens
from headstart.tests.kernels.mutants import mutated
from headstart.tests.kernels.sampling.test_sample import keyed


def whole(logits, ids, vocab_size):
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy(1, ids.long(), logits)


@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_vocabulary_gives_the_tokens_of_whole_logits(device, width):
    vocab_size, generator = 5000, torch.Generator().manual_seed(3)
    for ids in (torch.arange(700) * 7, torch.randperm(vocab_size, generator=generator)[:1500]):  # in order, and in none
        ids = ids.int().to(device)
        logits = torch.randn(6, len(ids), generator=generator).mul(2).round().to(device)  # with ties
        rows = keyed(6, device, torch.tensor([0.0, 1.0, 0.3, 0.0, 2.0, 1.0]))
        expected = top_tokens(whole(logits, ids, vocab_size), width, *rows, with_scores=True)
        found = top_tokens(logits, width, *rows, with_scores=True, token_ids=ids)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(top_tokens(logits, width, token_ids=ids), top_tokens(whole(logits, ids, vocab_size), width))
    with pytest.raises(ValueError, match="an id of each of 1500 columns"):
        top_tokens(logits, width, token_ids=ids[1:])


def test_chunks_without_a_token_to_draw(device):
    """As a grammar leaves them: all of a chunk, of a row, or all but one token is forbidden."""
    logits = torch.full((5, 3000), -torch.inf)
    logits[1, 2500], logits[2, [0, 1023, 1024, 2999]], logits[3, 1024:2048] = -1e30, 1.0, 0.5
    logits[4, :100] = torch.inf
    for heat in (0.0, 1e-38, 1e-3, 1.0, 1e30):
        rows = keyed(5, "cpu", heat)
        found = sample_tokens(logits.to(device), *[x.to(device) for x in rows]).cpu()
        assert torch.equal(found, scores_reference(logits, *rows).argmax(1)), heat
        assert found[0] == 0
        assert found[1] == 2500 or heat == 1e-38  # which makes minus infinity of its score, too


def found_by(one, logits, rows, ids=None):
    rows = [x.contiguous() for x in rows]
    return one.best_token(logits, len(logits), rows, len(logits), TARGET_NOISE, token_ids=ids)


def exact_of_near_scores(one, device):
    """Logits are the noise's negative, give or take 1e-5: the highest scores are nearer than rough noise tells."""
    for seed in range(4):
        heat, *key = keyed(4, "cpu", torch.tensor([1.0, 0.5, 2.0, 1e-3]), seed)
        apart = 1e-5 * torch.randn(4, 1500, generator=torch.Generator().manual_seed(seed))
        logits = (apart - gumbel(*key, 1500)) * heat[:, None]
        found = found_by(one, *(logits.to(device), [x.to(device) for x in (heat, *key)])).cpu()
        scores = scores_reference(logits, heat, *key)
        if (scores.amax(1) - scores.gather(1, found[:, None])[:, 0] > 4e-6).any():
            return False
    return True


def exact_of_a_draft_vocabulary(one, device):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(3000, generator=generator)[:1100].int().to(device)
    logits, rows = torch.randn(6, 1100, generator=generator).to(device), keyed(6, device, 2.0)
    expected = scores_reference(whole(logits, ids, 3000).cpu(), *[x.cpu() for x in rows]).argmax(1)
    return torch.equal(found_by(one, logits, rows, ids).cpu(), expected)


def exact_at_temperatures(one, device):
    logits = torch.randn(8, 1100, generator=torch.Generator().manual_seed(4)).to(device)
    rows = keyed(8, device, torch.arange(8) * 0.4)
    expected = scores_reference(logits.cpu(), *[x.cpu() for x in rows]).argmax(1)
    return torch.equal(found_by(one, logits, rows).cpu(), expected)


NOISE = "heat > 0:\n            words = token_words"
MUTANTS = [
    (exact_of_near_scores, "4 * ROUGHNESS + 5e-5", "0 * ROUGHNESS", "of near scores the one of the rough noise"),
    (exact_at_temperatures, "score, 1.4426950408889634 / heat", "score, 1.4426950408889634", "no temperature"),
    (exact_at_temperatures, "found - CHUNK\n", "found - CHUNK + 1\n", "the next token"),
    (exact_at_temperatures, NOISE, NOISE.replace("0", "9"), "no noise"),
    (exact_of_a_draft_vocabulary, "token = tl.load(token_ids + column)", "token = column", "columns for tokens"),
    (exact_of_a_draft_vocabulary, "token_words(tokens, *key)", "token_words(tokens + 4, *key)", "another's noise"),
]


@pytest.mark.parametrize("is_exact", [exact_of_near_scores, exact_of_a_draft_vocabulary, exact_at_temperatures])
def test_rough_noise_decides_nothing(is_exact, kernel_device):
    assert is_exact(module, kernel_device)


@pytest.mark.parametrize(("is_exact", "before", "after"), [x[:3] for x in MUTANTS], ids=[x[3] for x in MUTANTS])
def test_faults_show(is_exact, before, after, kernel_device, tmp_path):
    assert not is_exact(mutated(module, before, after, tmp_path), kernel_device)
