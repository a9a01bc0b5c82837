"""Prompt lookup in the engine: no bit is changed, its drafts are those of the sequence as it stands, and some are accepted."""

import random
from pathlib import Path

import pytest
import torch

from headstart.inference.engine.engine import Engine
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.drafters.ngram import NgramDrafter
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tree import ROOT_ONLY, Tree, chain
from headstart.inference.speculation.verifiers import Ratio, Strict
from headstart.tests.inference.engine.test_exactness import VOCAB, make_target
from headstart.tests.kernels.speculation.test_prompt_lookup import look_up

SHORTEST, LONGEST, DEPTH = 1, 3, 4
TARGET = str(Path(__file__).resolve().parents[3] / "assets" / "stdlib-coder")
PAGES = dict(max_num_seqs=8, num_gpu_blocks_override=4)  # alone every request fits, all together do not

STRICT = Strict()


class Watched(NgramDrafter):
    """Keeps what it proposed: (seed, committed length, tokens)."""

    def __init__(self, *given):
        super().__init__(*given)
        self.proposed = []

    def copied(self, batch, num_drafted):
        found = super().copied(batch, num_drafted)
        self.proposed += zip(batch.seed.tolist(), batch.committed.tolist(), found.tolist())
        return found


def looking_up(target, rule=STRICT, late=None, **options):
    llm = LLM(target, **options)
    decoder, tree = llm.engine.decoder, chain(DEPTH)
    drafter = Watched(tree, SHORTEST, LONGEST)
    llm.session.engine = Engine.build(decoder, llm.eos_token_ids, llm.engine.options, Speculation(drafter, tree, rule))
    if late is not None:
        llm.engine.steps_late = late
    return llm


def repetitive(lengths, seed=1):
    """Prompts that say a few tokens again and again."""
    generator = random.Random(seed)
    for length in lengths:
        phrase = [generator.randrange(VOCAB) for _ in range(generator.randrange(2, 7))]
        yield (phrase * length)[:length]


def run(llm, prompts, temperature):
    # Few tokens are allowed, so that what is drawn at random repeats itself too.
    params = [
        SamplingParams(seed=i, temperature=temperature, max_tokens=24, logprobs=2, allowed_token_ids=[3, 5, 8, 70])
        for i in range(len(prompts))
    ]
    return [(x.outputs[0].token_ids, x.outputs[0].logprobs) for x in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def plain(target):
    prompts = list(repetitive((2, 15, 17, 40, 63, 64, 65, 100, 130)))
    one = LLM(target, max_num_seqs=1, enable_prefix_caching=False)
    return prompts, {t: run(one, prompts, t) for t in (0.0, 0.8)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("late", "options"), [(0, dict(max_num_seqs=1)), (0, dict(max_num_seqs=8)), (0, PAGES), (1, PAGES)]
)
def test_no_bit_is_changed_and_drafts_are_of_the_sequence_as_it_stands(target, plain, temperature, late, options):
    prompts, expected = plain[0], plain[1][temperature]
    llm = looking_up(target, late=late, **options)
    assert run(llm, prompts, temperature) == expected
    metrics = llm.get_stats()
    assert metrics["acceptance_length"] > 1.3
    assert (metrics["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)
    sequences = [prompt + tokens for prompt, (tokens, _) in zip(prompts, expected)]
    proposed = [
        x for x in llm.engine.drafter.proposed if x[1] < len(sequences[x[0]])
    ]  # a late step looks beyond the end
    assert len(proposed) > 100
    for seed, committed, tokens in proposed:
        assert tokens == look_up(sequences[seed][: committed + 1], SHORTEST, LONGEST, DEPTH)


def test_repetitive_prompts_of_every_token_are_drafted_too(target):
    prompts = list(repetitive([30] * 6))
    params = [SamplingParams(seed=i, temperature=0.0, max_tokens=60) for i in range(6)]
    llm = looking_up(target)
    found, expected = ([x.outputs[0].token_ids for x in one.generate(prompts, params)] for one in (llm, LLM(target)))
    assert found == expected
    assert llm.engine.metrics.spec_decode.num_accepted_tokens > 10


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [STRICT, Ratio("token"), Ratio("block")])
def test_on_the_gpu_too_in_graphs(rule):
    plain = LLM(TARGET, device="cuda")
    prompts = [[i, 700 + i, 41, 9] * 40 for i in range(60, 72)]
    for given in (
        dict(temperature=0.0),
        dict(temperature=0.8),
        dict(temperature=0.8, top_k=20, repetition_penalty=1.1),
    ):
        params = [SamplingParams(seed=i, max_tokens=50, ignore_eos=True, **given) for i in range(len(prompts))]
        llm = LLM(plain)
        drafter = NgramDrafter(chain(DEPTH), SHORTEST, LONGEST)
        decoder = llm.engine.decoder
        speculation = Speculation(drafter, chain(DEPTH), rule)
        llm.session.engine = Engine.build(decoder, llm.eos_token_ids, llm.engine.options, speculation)
        found = [x.outputs[0].token_ids for x in llm.generate(prompts, params)]
        assert llm.engine.metrics.spec_decode.num_accepted_tokens > 10
        if rule is STRICT or given["temperature"] == 0:
            assert found == [x.outputs[0].token_ids for x in plain.generate(prompts, params)]
        else:
            assert found == [x.outputs[0].token_ids for x in llm.generate(prompts, params)]


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal"])
def test_the_ratio_rules_follow_it_without_a_distribution(target, plain, rule):
    llm = looking_up(target, Ratio(rule))
    expected = [tokens for tokens, _ in plain[1][0.0]]
    assert [tokens for tokens, _ in run(llm, plain[0], 0.0)] == expected
    assert llm.get_stats()["acceptance_length"] > 1.3
    mixed = run(looking_up(target, Ratio(rule)), plain[0], 0.8)
    again = run(looking_up(target, Ratio(rule), max_num_seqs=3), plain[0], 0.8)
    assert mixed == again
    # The distribution that nothing was drawn from plays no part: with others, the same bits.
    drafter = llm.engine.drafter
    told = drafter.propose

    def with_distributions(batch, tree, processor=None):
        draft = told(batch, tree, processor)
        distributions = torch.randn(
            2, len(batch.seats), VOCAB, generator=torch.Generator().manual_seed(len(drafter.proposed))
        )
        return draft._replace(
            scores=distributions, temperature=torch.ones(len(batch.seats)), distribution=tree.depths % 2
        )

    drafter.propose = with_distributions
    assert run(llm, plain[0], 0.8) == mixed


def test_candidates_stand_in_the_first_place(target):
    llm = looking_up(target)
    seats = llm.engine.seats
    seats.history[2, :6] = torch.tensor([1, 2, 3, 4, 1, 2])
    seats.integers[2, :2] = torch.tensor([5, 2])
    batch = seats.gather(torch.tensor([2]), llm.engine.tree.depths)
    assert llm.engine.drafter.candidates(batch, [2, 2, 1]).tolist() == [[[3, -1], [4, -1], [1, -1]]]
    assert llm.engine.drafter.propose(batch, llm.engine.tree).tokens.tolist() == [[2, 3, 4, 1, 2]]


def test_what_it_cannot_draft_is_refused():
    for tree in (ROOT_ONLY, Tree((-1, 0, 0), (0, 0, 1)), Tree((-1, 0), (0, 1))):
        with pytest.raises(ValueError, match="drafts a chain"):
            NgramDrafter(tree, 1, 2)
    for shortest, longest in ((0, 2), (3, 2), (1.0, 2), (True, 2), (None, 2)):
        with pytest.raises(ValueError, match=f"got {shortest!r} and {longest!r}"):
            NgramDrafter(chain(2), shortest, longest)
