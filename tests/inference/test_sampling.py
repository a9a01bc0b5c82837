from types import SimpleNamespace

import pytest
import torch

from headstart import SamplingParams
from headstart.inference.sampling import SamplingBatch, draw


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(temperature=-0.1), r"temperature must be 0 \(greedy\) or a finite number"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=1e-40), "temperature must be"),
        (dict(stop=5), "stop must be a string or a list of strings, got 5"),
        (dict(stop_token_ids=3), "stop_token_ids must be a list"),
        (dict(top_p=0), r"top_p must be in \(0, 1\], got 0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(top_k=-2), "top_k"),
        (dict(max_tokens=0), "max_tokens must be at least 1"),
        (dict(min_tokens=17), "min_tokens must be from 0 to max_tokens"),
        (dict(stop=[""]), "stop must be"),
        (dict(stop_token_ids=[-1]), "stop_token_ids"),
        (dict(seed=-1), "seed"),
        (dict(n=0), "n must be at least 1"),
        (dict(logprobs=-1), "logprobs"),
        (dict(temprature=1), "unknown sampling parameter 'temprature'; did you mean 'temperature'"),
    ],
)
def test_bad_values_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_parameters_cannot_be_changed_after_they_were_checked():
    params = SamplingParams(temperature=0.0)
    with pytest.raises(AttributeError):
        params.temperature = -1
    assert params == SamplingParams(temperature=0.0)
    assert "temperature=0.0" in repr(params)


def scores(logits, **given):
    request = SimpleNamespace(params=SamplingParams(**given), seed=1, sample_index=0)
    batch = SamplingBatch([request], "cpu")
    return batch.target_scores(logits[None], [[0] * len(logits)], eos_token_ids=[])[0]


def kept_by_hand(row, top_k, top_p):
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    if top_k > 0:
        order = order[:top_k]
    weights = torch.tensor([row[t] for t in order], dtype=torch.float64).softmax(0).tolist()
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights):
        if mass >= top_p:
            break
        kept.add(token)
        mass += weight
    return kept


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.6), (1, 0.01)])
def test_top_k_and_top_p_keep_what_a_loop_over_the_sorted_tokens_keeps(top_k, top_p, temperature):
    logits = torch.randn(20, 31, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    found = scores(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    for row, result in zip(logits / temperature, found):
        kept = {t for t in range(31) if result[t] > -torch.inf}
        assert kept == kept_by_hand(row.tolist(), top_k, top_p)
        assert torch.equal(result[list(kept)], row[list(kept)])


def test_top_k_ties_go_to_the_lowest_token():
    found = scores(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), temperature=1.0, top_k=2)
    assert found.isfinite().tolist() == [[False, True, True, False, False]]


def test_min_tokens_excludes_what_would_end_the_output():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    batch = SamplingBatch([SimpleNamespace(params=params, seed=0, sample_index=0)], "cpu")
    found = batch.target_scores(torch.zeros(1, 3, 6), [[0, 1, 2]], eos_token_ids=[5])
    assert found.isfinite().tolist() == [[[True, True, True, False, True, False]] * 2 + [[True] * 6]]


def test_greedy_requests_in_a_mixed_batch_stay_greedy():
    requests = [SimpleNamespace(params=SamplingParams(temperature=t), seed=3, sample_index=0) for t in (0.0, 1.0)]
    batch = SamplingBatch(requests, "cpu")
    noise = batch.noise(torch.tensor([[4], [4]]), 50)
    assert not noise[0].any()
    assert noise[1].all()
    logits = torch.randn(2, 1, 50)
    assert draw(batch.target_scores(logits, [[0], [0]], []), noise)[0] == logits[0].argmax(-1)


def test_draw_gives_ties_to_the_lowest_token():
    assert draw(torch.tensor([[0.0, 3.0, 3.0]]), None).item() == 1


def test_noise_is_keyed_by_the_absolute_position_and_nothing_else():
    def noise(positions, seed=3, sample=0):
        request = SimpleNamespace(params=SamplingParams(temperature=1.0), seed=seed, sample_index=sample)
        return SamplingBatch([request], "cpu").noise(torch.tensor([positions]), 40)[0]

    both = noise([7, 8])
    assert not torch.equal(both[0], both[1])
    assert torch.equal(both[1], noise([8])[0])
    assert torch.equal(both[1], noise([6, 7, 8])[2])
    assert not torch.equal(both[0], noise([7], seed=4)[0])
    assert not torch.equal(both[0], noise([7], sample=1)[0])


def test_a_position_repeats_its_noise_in_no_other_position_of_an_output():
    """At a very high temperature tokens follow the noise: noise that ignored the position would repeat one token for ever."""
    request = SimpleNamespace(params=SamplingParams(temperature=100.0), seed=1, sample_index=0)
    noise = SamplingBatch([request], "cpu").noise(torch.arange(60)[None], 500)
    assert len(set(draw(torch.zeros(1, 60, 500), noise)[0].tolist())) > 40
