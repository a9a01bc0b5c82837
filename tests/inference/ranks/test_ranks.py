"""Ranks that divide a model: the bits of plain decoding with every kind of drafter, and of one process where that is asked for."""

import os
import signal

import pytest
import torch

from headstart.inference.engine.engine import Engine
from headstart.inference.llm import LLM
from headstart.inference.open_batch import OpenBatch
from headstart.inference.ranks.processes import RanksEnded
from headstart.inference.sampling_params import SamplingParams, StructuredOutputsParams
from headstart.inference.speculation.drafters.sequential import SequentialDrafter
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.tests.inference.speculation.small_drafters import DEPTH, VOCAB, llama, make

pytestmark = pytest.mark.filterwarnings("ignore:with tensor_parallel_size")
LENGTHS = (1, 63, 130, 2, 17)


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def parameters():
    """Greedy and sampled, with filters and penalties, log-probabilities, two outputs of a prompt."""
    common = dict(max_tokens=12, logprobs=2)
    return [
        SamplingParams(temperature=0, prompt_logprobs=1, **common),
        SamplingParams(temperature=1.0, seed=5, **common),
        SamplingParams(temperature=0.8, seed=6, top_k=20, top_p=0.9, repetition_penalty=1.2, **common),
        SamplingParams(temperature=1.3, seed=7, n=2, **common),
        SamplingParams(temperature=0, min_tokens=3, logit_bias={5: 2.0}, **common),
    ]


def bits(outputs):
    """Tokens, and log-probabilities of them and of the prompts, for equality."""
    return [
        (output.prompt_logprobs, [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs])
        for output in outputs
    ]


def outputs_of(llm):
    return bits(llm.generate(prompts(), parameters()))


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_gives_the_bits_of_one_with_the_same_ranges(divided_folder, forked_llm, size):
    one = forked_llm(divided_folder, 1, tensor_parallel_invariant=4)
    expected = outputs_of(one)
    llm = forked_llm(divided_folder, size, tensor_parallel_invariant=4)
    assert outputs_of(llm) == expected
    # What they computed is used again, after another prompt, too.
    again = prompts()[2], parameters()[1]
    assert bits(llm.generate(*again)) == bits(one.generate(*again))
    assert llm.get_stats()["prefix_cache_hits"] == one.get_stats()["prefix_cache_hits"] > 0


def speculations():
    target = llama()
    yield "medusa", 2, dict(model=make("medusa", target), tree="chain")
    yield "eagle", 2, dict(model=make("eagle", target), tree="dynamic")
    yield "eagle3", 4, dict(model=make("eagle3", target), tree="dynamic")
    yield "block", 2, dict(model=make("block", target), tree="chain")
    yield "block with an edge and a window", 2, dict(model=make("block-sliding", target), tree="chain")
    yield "block with an edge, grown", 4, dict(model=make("block-edge", target), tree="dynamic")
    yield "block, adaptive by its confidence", 2, dict(model=make("block-sure", target), adaptive=True)
    yield "mlp", 2, dict(model=make("mlp", target), tree="chain")
    yield "ngram, adaptive", 4, dict(method="ngram", num_speculative_tokens=DEPTH, adaptive=True)
    yield "the target itself", 2, dict(method="draft_model", num_speculative_tokens=DEPTH)


@pytest.mark.parametrize(
    ("name", "size", "config"), list(speculations()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_speculation_changes_no_bit_on_ranks(divided_folder, forked_llm, plain_outputs, name, size, config):
    if name == "the target itself":
        config = config | dict(model=str(divided_folder))
    llm = forked_llm(divided_folder, size, max_num_seqs=3, speculative_config=config)
    assert outputs_of(llm) == plain_outputs(size)
    stats = llm.get_stats()
    assert stats["num_draft_tokens"] > 0
    if name == "the target itself":
        assert stats["num_accepted_tokens"] > 0.9 * stats["num_draft_tokens"]


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_ranks_that_draft_other_tokens_and_trees_change_no_bit(
    divided_folder, forked_llm, plain_outputs, monkeypatch, tree
):
    """Rank 1 drafts the next tokens of the vocabulary instead of rank 0's; in a tree of its own, all below the root."""
    owner, usual = os.getpid(), SequentialDrafter.propose

    def propose(*given):
        draft = usual(*given)
        if os.getpid() == owner:
            return draft
        tokens = (draft.tokens + 1) % VOCAB
        tokens[:, 0] = draft.tokens[:, 0]
        if draft.tree.tree.grows:
            parents, node = torch.zeros_like(draft.tree.parents), torch.arange(tokens.shape[1])
            ancestors = node[:, None].repeat(1, draft.tree.ancestors.shape[2])
            ancestors[:, 0] = 0
            depths, ancestors = (
                x.expand_as(y) for x, y in ((node.clamp(max=1), parents), (ancestors, draft.tree.ancestors))
            )
            draft = draft._replace(tree=TreeOnDevice(draft.tree.tree, depths, parents, ancestors))
        return draft._replace(tokens=tokens)

    monkeypatch.setattr(SequentialDrafter, "propose", propose)
    config = dict(model=make("eagle3", llama()), tree=tree)
    llm = forked_llm(divided_folder, 2, max_num_seqs=3, speculative_config=config)
    assert outputs_of(llm) == plain_outputs(2)
    assert llm.get_stats()["num_accepted_tokens"] > 0


@pytest.fixture
def plain_outputs(divided_folder, forked_llm):
    """plain_outputs(size) -> the outputs of plain decoding on so many ranks."""

    def outputs(size):
        if size not in PLAIN:
            PLAIN[size] = outputs_of(forked_llm(divided_folder, size))
        return PLAIN[size]

    return outputs


PLAIN = {}


def test_requests_that_come_and_go_leave_the_ranks_in_step(divided_folder, forked_llm):
    """Requests join and leave a batch whose cache is too small for all, and others give the prefix cache up."""
    spec = dict(method="ngram", num_speculative_tokens=3, adaptive=True)
    small = dict(num_gpu_blocks_override=5, max_model_len=220, max_num_seqs=4, speculative_config=spec)
    llm = forked_llm(divided_folder, 2, tensor_parallel_invariant=2, **small)
    one = LLM(divided_folder, device="cpu", dtype="float32", tensor_parallel_invariant=2)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=50, ignore_eos=True)
    found = {}
    with OpenBatch(llm) as batch:
        for number, prompt in enumerate(prompts()):
            batch.add(prompt, params, number)
            batch.step()
            if number == 2:
                with OpenBatch(llm) as dropped:
                    dropped.add([4, 5, 6], params)
                    dropped.step()
        while batch:
            found |= {tag: output.outputs[0].token_ids for tag, output in batch.step()}
    assert llm.get_stats()["num_preemptions"] > 0
    assert llm.reset_prefix_cache()
    expected = [one.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts()]
    assert [found[number] for number in range(len(LENGTHS))] == expected
    assert llm.generate(prompts()[1], params)[0].outputs[0].token_ids == expected[1]
    llm.engine.check()


def test_texts_stop_strings_and_grammars_on_ranks(target_folder, forked_llm):
    params = [
        SamplingParams(max_tokens=20, temperature=1, seed=3, stop=["e"]),
        SamplingParams(
            max_tokens=20, temperature=1, seed=4, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        ),
    ]
    texts = []
    for size in (1, 2):
        llm = forked_llm(target_folder, size, tensor_parallel_invariant=2)
        outputs = llm.generate(["def f(", "a"], params)
        texts.append([(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs])
        pieces = list(llm.stream("abc", SamplingParams(max_tokens=5, temperature=1, seed=1)))
        texts[-1].append("".join(pieces))
    assert texts[0] == texts[1]
    assert texts[0][1][0] in ("yes", "no")


def test_candidates_are_recorded_on_rank_0_as_in_one_process(divided_folder, forked_llm):
    found = []
    for size in (1, 2):
        spec = dict(model=make("eagle", llama()), tree="chain")
        llm = forked_llm(divided_folder, size, tensor_parallel_invariant=2, speculative_config=spec)
        with llm.engine.recording() as recorded:
            outputs = bits(llm.generate(prompts()[1], SamplingParams(max_tokens=6, temperature=0)))
        found.append((outputs, [(place, candidates) for _, place, candidates in recorded]))
        assert bits(llm.generate(prompts()[1], SamplingParams(max_tokens=6, temperature=0))) == outputs
    assert found[0] == found[1]
    assert len(found[0][1]) > 1


def test_a_request_that_cannot_fit_is_refused_and_the_ranks_go_on(divided_folder, forked_llm):
    llm = forked_llm(divided_folder, 2, num_gpu_blocks_override=4, max_model_len=400)
    with pytest.raises(ValueError, match="the cache holds 4"):
        llm.generate([1] * 390, SamplingParams(max_tokens=200))
    assert llm.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests were started in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_waits_for_the_end_of_a_step_and_the_ranks_go_on(divided_folder, forked_llm, monkeypatch):
    llm = forked_llm(divided_folder, 2)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    expected = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    step, after = Engine.step, []

    def interrupted(engine):
        signal.raise_signal(signal.SIGINT)
        after.append(step(engine))
        return after[-1]

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], params)
    monkeypatch.undo()
    assert len(after) == 1
    assert llm.generate([1, 2, 3], params)[0].outputs[0].token_ids == expected
    assert not llm.engine.scheduler.has_unfinished


def test_an_error_in_a_step_ends_the_ranks(divided_folder, forked_llm, monkeypatch):
    llm = forked_llm(divided_folder, 2)
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(RanksEnded, match="build it anew"):
        llm.generate([1, 2], SamplingParams(max_tokens=2))
