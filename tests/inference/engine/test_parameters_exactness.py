"""Every sampling parameter works with speculation: tokens and logprobs equal those of plain decoding, request by request.

One batch holds requests with all parameters, each request with another set.
"""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headstart.inference.engine.seats as seats_module
import headstart.inference.engine.step as step_module
from headstart import LLM, SamplingParams
from headstart.inference.engine.logit_state import LogitState
from headstart.inference.engine.seats import SeatTable
from headstart.inference.engine.target_scores import path_tokens
from headstart.inference.speculation.tree import chain
from headstart.tests.inference.engine.test_exactness import RAGGED, VOCAB, make_target, prompts_of_lengths, speculating

LENGTHS = (3, 17, 40, 62, 64, 65, 90)
TEMPERATURES = (0.0, 0.8)
NUM_TOKENS = 40


def spelt(tokens):
    """Text of these tokens: one character each."""
    return "".join(chr(0x4E00 + token) for token in tokens)


def make_tokenizer():
    characters = {spelt([token]): token for token in range(VOCAB)}
    words = Tokenizer(models.WordLevel(characters, unk_token=spelt([0])))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture(scope="module")
def target():
    return make_target(seed=2)


def run(llm, prompts, params):
    return [
        [(output.token_ids, output.logprobs) for output in found.outputs] for found in llm.generate(prompts, params)
    ]


def first_tokens(found):
    """The tokens of every request's first output."""
    return [outputs[0][0] for outputs in found]


def with_parameters(given, temperature, **common):
    """SamplingParams per request, seeded by its number: that is how the oracle knows it."""
    common = dict(temperature=temperature, max_tokens=NUM_TOKENS) | common
    return [SamplingParams(seed=i, **(common | params)) for i, params in enumerate(given)]


def choose_parameters(free):
    """Parameters that change the output, chosen from outputs without any: name -> parameters.  free: tokens per request"""
    words = [[spelt(tokens[i : i + 1 + i % 3]) for i in range(1, 30, 4)] for tokens in free]
    allowed = sorted({*range(0, VOCAB, 3), *free[6][::2]})
    # Bad words may lie across the end of the prompt, and a frequent token is worth a bias.
    given = {
        "free": {},
        "min_p": dict(min_p=0.3),
        "repetition_penalty": dict(repetition_penalty=1.4),
        "presence_penalty": dict(presence_penalty=1.8),
        "frequency_penalty": dict(frequency_penalty=1.1),
        "logit_bias": dict(logit_bias={free[5][2]: -4.0, free[5][9]: 3.5, 8: 2}),
        "allowed_token_ids": dict(allowed_token_ids=allowed),
        "bad_words": dict(bad_words=words[7]),
        "negative penalties": dict(presence_penalty=-0.5, frequency_penalty=-0.3, repetition_penalty=0.9),
        "min_tokens": dict(min_tokens=13, stop_token_ids=free[9][4:6]),
        "filters": dict(min_p=0.05, top_k=30, top_p=0.9, repetition_penalty=1.2),
        "all": dict(
            min_p=0.02,
            top_k=40,
            top_p=0.97,
            repetition_penalty=1.2,
            presence_penalty=0.7,
            frequency_penalty=0.5,
            logit_bias={8: 2, 9: -1.5},
            allowed_token_ids=[token for token in range(VOCAB) if token % 7],
            bad_words=words[11],
            min_tokens=6,
            stop_token_ids=free[11][2:4],
        ),
        "free again": {},
    }
    return given


@pytest.fixture(scope="module")
def plain(target):
    """prompts, and per temperature (names, parameters, outputs with them one request at a time, outputs without)."""
    prompts = prompts_of_lengths([LENGTHS[i % len(LENGTHS)] for i in range(13)], seed=5)
    found = {}
    for temperature in TEMPERATURES:
        free = run(LLM(target, max_num_seqs=8), prompts, with_parameters([{}] * 13, temperature))
        given = choose_parameters(first_tokens(free))
        params = with_parameters(given.values(), temperature, logprobs=1)
        one = LLM(target, make_tokenizer(), max_num_seqs=1, enable_prefix_caching=False)
        found[temperature] = list(given), params, run(one, prompts, params), free
    return prompts, found


def speculate(target, tree, prompts, params, expected, late=0, **options):
    """Outputs with speculation.  -> (outputs, LLM)"""
    llm = speculating(target, tree, first_tokens(expected), prompts, 0.7, tokenizer=make_tokenizer(), **options)
    llm.engine.steps_late = late
    return run(llm, prompts, params), llm


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_parameter_changes_the_output_as_it_says(plain, temperature):
    prompts, found = plain
    for name, params, outputs, free in zip(*found[temperature]):
        (tokens, _), (before, _) = outputs[0], free[0]
        idle = name.startswith("free") or (name == "min_p" and temperature == 0)
        # Requests without parameters ran in an engine without any table, and in an engine with all tables.
        assert (tokens == before) == idle, name
        if params.allowed_token_ids:
            assert set(tokens) <= set(params.allowed_token_ids)
        said = spelt(prompts[params.seed] + tokens)[len(prompts[params.seed]) - 2 :]
        assert all(word not in said for word in params.bad_words)
        assert len(tokens) >= params.min_tokens
    assert any(word in spelt(found[temperature][3][7][0][0]) for word in found[temperature][1][7].bad_words)


@pytest.mark.parametrize(
    ("tree", "temperature", "batch"),
    [(chain(4), 0.0, 5), (chain(4), 0.8, 5), (RAGGED, 0.0, 5), (RAGGED, 0.8, 5), (RAGGED, 0.8, 1)],
    ids=["chain greedy", "chain", "tree greedy", "tree", "tree alone"],
)
def test_speculation_changes_no_token_and_no_logprob(target, plain, tree, temperature, batch):
    names, params, expected, _ = plain[1][temperature]
    outputs, llm = speculate(target, tree, plain[0], params, expected, max_num_seqs=batch)
    for name, found, wanted in zip(names, outputs, expected):
        assert found == wanted, name
    assert all(llm.engine.metrics.spec_decode.accepted_per_position)
    state = llm.engine.seats.logit_state
    tables = {name: table for name, table in state.tables._asdict().items() if name != "masks"}
    for name, table in tables.items():
        assert (table[-1] == (-1 if name == "words" else 0)).all(), f"{name} of the padding seat was written to"


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_preemption_changes_no_bit(target, plain, temperature, late):
    _, params, expected, _ = plain[1][temperature]
    outputs, llm = speculate(
        target, RAGGED, plain[0], params, expected, late, max_num_seqs=6, num_gpu_blocks_override=7
    )
    assert outputs == expected
    assert llm.get_stats()["num_preemptions"] > 1


def test_several_outputs_of_a_prompt_keep_their_own_counts(target, plain):
    prompts, found = plain
    prompts = prompts[:3]
    given = [dict(frequency_penalty=0.7), dict(repetition_penalty=1.3, bad_words=found[0.8][1][11].bad_words), {}]
    params = [SamplingParams(seed=i, n=3, temperature=0.8, max_tokens=24, **own) for i, own in enumerate(given)]
    expected = run(LLM(target, make_tokenizer(), max_num_seqs=1), prompts, params)
    assert all(len({tuple(tokens) for tokens, _ in outputs}) == 3 for outputs in expected)
    # The third output is the one that the oracle knows.
    known = [outputs[2][0] for outputs in expected]
    llm = speculating(target, RAGGED, known, prompts, 0.9, tokenizer=make_tokenizer(), max_num_seqs=7)
    assert run(llm, prompts, params) == expected


# --- each of these defects must break the equality above ---

# Only two tokens may follow each of these six: the newest token decides the next one everywhere.
FOLLOWING = dict(
    allowed_token_ids=list(range(10, 16)),
    bad_words=[spelt([10 + i, 10 + (i + k) % 6]) for i in range(6) for k in (0, 3, 4, 5)],
)
# Negative penalties are rewards: the newest tokens are likely to be repeated.
BITING = {
    "repetition_penalty": dict(repetition_penalty=0.25),
    "presence_penalty": dict(presence_penalty=-2),
    "frequency_penalty": dict(frequency_penalty=-0.5),
    "bad_words": FOLLOWING,
}


@pytest.fixture(scope="module")
def biting(target, plain):
    """(prompts, parameters, plain outputs) of requests that all have this parameter."""
    prompts, made = plain[0][:7], {}

    def make(name):
        if name not in made:
            params = with_parameters([BITING[name]] * len(prompts), 0.8)
            made[name] = prompts, params, run(LLM(target, make_tokenizer()), prompts, params)
        return made[name]

    return make


def equality_holds(target, biting, monkeypatch, name, defect, tree=RAGGED, **options):
    """Whether requests with this parameter have equal outputs with speculation in a defective engine."""
    prompts, params, expected = biting(name)
    outputs, llm = speculate(target, tree, prompts, params, expected, max_num_seqs=6, **options)
    assert outputs == expected
    assert bool(options) == (llm.get_stats()["num_preemptions"] > 0)
    monkeypatch.setattr(*defect)
    return speculate(target, tree, prompts, params, expected, max_num_seqs=6, **options)[0] == expected


def no_path(tokens, tree):
    """The distribution after a node looks at the root's past only."""
    return torch.full_like(path_tokens(tokens, tree), -1)


def all_drafts(tokens, tree):
    """It looks at all nodes of the tree instead of the node's own path."""
    return tokens[:, None, 1:].expand(*tokens.shape, -1).flatten(0, 1)


@pytest.mark.parametrize(("name", "defect"), [*((name, no_path) for name in BITING), ("frequency_penalty", all_drafts)])
def test_equality_breaks_if_the_distribution_does_not_follow_the_path(target, biting, monkeypatch, name, defect):
    assert not equality_holds(target, biting, monkeypatch, name, (step_module, "path_tokens", defect))


def test_equality_breaks_if_the_step_keeps_no_count_of_what_it_emits(target, biting, monkeypatch):
    nothing = (LogitState, "record", lambda *arguments: None)
    assert not equality_holds(target, biting, monkeypatch, "frequency_penalty", nothing, tree=chain(4))


def test_equality_breaks_if_the_step_keeps_no_history_of_what_it_emits(target, biting, monkeypatch):
    advance = seats_module.advance_seats

    def forgetful(*given, padding_seat, history):
        return advance(*given, padding_seat=padding_seat, history=history.clone())

    defect = seats_module, "advance_seats", forgetful
    assert not equality_holds(target, biting, monkeypatch, "bad_words", defect, tree=chain(4))


def test_equality_breaks_if_counts_are_not_restored_after_preemption(target, biting, monkeypatch):
    rows = LogitState._rows

    def forgetful(state, request, stop_tokens):
        for found, row in rows(state, request, stop_tokens):
            yield found, torch.zeros_like(row) if found == "counts" and request.output_token_ids else row

    pressed = dict(num_gpu_blocks_override=6)
    defect = (LogitState, "_rows", forgetful)
    assert not equality_holds(target, biting, monkeypatch, "frequency_penalty", defect, **pressed)


def test_equality_breaks_if_the_history_is_not_restored_after_preemption(target, biting, monkeypatch):
    write = SeatTable.write_requests

    def forgetful(seats, requests, *given):
        write(seats, requests, *given)
        seats.history[[request.seat for request in requests if request.output_token_ids]] = 0

    pressed = dict(num_gpu_blocks_override=6)
    defect = (SeatTable, "write_requests", forgetful)
    assert not equality_holds(target, biting, monkeypatch, "bad_words", defect, **pressed)
