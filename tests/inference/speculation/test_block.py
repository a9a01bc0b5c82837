"""Block drafters in the engine: a head whose drafts are accepted changes no bit, whatever happens to its requests.

That its drafts are the head's own predictions: test_draft_matrix.py. Random heads, trees: test_drafters.py.
"""

import pytest
import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import save_head
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.options import SpeculativeOptions
from headstart.inference.speculation.tree import GrowingTree, build_static_tree, save_tree
from headstart.tests.inference.speculation.small_drafters import DEVICES, VOCAB, llama
from headstart.tests.inference.speculation.taught_block import GROWING, bits_of, many_requests

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


def taught(target, texts, **changes):
    """A head that has learnt a few texts by heart.  changes: of its configuration"""
    torch.manual_seed(3)
    shape = dict(num_hidden_layers=1, mask_token_id=5, aux_layer_ids=(1, 3), num_speculative_tokens=DEPTH)
    head = BlockHead(BlockConfig.for_target(target.config, **shape | changes)).to(target.device)
    head.take_embedding(target.model.embed_tokens.weight)
    learns = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learns, lr=0.01)
    rows = []
    for ids in (torch.tensor([text], device=target.device) for text in texts):
        streams = target.model(ids, output_hidden_states=True).hidden_states
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rows.append((torch.cat([streams[i] for i in head.features], -1), ids, positions, torch.zeros_like(positions)))
    for _ in range(30):
        loss = 0
        for packed in rows:
            predicted = head.predict(*packed, target.lm_head.weight)
            for depth, state in enumerate(predicted.states):
                labels = packed[1][0, 2 + depth :]
                logits = (predicted.whole_logits or predicted.logits)(state[: len(labels)], depth)
                loss += torch.nn.functional.cross_entropy(logits, labels)
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


DSPARK = dict(edge_rank=8, sample_from_anchor=True)
DFLASH2 = dict(selector_rank=8, conv_kernel_size=2)


@pytest.fixture(scope="module", params=[DSPARK, DFLASH2], ids=["dspark", "dflash2"])
def corrected(setting, request):
    """(target, a head with a correction that was taught the same texts, the same outputs)"""
    target, _, plain = setting
    texts = [prompt + found[0] for prompt, found in zip(prompts_and_params(0.0)[0][:2], plain[0.0])]
    return target, taught(target, texts, **request.param), plain


@pytest.mark.parametrize("causal", [False, True])
def test_accepted_drafts_of_sliding_layers_change_no_bit(setting, causal):
    """A window of 16 tokens: shorter than some prompts, across tiles and pages."""
    target, _, plain = setting
    texts = [prompt + found[0] for prompt, found in zip(prompts_and_params(0.0)[0][:2], plain[0.0])]
    slides = dict(num_hidden_layers=2, sliding_layers=(0,), sliding_window=16, sliding_is_causal=causal)
    head = taught(target, texts, window_of_block=not causal, **slides)
    llm = LLM(target, max_num_seqs=6, max_num_batched_tokens=48, speculative_config={"model": head})
    for temperature in (0.0, 1.3):
        assert outputs(llm, temperature) == plain[temperature], temperature
    stats = llm.get_stats()
    assert stats["num_accepted_tokens"] >= 20
    assert stats["prefix_cache_hits"] > 0
    llm.engine.check()


@pytest.mark.parametrize("parts", [DSPARK | dict(confidence=True), DFLASH2], ids=["dspark", "dflash2"])
def test_accepted_drafts_of_scaled_and_capped_logits_change_no_bit(setting, trees, parts):
    target, _, plain = setting
    texts = [prompt + found[0] for prompt, found in zip(prompts_and_params(0.0)[0][:2], plain[0.0])]
    scales = dict(output_multiplier=0.2, final_logit_softcapping=20.0, input_embedding_scale=3.0)
    head = taught(target, texts, **parts, **scales)
    for tree, temperatures in (("chain", (0.0, 1.3)), ("static-8", (0.0,)), ("grown-16", (0.8, 0.0))):
        speculative = {"model": head, "tree": tree if tree == "chain" else str(trees / f"{tree}.json")}
        llm = LLM(target, max_num_seqs=6, max_num_batched_tokens=48, speculative_config=speculative)
        for temperature in temperatures:
            assert outputs(llm, temperature) == plain[temperature], (tree, temperature)
        assert llm.get_stats()["num_accepted_tokens"] >= 8, tree
        llm.engine.check()


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    folder, rates = tmp_path_factory.mktemp("trees"), [[0.6, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2], [0.5, 0.2], [0.4, 0.1]]
    for size in (8, 64):
        save_tree(build_static_tree(rates, size), folder / f"static-{size}.json")
    for width, size in ((6, 64), (4, 16)):
        save_tree(GrowingTree(max_depth=DEPTH, width=width, num_nodes=size), folder / f"grown-{size}.json")
    return folder


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


@pytest.mark.parametrize(
    ("tree", "batch", "temperatures"),
    [
        ("chain", 6, (0.0, 1.3)),
        ("static-8", 1, (0.0,)),
        ("static-64", 6, (0.8,)),
        ("grown-64", 6, (1.3, 0.0)),
    ],
)
def test_trees_of_a_head_with_a_correction_change_no_bit(corrected, trees, tree, batch, temperatures):
    target, head, plain = corrected
    speculative = {"model": head, "tree": tree if tree == "chain" else str(trees / f"{tree}.json")}
    llm = LLM(target, max_num_seqs=batch, max_num_batched_tokens=48, speculative_config=speculative)
    for temperature in temperatures:
        assert outputs(llm, temperature) == plain[temperature], temperature
        llm.engine.check()
    assert llm.get_stats()["num_accepted_tokens"] >= 8
    assert len(temperatures) == 1 or llm.get_stats()["prefix_cache_hits"] > 0


def test_pages_that_run_out_under_trees_change_no_bit(corrected, trees):
    target, head, plain = corrected
    speculative, sizes = {"model": head, "tree": str(trees / "static-8.json")}, dict(max_model_len=200)
    llm = LLM(target, max_num_seqs=6, speculative_config=speculative, num_gpu_blocks_override=9, **sizes)
    for temperature in (0.8, 1.3):
        assert outputs(llm, temperature) == plain[temperature], temperature
    assert llm.get_stats()["num_preemptions"] > 0
    llm.engine.check()


@pytest.fixture(scope="module")
def many(corrected):
    """Requests of all temperatures and lengths, and such that will need more pages: (requests, their plain outputs)"""
    known, plain = prompts_and_params(0.0)[0][:2], LLM(corrected[0], max_num_seqs=8)
    both = many_requests(known, 64), many_requests(known, 24, lengths=GROWING)
    return [(requests, bits_of(plain, requests)) for requests in both]


@pytest.mark.parametrize("corrected", [DSPARK], ids=["dspark"], indirect=True)
@pytest.mark.parametrize(
    ("batch", "tree", "pages"),
    [(1, "grown-64", None), (9, "static-8", None), (64, "grown-16", None), (64, "chain", None), (16, "static-8", 16)],
)
def test_an_edge_in_batches_of_any_size_changes_no_bit(corrected, trees, many, batch, tree, pages):
    (target, head, _), (requests, plain) = corrected, many[pages is not None]
    count = 10 if batch == 1 else len(plain)
    speculative = {"model": head, "tree": tree if tree == "chain" else str(trees / f"{tree}.json")}
    sizes = dict(max_num_seqs=batch, max_model_len=200, num_gpu_blocks_override=pages)
    llm = LLM(target, speculative_config=speculative, **sizes)
    assert bits_of(llm, [part[:count] for part in requests]) == plain[:count]
    assert llm.get_stats()["num_accepted_tokens"] >= count / 3
    if pages is not None:
        assert llm.get_stats()["num_preemptions"] > 0
    elif batch > 1:  # pages that are found again
        assert bits_of(llm, [part[:11] for part in requests]) == plain[:11]
        assert llm.get_stats()["prefix_cache_hits"] > 0
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
    with pytest.raises(ValueError, match="from 1 to the head's 4, got 5"):
        LLM(target, speculative_config={"model": head, "num_speculative_tokens": DEPTH + 1})


def test_a_tree_wider_than_the_selector_s_choice_is_refused(setting, trees):
    target, shape = setting[0], dict(mask_token_id=5, aux_layer_ids=(1,), num_speculative_tokens=DEPTH)
    head = BlockHead(BlockConfig.for_target(target.config, selector_rank=8, selector_top_k=5, **shape))
    with pytest.raises(ValueError, match="takes 6 candidates after a node, this head chooses among 5: narrow the tree"):
        LLM(target, speculative_config={"model": head.to(target.device), "tree": str(trees / "grown-64.json")})


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_vllm_s_names_of_the_method_are_taken(method):
    assert SpeculativeOptions.parse({"model": "some/head", "method": method}).method == "block"
