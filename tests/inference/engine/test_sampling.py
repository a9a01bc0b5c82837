import dataclasses
from types import SimpleNamespace

import pytest
import torch

from headstart import SamplingParams
from headstart.inference.engine.seats import SeatTable
from headstart.inference.engine.target_scores import CUT, TargetScores
from headstart.kernels.sampling.keep_top import keep_top, kept_scores


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
        (dict(min_p=-0.1), r"min_p must be in \[0, 1\], got -0.1"),
        (dict(min_p=1.5), r"min_p must be in \[0, 1\], got 1.5"),
        (dict(min_p="0.1"), r"min_p must be in \[0, 1\], got '0.1'"),
        (dict(repetition_penalty=0), r"repetition_penalty must be above 0 \(from 1e-05 to 100000; 1 for none\), got 0"),
        (dict(repetition_penalty=-1.1), "repetition_penalty must be above 0 .*, got -1.1"),
        (dict(repetition_penalty=float("inf")), "repetition_penalty must be above 0 .*, got inf"),
        (dict(presence_penalty=2.1), "presence_penalty must be from -2 to 2, got 2.1"),
        (dict(frequency_penalty=-3), "frequency_penalty must be from -2 to 2, got -3"),
        (dict(frequency_penalty=True), "frequency_penalty must be from -2 to 2, got True"),
        (dict(logit_bias=5), "logit_bias must be a dictionary {token id: bias}, got 5"),
        (dict(logit_bias=[1, 2]), r"logit_bias must be a dictionary {token id: bias}, got \[1, 2\]"),
        (
            dict(logit_bias={-1: 1}),
            r"logit_bias must be a dictionary {token id: bias from -100 to 100}, got \(\(-1, 1\),\)",
        ),
        (dict(logit_bias={"one": 1}), "logit_bias must be a dictionary {token id: bias from -100 to 100}"),
        (dict(logit_bias={1: 100.5}), r"bias from -100 to 100}, got \(\(1, 100.5\),\)"),
        (dict(logit_bias={1: float("nan")}), "bias from -100 to 100}, got"),
        (dict(allowed_token_ids=[]), r"allowed_token_ids must be None or a list of at least one token id, got \(\)"),
        (dict(allowed_token_ids=7), "allowed_token_ids must be a list of token ids, got 7"),
        (dict(allowed_token_ids=[1.0]), r"allowed_token_ids must be None or a list .*, got \(1.0,\)"),
        (dict(bad_words="word"), "bad_words must be a list of strings, got 'word'"),
        (dict(bad_words=["word", ""]), r"bad_words must be a list of strings .*, got \('word', ''\)"),
        (dict(bad_words=[3]), r"bad_words must be a list of strings .*, got \(3,\)"),
        (dict(max_tokens=0), "max_tokens must be at least 1"),
        (dict(min_tokens=17), "min_tokens must be from 0 to max_tokens"),
        (dict(stop=[""]), "stop must be"),
        (dict(stop_token_ids=[-1]), "stop_token_ids"),
        (dict(seed=-2), "seed"),
        (dict(n=0), "n must be at least 1"),
        (dict(logprobs=-2), "logprobs"),
        (dict(temprature=1), "unknown sampling parameter 'temprature'; did you mean 'temperature'"),
        (dict(best_of=2), "sampling parameter 'best_of' is vLLM's and not supported here"),
    ],
)
def test_bad_values_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_parameters_without_a_name_are_refused():
    with pytest.raises(ValueError, match=r"keywords only, got 0\.5: write for example temperature=0\.5"):
        SamplingParams(0.5)


def test_parameters_cannot_be_changed_after_they_were_checked():
    params = SamplingParams(temperature=0.0)
    with pytest.raises(AttributeError):
        params.temperature = -1
    assert params == SamplingParams(temperature=0.0)
    assert "temperature=0.0" in repr(params)


def test_parameters_can_be_made_again_from_their_fields():
    params = SamplingParams(logit_bias={7: 1.5, 3: -2}, allowed_token_ids=[3, 7], bad_words=["no"], presence_penalty=1)
    assert params.logit_bias == ((3, -2), (7, 1.5))
    assert dataclasses.replace(params) == params
    assert hash(params) == hash(SamplingParams(**dataclasses.asdict(params)))
    assert SamplingParams(logit_bias=None, bad_words=None, allowed_token_ids=None) == SamplingParams()


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
    rows = [torch.full((20,), x) for x in (temperature, top_k, top_p, 0.0)]
    found = kept_scores(keep_top(logits, *rows))
    for row, result in zip(logits / temperature, found):
        kept = {t for t in range(31) if result[t] > -torch.inf}
        assert kept == kept_by_hand(row.tolist(), top_k, top_p)
        assert torch.equal(result[list(kept)], row[list(kept)])


def drawn(params, logits, emitted=0, seed=3, prompt=5):
    """The target's tokens for one request, after the nodes of a chain.  logits [N, V] -> list of N tokens"""
    request = SimpleNamespace(
        params=params,
        seed=seed,
        sample_index=0,
        seat=1,
        prompt_token_ids=list(range(prompt)),
        output_token_ids=list(range(emitted)),
        known_token_ids=list(range(prompt + emitted)),
        num_remaining=100,
        bad_words=(),
        matcher=None,
    )
    seats = SeatTable(2, 4, 8, logits.shape[1], torch.float32, torch.device("cpu"))
    seats.write_requests([request], [0], lambda request: {5, *request.params.stop_token_ids})
    batch = seats.gather(torch.tensor([1]), torch.arange(-1, len(logits) - 1))
    return TargetScores(batch, logits, CUT, seats).sample()[0].tolist()


def test_min_tokens_excludes_what_would_end_the_output():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    logits = torch.tensor([[0.0, 0, 0, 9, 1, 8]]).repeat(3, 1)
    assert drawn(params, logits) == [4, 4, 3]
    assert drawn(params, logits, emitted=1) == [4, 3, 3]


def test_greedy_draws_take_the_lowest_of_the_highest():
    assert drawn(SamplingParams(temperature=0.0), torch.tensor([[0.0, 3.0, 3.0]])) == [1]


def test_draws_are_keyed_by_seed_and_absolute_position():
    """At a very high temperature tokens follow the noise: noise that ignored the position would repeat one token for ever."""
    params, logits = SamplingParams(temperature=100.0), torch.zeros(60, 500)
    tokens = drawn(params, logits)
    assert len(set(tokens)) > 40
    assert drawn(params, logits[:50], emitted=10) == tokens[10:]
    assert drawn(params, logits[:50], prompt=15) == tokens[10:]
    assert drawn(params, logits, seed=4) != tokens
