"""Block drafters in the engine: a head whose drafts are accepted changes no bit, whatever happens to its requests.

That its drafts are the head's own predictions: test_draft_matrix.py. Random heads, trees: test_drafters.py.
"""

import pytest
import torch

from headstart.heads.block import BlockConfig, BlockHead
from headstart.heads.checkpoint import save_head
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.options import SpeculativeOptions
from headstart.tests.inference.speculation.small_drafters import DEVICES, VOCAB, llama

DEPTH, LENGTHS = 4, (3, 14, 50, 52, 64, 130)  # of the prompts: below, at and across tiles and pages
TEMPERATURES = (0.0, 0.8, 1.3)
MAX_TOKENS = 16
# Accepted tokens at each temperature, then at the first one on pages that were found: there almost all of two requests.
LEAST = (20, 1, 1, 20)


def prompts_and_params(temperature):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    common = dict(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    return prompts, [SamplingParams(seed=i, **common) for i in range(len(prompts))]


def outputs(llm, temperature):
    found = [one.outputs[0] for one in llm.generate(*prompts_and_params(temperature))]
    return [(one.token_ids, one.logprobs) for one in found]


def taught(target, texts):
    """A head that has learnt a few texts by heart."""
    torch.manual_seed(3)
    shape = dict(num_hidden_layers=1, mask_token_id=5, aux_layer_ids=(1, 3), num_speculative_tokens=DEPTH)
    head = BlockHead(BlockConfig.for_target(target.config, **shape))
    head.take_embedding(target.model.embed_tokens.weight)
    learns = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learns, lr=0.01)
    rows = []
    for ids in (torch.tensor([text]) for text in texts):
        streams = target.model(ids, output_hidden_states=True).hidden_states
        positions = torch.arange(ids.shape[1])[None]
        rows.append((torch.cat([streams[i] for i in head.features], -1), ids, positions, torch.zeros_like(positions)))
    for _ in range(30):
        loss = 0
        for packed in rows:
            predicted = head.predict(*packed, target.lm_head.weight)
            for depth, state in enumerate(predicted.states):
                labels = packed[1][0, 2 + depth :]
                loss += torch.nn.functional.cross_entropy(predicted.logits(state[: len(labels)], depth), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


@pytest.fixture(scope="module", params=DEVICES)
def setting(request):
    """(target, a head taught the greedy outputs of two requests, {temperature: plain outputs})"""
    target = llama().requires_grad_(False)
    plain = LLM(target, max_num_seqs=1)
    texts = [prompt + found[0] for prompt, found in zip(prompts_and_params(0.0)[0][:2], outputs(plain, 0.0))]
    head = taught(target, texts)
    target, head = target.to(request.param), head.to(request.param)
    plain = LLM(target, max_num_seqs=1)
    return target, head, {temperature: outputs(plain, temperature) for temperature in TEMPERATURES}


@pytest.mark.parametrize("batch", [1, 6])
def test_accepted_drafts_change_no_bit(setting, batch):
    target, head, plain = setting
    speculative = {"model": head, "num_speculative_tokens": DEPTH}
    llm = LLM(target, max_num_seqs=batch, max_num_batched_tokens=48, speculative_config=speculative)
    for temperature, least in zip((*TEMPERATURES, 0.0), LEAST):
        before = llm.get_stats()["num_accepted_tokens"]
        assert outputs(llm, temperature) == plain[temperature], temperature
        assert llm.get_stats()["num_accepted_tokens"] - before >= least, temperature
        llm.engine.check()
    assert llm.get_stats()["prefix_cache_hits"] > 0


def test_pages_that_run_out_change_no_bit(setting):
    target, head, plain = setting
    speculative = {"model": head, "num_speculative_tokens": DEPTH}
    sizes = dict(max_model_len=200, num_gpu_blocks_override=9)
    llm = LLM(target, max_num_seqs=6, speculative_config=speculative, **sizes)
    for temperature in TEMPERATURES:
        assert outputs(llm, temperature) == plain[temperature], temperature
    assert llm.get_stats()["num_preemptions"] > 0
    llm.engine.check()


@pytest.mark.parametrize("depth", [1, 3])
def test_shorter_drafts_are_the_beginnings_of_whole_ones(setting, depth):
    """The pass holds the head's whole block, however many of its tokens are drafted."""
    target, head, plain = setting
    drafted = []
    for tokens in (depth, DEPTH):
        llm = LLM(
            target,
            max_num_seqs=1,
            enforce_eager=True,
            speculative_config={"model": head, "num_speculative_tokens": tokens},
        )
        propose, seen = llm.engine.drafter.propose, []

        def keep(batch, tree, processor=None, propose=propose, seen=seen):
            draft = propose(batch, tree, processor)
            seen.append(draft.tokens[0].tolist())
            return draft

        llm.engine.drafter.propose = keep
        prompts, params = prompts_and_params(0.0)
        [found] = llm.generate(prompts[:1], params[:1])
        assert found.outputs[0].token_ids == plain[0.0][0][0]
        drafted.append(seen[0])
    assert drafted[0] == drafted[1][: 1 + depth]


def test_a_block_longer_than_any_tree_drafts_up_to_the_last_position(setting):
    target, _, _ = setting
    shape = dict(num_hidden_layers=1, mask_token_id=5, aux_layer_ids=(1,), num_speculative_tokens=80)
    head = BlockHead(BlockConfig.for_target(target.config, **shape))
    head.take_embedding(target.model.embed_tokens.weight)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    found = []
    for speculative in ({"model": head.to(target.device), "num_speculative_tokens": 3}, None):
        llm = LLM(target, max_num_seqs=1, max_model_len=128, speculative_config=speculative)
        found.append(llm.generate([[1] * 121], [params])[0].outputs[0].token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == 7


def test_adaptive_depths_and_a_rule_that_compares_distributions(setting):
    target, head, plain = setting
    adaptive = LLM(target, speculative_config={"model": head, "adaptive": True})
    assert outputs(adaptive, 0.8) == plain[0.8]
    ratio = LLM(target, speculative_config={"model": head, "verifier": "block"})
    assert [tokens for tokens, _ in outputs(ratio, 0.0)] == [tokens for tokens, _ in plain[0.0]]


def test_a_head_is_served_from_its_files(setting, tmp_path):
    target, head, plain = setting
    save_head(head, tmp_path / "head")
    llm = LLM(target, speculative_config={"model": str(tmp_path / "head"), "method": "block"})
    assert llm.tree.max_depth == DEPTH
    assert outputs(llm, 0.8) == plain[0.8]
    for asked, message in (
        (dict(num_speculative_tokens=DEPTH + 1), "from 1 to the head's 4, got 5"),
        (dict(tree="dynamic"), "DFlash heads do not look at each other's tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(target, speculative_config={"model": head} | asked)


def test_vllm_s_name_of_the_method_is_taken():
    assert SpeculativeOptions.parse({"model": "some/head", "method": "dflash"}).method == "block"
