"""The scores after every node of a tree against transformers' logits processors over that node's own tokens, in vLLM's order;
and whole outputs against a loop around transformers' model and processors.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart import LLM, SamplingParams
from headstart.inference.engine.logit_state import LogitState
from headstart.inference.engine.seats import SeatTable
from headstart.inference.engine.target_scores import CHANGED, CUT, NO_FILTERS, TargetScores, path_tokens
from headstart.inference.session import CheckedPrompt
from headstart.inference.speculation.tree import build_static_tree
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.sampling.process_logits import LogitTables
from headstart.tests.inference.engine.test_exactness import make_target, speculating

VOCAB = 61
TREE = build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.5, 0.2], [0.4]], 13)
PROMPT = [(7 * i + i * i) % VOCAB for i in range(12)]
OUTPUT = [5, 9, 5, 30, 5]  # the last one is the root
STOPS = {2, 3}
WORDS = ((11,), (5, 20), (30, 5, 21), (5, 8, 22), (PROMPT[-1], OUTPUT[0], 23), (9, 5, 30, 5, 24))


def filtered_scores(batch, logits, filters, seats, path):
    """The scores that tokens are drawn from, as TargetScores writes them down.  logits [M, V] -> fp32 [M, V]"""
    scores = torch.full_like(logits, torch.nan, dtype=torch.float32)
    TargetScores(batch, logits, filters, seats, path=path, processed=scores).sample()
    return scores


class CountPenalties:
    """presence_penalty and frequency_penalty by their formula; transformers has none."""

    def __init__(self, presence, frequency, start):
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for token in set(input_ids[0, self.start :].tolist()):
            count = input_ids[0, self.start :].tolist().count(token)
            scores[0, token] = scores[0, token] - torch.tensor(self.frequency) * count - self.presence
        return scores


def processors(params, bad_words):
    """These parameters as transformers' logits processors."""
    found = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        found.append(PrefixConstrainedLogitsProcessor(lambda *_: list(params.allowed_token_ids), 1))
    if bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in bad_words]))
    if params.min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, sorted(STOPS)))
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in params.logit_bias}))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    found.append(CountPenalties(params.presence_penalty, params.frequency_penalty, len(PROMPT)))
    if params.temperature > 0:
        if params.temperature != 1:
            found.append(TemperatureLogitsWarper(params.temperature))
        if params.min_p:
            found.append(MinPLogitsWarper(params.min_p))
        if params.top_k:
            found.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            found.append(TopPLogitsWarper(params.top_p))
    return found


# A grammar that allows all.
ANYTHING = SimpleNamespace(masks=np.full((1, -(-VOCAB // 32)), -1, dtype=np.int32), drafts=[])


def a_request(params, bad_words=(), output=OUTPUT, seat=1, matcher=None):
    return SimpleNamespace(
        params=params,
        seed=3,
        sample_index=0,
        seat=seat,
        prompt_token_ids=PROMPT,
        output_token_ids=output,
        known_token_ids=PROMPT + output[:-1],
        num_tokens=len(PROMPT) + len(output),
        tokens_between=lambda start, stop: (PROMPT + output)[start:stop],
        num_remaining=100,
        bad_words=bad_words,
        matcher=matcher,
    )


def make_seats(*requests):
    seats = SeatTable(4, 4, 8, VOCAB, torch.float32, torch.device("cpu"))
    roots = [request.output_token_ids[-1] if request.output_token_ids else 0 for request in requests]
    seats.write_requests(requests, roots, lambda _: STOPS)
    return seats


CASES = {
    "nothing": dict(),
    "temperature": dict(temperature=0.7),
    "min_p": dict(min_p=0.2),
    "top_k": dict(top_k=7, temperature=1.3),
    "top_p": dict(top_p=0.6),
    "repetition": dict(repetition_penalty=1.7),
    "repetition below 1": dict(repetition_penalty=0.6),
    "presence": dict(presence_penalty=1.3),
    "frequency": dict(frequency_penalty=0.9),
    "negative": dict(presence_penalty=-1.1, frequency_penalty=-0.4),
    "bias": dict(logit_bias={4: 2.5, 9: -3.0, 60: 100}),
    "allowed": dict(allowed_token_ids=[1, 2, 5, 7, 8, 20, 21, 22, 23, 24, 40]),
    "bad_words": dict(bad_words=["spelt below"]),
    "min_tokens": dict(min_tokens=7),
}
CASES["all"] = {name: value for case in CASES.values() for name, value in case.items()}
CASES["all at temperature 0"] = CASES["all"] | dict(temperature=0.0)


@pytest.mark.parametrize("name", CASES)
def test_scores_behind_every_node_are_those_of_transformers(name):
    params = SamplingParams(**CASES[name])
    bad_words = WORDS if params.bad_words else ()
    seats, tree = make_seats(a_request(params, bad_words)), TreeOnDevice.of(TREE, "cpu")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TREE.num_nodes, VOCAB, generator=generator) * 3
    # Drafts of few different tokens, so that paths repeat tokens and complete bad words.
    tokens = torch.tensor([5, 8, 20, 9, 30, 24])[torch.randint(6, (1, TREE.num_nodes), generator=generator)]
    tokens[:, 0] = OUTPUT[-1]
    batch = seats.gather(torch.tensor([1]), tree.depths)
    rows = torch.arange(TREE.num_nodes)
    found = filtered_scores(batch, logits, CUT, seats, path_tokens(tokens, tree))
    changed = 0
    for node in rows.tolist():
        path = [tokens[0, n].item() for n in TREE.ancestors[node][1 : TREE.depths[node] + 1]]
        sequence = torch.tensor([PROMPT + OUTPUT + path])
        expected = processors(params, bad_words)(sequence, logits[node : node + 1].clone())[0]
        assert torch.equal(found[node], expected), (node, path)
        changed += not torch.equal(expected, logits[node])
    assert (changed > 0) == (name != "nothing")


@pytest.mark.parametrize("name", CASES)
def test_the_first_token_is_drawn_from_the_same_distribution(name):
    params = SamplingParams(**CASES[name])
    bad_words = ((PROMPT[-1], 20), (PROMPT[-2], PROMPT[-1], 21), (4,)) if params.bad_words else ()
    seats = make_seats(a_request(params, bad_words, output=[]))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    batch = seats.gather(torch.tensor([1]), torch.tensor([-1]))
    found = filtered_scores(batch, logits, CUT, seats, None)
    expected = processors(params, bad_words)(torch.tensor([PROMPT]), logits.clone())
    assert torch.equal(found, expected)


# After each of six tokens only two others may come, so the newest token decides about every next one.
FOLLOWING = tuple((10 + i, 10 + (i + k) % 6) for i in range(6) for k in (0, 3, 4, 5))
WRITING = {
    "repetition": dict(repetition_penalty=1.7),
    "counts": dict(presence_penalty=1.3, frequency_penalty=0.4),
    "rewards": dict(presence_penalty=-1.5, frequency_penalty=-0.3, repetition_penalty=0.7),
    "bias and stops": dict(logit_bias={2: 9, 3: 9.5, 8: -3}, stop_token_ids=[2, 3], min_tokens=11),
    "bad_words": dict(allowed_token_ids=list(range(10, 16)), bad_words=["spelt below"]),
    "all": dict(
        allowed_token_ids=[2, *range(10, 16)],
        bad_words=["spelt below"],
        min_tokens=13,
        stop_token_ids=[2, 3],
        logit_bias={2: 9, 11: 0.5},
        repetition_penalty=0.8,
        presence_penalty=-0.4,
        frequency_penalty=1.2,
    ),
}


@pytest.fixture(scope="module")
def model():
    return make_target(seed=3, vocab_size=VOCAB)


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("name", WRITING)
def test_greedy_outputs_are_those_of_a_loop_around_transformers(model, monkeypatch, name, speculation):
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=30, **WRITING[name])
    bad_words = FOLLOWING if params.bad_words else ()
    sequence = torch.tensor([PROMPT])
    rules = processors(params, bad_words)
    with torch.no_grad():
        while sequence.shape[1] < len(PROMPT) + 30 and sequence[0, -1].item() not in params.stop_token_ids:
            scores = rules(sequence, model(sequence).logits[:, -1].float())
            sequence = torch.cat((sequence, scores.argmax(-1, keepdim=True)), 1)
    expected = sequence[0, len(PROMPT) :].tolist()
    llm = speculating(model, TREE, [expected], [PROMPT], 0.8) if speculation else LLM(model)
    (request,) = llm.session.submit(CheckedPrompt(None, PROMPT, params, bad_words)).requests
    while not request.finished:
        llm.engine.step()
    assert request.output_token_ids == expected
    assert params.min_tokens < len(expected) <= 30


def test_requests_without_such_parameters_get_the_same_bits_in_both_variants():
    generator = torch.Generator().manual_seed(2)
    everything = a_request(SamplingParams(**CASES["all"]), WORDS, seat=0)
    form = a_request(SamplingParams(), seat=3, matcher=ANYTHING)
    plain = [a_request(SamplingParams(temperature=t), seat=seat) for t, seat in ((0.0, 1), (0.83, 2))]
    seats, tree = make_seats(everything, form, *plain), TreeOnDevice.of(TREE, "cpu")
    assert all(table is not None for table in seats.logit_state.tables)
    tokens = torch.randint(VOCAB, (3, TREE.num_nodes), generator=generator)
    logits = torch.randn(3 * TREE.num_nodes, VOCAB, generator=generator)
    batch = seats.gather(torch.tensor([1, 0, 2]), tree.depths)
    path = path_tokens(tokens, tree)
    found = filtered_scores(batch, logits, CUT, seats, path).view(3, -1, VOCAB)
    expected = logits.view(3, -1, VOCAB)
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2] / torch.tensor(0.83))
    changed = filtered_scores(batch, logits, CHANGED, seats, path).view(3, -1, VOCAB)
    assert torch.equal(changed[[0, 2]], found[[0, 2]]), "what cuts nothing needs no sorting"
    drawn = [TargetScores(batch, logits, filters, seats, path=path).sample() for filters in (NO_FILTERS, CHANGED, CUT)]
    assert torch.equal(drawn[0][[0, 2]], drawn[1][[0, 2]])
    assert torch.equal(drawn[0][[0, 2]], drawn[2][[0, 2]])


def test_tables_are_made_when_needed_and_rows_are_cleaned_when_their_seat_is_given_on():
    seats = make_seats(a_request(SamplingParams()))
    state = seats.logit_state
    assert state.tables == LogitTables()
    before = state.num_tables
    seats.write_requests([a_request(SamplingParams(logit_bias={3: 1}))], [0], lambda _: STOPS)
    assert [name for name in LogitTables._fields if getattr(state.tables, name) is not None] == ["bias"]
    everything = a_request(SamplingParams(**CASES["all"]), WORDS)
    seats.write_requests([everything, a_request(SamplingParams(), seat=0, matcher=ANYTHING)], [0, 0], lambda _: STOPS)
    assert state.num_tables == len(LogitTables._fields) > before
    dirty = [table.clone() for table in state.tables]
    seats.write_requests([a_request(SamplingParams(), seat=2)], [0], lambda _: STOPS)
    assert all(torch.equal(now[:2], then[:2]) for now, then in zip(state.tables, dirty)), (
        "another seat's rows were touched"
    )
    seats.write_requests([a_request(SamplingParams(), seat=seat) for seat in (0, 1)], [0, 0], lambda _: STOPS)
    assert state.tables.tokens is seats.history
    for name, table in state.tables._replace(tokens=seats.history[-1])._asdict().items():
        assert (table == (-1 if name in ("words", "masks") else 0)).all(), name


def test_emitted_tokens_are_counted_and_the_padding_seat_stays_clean():
    state = LogitState(torch.zeros(3, 40, dtype=torch.int32), VOCAB, torch.as_tensor)
    request = a_request(SamplingParams(presence_penalty=1), seat=0)
    state.write([request], None)
    seats = torch.tensor([0, 2, 2])
    state.record(seats, torch.tensor([[2, 9, 33, 44], [3, 1, 2, 3], [1, 5, 0, 0]]))
    state.record(seats[:1], torch.tensor([[3, 9, 9, 10]]))
    output = [*OUTPUT, 9, 33, 9, 9, 10]
    assert state.tables.counts[0].tolist() == [output.count(token) for token in range(VOCAB)]
    assert not state.tables.counts[1:].any()


def test_the_history_is_the_sequence_up_to_the_root():
    first, second = a_request(SamplingParams(), seat=0), a_request(SamplingParams(), seat=1, output=[])
    seats = make_seats(first, second)
    seats.write_first_tokens(torch.tensor([1]), torch.tensor([77]), torch.tensor([len(PROMPT)]))
    known = PROMPT + OUTPUT, [*PROMPT, 77]
    for row, tokens in zip(seats.history, known):
        assert row[: len(tokens)].tolist() == tokens
    assert seats.integers[:2, 1].tolist() == [OUTPUT[-1], 77]
    assert not seats.history[2:].any()
