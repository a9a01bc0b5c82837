"""Logprobs of emitted and of prompt tokens: values, shape, and the same bits however they were computed."""

import gc
import pickle
import random

import pytest
import torch

import headstart.inference.engine.logprobs as module
from headstart import LLM, SamplingParams
from headstart.inference.engine import engine as engine_module
from headstart.inference.engine.request import Request, Status
from headstart.inference.engine.scheduler import ScheduledStep
from headstart.inference.engine.target_scores import CHANGED, CUT, NO_FILTERS, TargetScores
from headstart.inference.line import Call
from headstart.inference.speculation.tree import build_static_tree, chain

VOCAB = 97
LENGTHS = (1, 2, 17, 64, 65, 130, 190)  # at and across pages of 64
RAGGED = build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.4]], 12)
PARAMS = dict(max_tokens=24, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def prompts():
    generator = random.Random(5)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def run(llm, prompts, temperature=0.8, **params):
    """Per request (tokens, logprobs, their sum, prompt logprobs)."""
    asked = [SamplingParams(seed=i, temperature=temperature, **PARAMS | params) for i in range(len(prompts))]
    return [
        (o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].cumulative_logprob, o.prompt_logprobs)
        for o in llm.generate(prompts, asked)
    ]


@pytest.fixture(scope="module")
def alone(random_target):
    """One request at a time, nothing cached."""
    return LLM(random_target, max_num_seqs=1, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def plain(alone, prompts):
    return {temperature: run(alone, prompts, temperature) for temperature in (0.0, 0.8)}


def tokens_of(found):
    return [one[0] for one in found]


def check_entry(entry, token, row, count):
    """A {token: Logprob} against the log-probabilities of all tokens, row [V]."""
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    assert list(entry) == list(dict.fromkeys([token, *order[:count]])), "the own token first, then the likeliest"
    for candidate, logprob in entry.items():
        assert logprob.logprob == pytest.approx(row[candidate], abs=1e-4)
        assert logprob.rank == order.index(candidate) + 1


@pytest.mark.parametrize("count", [0, 1, 5, 70, 100])
def test_entries_hold_the_own_token_and_the_likeliest(alone, random_target, prompts, count):
    """Against transformers' logits; 70 is more than one kernel ranks, 100 more than there are tokens."""
    prompt = prompts[2]
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=5, logprobs=count, prompt_logprobs=count)
    (output,) = alone.generate([prompt], params)
    ids = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        rows = random_target(torch.tensor([ids])).logits[0].log_softmax(-1).tolist()
    assert output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs + output.outputs[0].logprobs
    assert len(entries) == len(ids)
    for position in range(1, len(ids)):
        check_entry(entries[position], ids[position], rows[position - 1], count)
    emitted = zip(output.outputs[0].logprobs, output.outputs[0].token_ids)
    assert output.outputs[0].cumulative_logprob == sum(entry[token].logprob for entry, token in emitted)


def test_nothing_is_returned_that_was_not_asked_for(alone):
    (output,) = alone.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    (output,) = alone.generate([[1, 2, 3]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert [None if entry is None else list(entry) for entry in output.prompt_logprobs] == [None, [2], [3]]
    assert output.outputs[0].logprobs is None


def test_requests_that_ask_for_different_counts_share_a_batch(random_target, prompts, plain):
    llm = LLM(random_target, max_num_seqs=8)
    counts = [None, 3, 0, 1, None, 3, 2]
    params = [
        SamplingParams(seed=i, temperature=0.8, max_tokens=24, logprobs=count, prompt_logprobs=count)
        for i, count in enumerate(counts)
    ]
    for output, count, (tokens, logprobs, total, prompt) in zip(llm.generate(prompts, params), counts, plain[0.8]):
        assert output.outputs[0].token_ids == tokens
        found = output.outputs[0].logprobs
        if count is None:
            assert found is None
            assert output.prompt_logprobs is None
            continue
        assert output.outputs[0].cumulative_logprob == total
        for entry, token, longest in zip(found, tokens, logprobs):
            assert entry == {t: e for t, e in longest.items() if t == token or e.rank <= count}
        if count == 2:
            assert output.prompt_logprobs == prompt


def test_prompt_tokens_have_the_logprobs_they_were_emitted_with(alone, prompts, plain):
    """The prompt pass and the decode pass are different code; with the output as part of the prompt both score the same tokens."""
    longer = [prompt + found[0] for prompt, found in zip(prompts, plain[0.8])]
    again = run(alone, longer, max_tokens=1, prompt_logprobs=3)
    for prompt, before, after in zip(prompts, plain[0.8], again):
        assert after[3][len(prompt) :] == before[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [chain(1), chain(4), RAGGED], ids=["chain-1", "chain-4", "tree"])
def test_speculation_changes_no_logprob(random_target, prompts, plain, speculate, tree, temperature):
    expected = plain[temperature]
    llm = speculate(random_target, tree, tokens_of(expected), prompts, options=dict(max_num_seqs=4))
    assert run(llm, prompts, temperature) == expected
    assert all(llm.engine.metrics.spec_decode.accepted_per_position)
    llm.engine.check()


def test_chunks_slices_and_company_change_no_prompt_logprob(random_target, prompts, plain, monkeypatch):
    monkeypatch.setattr(module, "SCORED_ROWS", 7)
    llm = LLM(random_target, max_num_seqs=5, max_num_batched_tokens=23)
    logits, most = llm.engine.decoder.logits, []

    def counted(hidden, *given):
        most.append(len(hidden))
        return logits(hidden, *given)

    monkeypatch.setattr(llm.engine.decoder, "logits", counted)
    assert run(llm, prompts) == plain[0.8]
    assert max(most) == 7, "no more rows over the vocabulary at once"


def test_cached_prefixes_lose_no_position(random_target, prompts, plain):
    llm = LLM(random_target, max_num_seqs=4)
    for _ in range(2):
        assert run(llm, prompts) == plain[0.8]
    assert llm.get_stats()["num_prompt_tokens"] == 2 * sum(LENGTHS), "prompts are computed again"
    # Requests without prompt logprobs find the pages that the others left.
    assert [one[:3] for one in run(llm, prompts, prompt_logprobs=None)] == [one[:3] for one in plain[0.8]]
    llm.engine.check()
    reused = 3 * sum(LENGTHS) - llm.get_stats()["num_prompt_tokens"]
    assert reused == 64 * sum((length - 1) // 64 for length in LENGTHS)


def test_equality_breaks_if_cached_prefixes_are_used(random_target, prompts, monkeypatch):
    monkeypatch.setattr(Request, "num_skippable", property(lambda request: request.num_known - 1))
    llm = LLM(random_target, max_num_seqs=4)
    run(llm, prompts)
    with pytest.raises(AssertionError, match="never scored"):
        run(llm, prompts)


def interrupted(target, prompts, expected, speculate):
    """Small chunks, steps read late, and every third step the youngest request is preempted, each twice at most.

    ->  (outputs, what they were doing: status, prompt logprobs read, prompt tokens, tokens computed)
    """
    options = dict(max_num_seqs=3)
    llm = speculate(target, RAGGED, tokens_of(expected), prompts, options=options, max_num_batched_tokens=23)
    llm.engine.steps_late = 1
    scheduler, seen, calls = llm.engine.scheduler, [], []
    schedule = scheduler.schedule

    def preempting(*given):
        calls.append(1)
        youngest = scheduler.active[-1] if len(scheduler.active) > 1 else None
        if youngest is not None and len(calls) % 3 == 0 and youngest.epoch < 2:
            one = youngest
            seen.append((one.status, 1 + len(one.prompt_logprobs), len(one.prompt_token_ids), one.committed))
            scheduler._preempt(one, ScheduledStep())
        return schedule(*given)

    scheduler.schedule = preempting
    outputs = run(llm, prompts)
    scheduler.check()
    return outputs, seen


def test_preemption_loses_no_prompt_logprob_and_repeats_none(random_target, prompts, plain, speculate):
    outputs, seen = interrupted(random_target, prompts, plain[0.8], speculate)
    assert outputs == plain[0.8]
    prefilling = [rest for status, *rest in seen if status is Status.PREFILLING]
    assert any(1 < read < length for read, length, _ in prefilling), seen
    assert any(read - 1 < computed for read, _, computed in prefilling), "some must have lost a part not read yet"
    assert any(status is Status.RUNNING and read == length for status, read, length, _ in seen), seen


def test_equality_breaks_if_parts_are_appended_whatever_happened(random_target, prompts, plain, speculate, monkeypatch):
    def appended(self):
        count = self.request.params.prompt_logprobs
        self.request.prompt_logprobs.extend(self.gathered, 0, len(self.gathered.rank), count)

    monkeypatch.setattr(module.PromptPart, "deliver", appended)
    assert interrupted(random_target, prompts, plain[0.8], speculate)[0] != plain[0.8]


def test_only_the_first_of_several_outputs_computes_the_prompt(random_target, prompts, plain):
    llm = LLM(random_target, max_num_seqs=4)
    params = SamplingParams(n=3, seed=6, temperature=0.8, **PARAMS)
    (output,) = llm.generate([prompts[6]], params)
    assert output.prompt_logprobs == plain[0.8][6][3]
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == plain[0.8][6][:2]
    assert all(len(one.logprobs) == 24 for one in output.outputs)
    assert llm.get_stats()["num_prompt_tokens"] == 190 + 2 * (190 - 128)


def test_streams_return_the_same_logprobs(random_target, prompts, plain, speculate):
    llm = speculate(random_target, RAGGED, tokens_of(plain[0.8]), prompts)
    stream, output = llm.stream(prompts[3], SamplingParams(seed=3, temperature=0.8, **PARAMS)), None
    while output is None:
        try:
            next(stream)
        except StopIteration as end:
            output = end.value
    found = (output.outputs[0].token_ids, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob)
    assert (*found, output.prompt_logprobs) == plain[0.8][3]


def test_equality_breaks_if_the_path_is_ignored(random_target, prompts, plain, speculate, monkeypatch):
    hand_over = engine_module.hand_over

    def by_depth(*given, path=None, **more):
        return hand_over(*given, **more)

    monkeypatch.setattr(engine_module, "hand_over", by_depth)
    llm = speculate(random_target, RAGGED, tokens_of(plain[0.8]), prompts)
    found = run(llm, prompts)
    assert tokens_of(found) == tokens_of(plain[0.8])
    assert found != plain[0.8]


class Interrupted(module.GatheredLogprobs):
    """An interrupt comes when its `name` is asked for."""

    def __init__(self, gathered, name):
        super().__init__(gathered.rank, gathered.ids, gathered.logprobs)
        object.__setattr__(self, "name", name)

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "name"):
            raise KeyboardInterrupt
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("name", ["ids", "logprobs", "rank"])
def test_an_interrupt_leaves_numbers_that_can_be_cut_and_continued(name):
    rows = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    gathered = module.gather_logprobs(rows, torch.arange(5), 6).on_host(lambda x: x)
    whole, broken = module.TokenLogprobs(), module.TokenLogprobs()
    whole.extend(gathered, 0, 5, 4)
    broken.extend(gathered, 0, 2, 4)
    with pytest.raises(KeyboardInterrupt):
        broken.extend(Interrupted(gathered, name), 2, 5, 4)
    assert len(broken) == 2
    broken.cut(2)
    broken.extend(gathered, 2, 5, 4)
    assert (len(broken), broken.entries()) == (5, whole.entries())
    assert broken.own() == [entry[token].logprob for token, entry in enumerate(whole.entries())]
    for start in range(6):
        told = pickle.loads(pickle.dumps(broken.after(start)))
        assert (len(told), told.entries()) == (5 - start, whole.entries()[start:])


def test_an_output_that_ends_without_a_token_has_no_entries(random_target, prompts):
    llm = LLM(random_target, max_num_seqs=4)
    call = Call()
    submission = llm.session.submit(prompts[3], SamplingParams(**PARAMS), call)
    llm.session.leave(call)
    output = llm.session.output(submission)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob, output.prompt_logprobs) == (
        [],
        0.0,
        [None],
    )


def test_an_output_that_grows_is_nothing_for_the_garbage_collector(random_target, prompts):
    llm, made = LLM(random_target, max_num_seqs=4), []
    for length in (4, 200):
        call = Call()
        asked = SamplingParams(max_tokens=length, temperature=0.0, logprobs=20, ignore_eos=True)
        submissions = [llm.session.submit(prompt, asked, call) for prompt in prompts[:4]]
        llm.session.drive(call, lambda _, call=call: len(call.ended) == 4)
        gc.collect()
        made.append(len(gc.get_objects()))
        assert all(len(one.requests[0].logprobs) == length for one in submissions)
    assert made[1] - made[0] < 500, "a dict or a Logprob per token or more"


# --- processed ---

PROCESSED = dict(logprobs_mode="processed_logprobs")
LAWS = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=0.6),
    "filters": dict(temperature=0.9, top_k=7, top_p=0.8),
    "min_tokens": dict(temperature=0.7, min_tokens=6, stop_token_ids=[3, 4, 5]),
}


@pytest.mark.parametrize("distribution", LAWS)
def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from(random_target, prompts, distribution):
    params = LAWS[distribution]
    llm = LLM(random_target, max_num_seqs=1, **PROCESSED)
    (output,) = llm.generate(
        [prompts[2]], SamplingParams(seed=1, max_tokens=10, logprobs=12, prompt_logprobs=1, **params)
    )
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    with torch.no_grad():
        rows = random_target(torch.tensor([prompts[2] + tokens])).logits[0].double()
    second = prompts[2][1]
    raw = rows[0].log_softmax(-1)[second].item()
    assert output.prompt_logprobs[1][second].logprob == pytest.approx(raw, abs=1e-4), "prompt logprobs are raw"
    for i, (token, entry) in enumerate(zip(tokens, entries)):
        row = rows[len(prompts[2]) - 1 + i] / (params["temperature"] or 1)
        if i < params.get("min_tokens", 0):
            row[params["stop_token_ids"]] = -torch.inf
        if "top_k" in params:
            order = row.argsort(descending=True)
            row[order[7:]] = -torch.inf
            share = row[order].softmax(-1)
            row[order[share.cumsum(-1) - share >= 0.8]] = -torch.inf
        row = row.log_softmax(-1)
        assert entry[token].logprob > -float("inf")
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
        assert sum(e.logprob == -float("inf") for e in entry.values()) == max(12 - int((row > -torch.inf).sum()), 0)


def mixed(llm, prompts):
    """Requests with all kinds of filters in one batch: those without filters share steps with those that have some."""
    asked = [
        SamplingParams(seed=i, max_tokens=24, logprobs=3, **list(LAWS.values())[i % len(LAWS)])
        for i in range(len(prompts))
    ]
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, asked)]


@pytest.mark.parametrize("tree", [chain(4), RAGGED], ids=["chain", "tree"])
def test_speculation_and_company_change_no_processed_logprob(random_target, prompts, speculate, tree):
    expected = mixed(LLM(random_target, max_num_seqs=1, **PROCESSED), prompts)
    assert mixed(LLM(random_target, max_num_seqs=8, **PROCESSED), prompts) == expected
    llm = speculate(random_target, tree, tokens_of(expected), prompts, **PROCESSED)
    assert mixed(llm, prompts) == expected
    raw = mixed(LLM(random_target, max_num_seqs=8), prompts)
    assert tokens_of(raw) == tokens_of(expected)
    assert [a[1] == b[1] for a, b in zip(raw, expected)] == [i % len(LAWS) == 0 for i in range(len(prompts))]


def test_rows_without_filters_have_the_same_scores_in_all_variants(random_target):
    """TargetScores computes scores in three ways, and the other requests of the batch decide which."""
    llm = LLM(random_target, max_num_seqs=4)
    llm.engine.seats.floats[:, 0] = torch.tensor([0.0, 0.3, 1.0, 1.7, 0.0])
    llm.engine.seats.floats[:, 1] = 1.0
    batch = llm.engine.seats.gather(torch.arange(4), torch.arange(3))
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, 3], logits[:, 5], logits[:, 7] = -0.0, torch.nan, -torch.inf
    scores = torch.full((3, 12, VOCAB), torch.nan)
    for filters in (NO_FILTERS, CHANGED, CUT):
        TargetScores(batch, logits, filters, llm.engine.seats, processed=scores[filters]).sample()
    for other in scores[1:]:
        assert torch.equal(scores[0].view(torch.int32), other.view(torch.int32))


def test_other_modes_and_bad_counts_are_refused(random_target):
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw_logprobs, processed_logprobs, got 'raw'"):
        LLM(random_target, logprobs_mode="raw")
    for bad in (-2, True, 2.0):
        with pytest.raises(ValueError, match="prompt_logprobs must be None, -1 for all tokens, or at least 0"):
            SamplingParams(prompt_logprobs=bad)
    with pytest.raises(ValueError, match="include_stop_str_in_output must be True or False, got 1"):
        SamplingParams(include_stop_str_in_output=1)
