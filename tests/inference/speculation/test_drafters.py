"""All drafters: they change no bit, draft the same in every batch, and refuse what they cannot draft.

That drafts equal the head's predictions: test_drafted_distributions.py.
"""

import itertools
import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.eagle3 import default_aux_layers
from headstart.inference.llm import LLM
from headstart.inference.models.decoder import ForwardPass
from headstart.inference.speculation.drafters.own_cache import OwnCacheDrafter
from headstart.inference.speculation.tree import GrowingTree
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.tests.inference.speculation.small_drafters import (
    ALONE,
    DEPTH,
    LENGTHS,
    TEMPERATURES,
    VOCAB,
    llama,
    make,
    outputs,
)

TREES = ("chain", "static", "dynamic")
DRAFTERS = ("mlp", "eagle", "eagle3", "model", "target")
# The rest of the kinds, where fewer trees are enough: those that draft by the code of another one, or differ little.
MORE = [
    ("medusa", "chain"),
    ("medusa", "static"),
    ("medusa", "dynamic"),
    ("block", "chain"),
    ("block", "static"),
    ("block", "dynamic"),
    ("block-causal", "chain"),
    # Those with an edge, of sliding layers and of DFlash2: test_block.py.
    ("mlp-untied", "static"),
    ("eagle3-narrow", "dynamic"),
]


@pytest.mark.parametrize(("name", "tree"), [*itertools.product(DRAFTERS, TREES), *MORE])
def test_no_bit_changes(setting, tree_files, name, tree):
    target, plain = setting
    head, accepted = make(name, target).to(target.device), 0
    for batch, count in ((1, ALONE), (8, len(LENGTHS))):
        llm = LLM(
            target,
            max_num_seqs=batch,
            max_num_batched_tokens=48,  # prompts come in chunks
            speculative_config={"model": head, "num_speculative_tokens": DEPTH, "tree": tree_files[tree]},
        )
        tried = TEMPERATURES[-1:] if batch == 1 else TEMPERATURES  # one at a time takes most of the time
        for temperature in tried:
            found = outputs(llm, temperature, count=count, logprobs=2)
            assert found == plain[temperature][:count], (batch, temperature)
        metrics = llm.get_stats()
        if name == "target" and tree != "dynamic":  # 6 tokens after the first, by 5, then the one that is left
            assert metrics["num_spec_steps"] == len(tried) * 2 * count
        accepted += metrics["num_accepted_tokens"]
        llm.engine.check()
    assert accepted > 0 or tree == "chain"


@pytest.mark.parametrize(("name", "tree"), [*itertools.product(DRAFTERS, TREES), ("block-dflash2", "static")])
def test_under_a_ratio_rule_the_company_changes_nothing(setting, tree_files, name, tree):
    """Drafts are drawn from the draft's own distributions: these depend on the request alone, not on the batch or on pages it
    found.
    """
    target, plain = setting
    head, found = make(name, target).to(target.device), []
    for batch, count in ((1, ALONE), (8, len(LENGTHS))):
        speculative = {
            "model": head,
            "num_speculative_tokens": DEPTH,
            "tree": tree_files[tree],
            "verifier": "traversal",
        }
        llm = LLM(target, max_num_seqs=batch, speculative_config=speculative)
        if isinstance(llm.engine.drafter, OwnCacheDrafter):
            llm.engine.drafter.kv.normal_()  # keys that nobody wrote are not read
        found.append(outputs(llm, 0.8, count=count))
        assert llm.get_stats()["prefix_cache_hits"] == 0
    greedy = [tokens for tokens, _ in outputs(llm, 0.0)]
    assert greedy == [tokens for tokens, _ in plain[0.0]]
    found.append(outputs(llm, 0.8))  # on the pages of the earlier ones
    assert llm.get_stats()["prefix_cache_hits"] > 0
    alone, together, on_pages = found
    assert alone == together[:ALONE]
    assert together == on_pages


def test_a_draft_vocabulary_without_a_stop_token_is_warned_of():
    target = llama()
    head = make("eagle3", target)
    drafted = set(head.draft_token_ids.tolist())
    missing = min(set(range(VOCAB)) - drafted)
    for ends, said in ((missing, True), ([missing, min(drafted)], False), (None, False)):
        target.generation_config.eos_token_id = ends
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LLM(target, speculative_config={"model": head, "num_speculative_tokens": 2})
        told = f"40 tokens that this head drafts hold none of those that end an answer ({missing}): its last token is never"
        assert any(told in str(one.message) for one in caught) == said, ends


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(name="eagle", method="eagle3"), "method='eagle3', but this Eagle is a head of the method 'eagle'"),
        (dict(name="eagle", num_speculative_tokens=64), "num_speculative_tokens must be from 1 to 63, got 64"),
        (dict(name="mlp", num_speculative_tokens=5), "num_speculative_tokens must be from 1 to the head's 4, got 5"),
        (dict(name="model"), "the method 'draft_model' needs num_speculative_tokens"),
        (dict(name="eagle", tree="dynamic", verifier="token"), "is defined on chains only"),
        (
            dict(name="eagle", tree="dynamic", verifier="traversal", draft_sample_method="probabilistic"),
            "chosen without chance",
        ),
        (
            dict(name="eagle", tree="dynamic", verifier="synthetic", acceptance_length=2),
            "give it a chain or a static tree",
        ),
        (dict(method="ngram"), "needs num_speculative_tokens"),
        (dict(method="ngram", num_speculative_tokens=3, tree="dynamic"), "prompt lookup drafts a chain"),
        (dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=3, prompt_lookup_max=2), "1 <= min <= max"),
        (dict(name="eagle", prompt_lookup_max=2), "prompt_lookup_max belongs to the method 'ngram'"),
        (dict(name="eagle", method="ngram"), "takes no model"),
        (dict(name="eagle", method="magic"), "method'] must be one of medusa, mlp_speculator"),
        (dict(name="eagle", method="draft_model"), "says method='draft_model', but this Eagle is a head"),
        (dict(name="eagle", num_speculative_tokens=True), "num_speculative_tokens must be from 1 to 63, got True"),
        (dict(name="eagle", draft_sample_method=["greedy"]), "draft_sample_method must be one of"),
        (dict(name="eagle", rejection_sample_method=["strict"]), "rejection_sample_method must be one of"),
        (dict(name="model", num_speculative_tokens=3, tree="static"), "the method 'draft_model' has no measured tree"),
        (dict(method="ngram", num_speculative_tokens=3, tree="static"), "the method 'ngram' has no measured tree"),
    ],
)
def test_what_cannot_be_drafted_is_refused(asked, message):
    target, asked = llama(), dict(asked)
    if name := asked.pop("name", None):
        asked["model"] = make(name, target)
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(target, speculative_config=asked)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            dict(dynamic=dict(max_depth=2, width=65, num_nodes=20)),
            "65 candidates after a node, at most 64 can be drawn",
        ),
        (dict(parents=[-1, 0, 0], ranks=[0, 0, 97]), "98 candidates after a node, at most 64 can be drawn"),
        (dict(parents=[-1, 0, 0.0], ranks=[0, 0, 1]), "parents and ranks are whole numbers"),
        (dict(parents=[-1, 0, 0], ranks=[0, 0, 0.5]), "parents and ranks are whole numbers"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused_before_anything_runs(tmp_path, content, message):
    (tmp_path / "tree.json").write_text(json.dumps(content))
    target = llama()
    with pytest.raises(ValueError, match=message):
        LLM(target, speculative_config={"model": make("eagle", target), "tree": str(tmp_path / "tree.json")})


def test_a_head_on_another_device_is_refused():
    target = llama()
    with pytest.raises(ValueError, match="the head is on meta, the target on cpu"):
        LLM(target, speculative_config={"model": make("eagle", target).to("meta")})


def test_the_dynamic_tree_that_is_not_described_fits_what_drafts():
    target = llama()
    for name, asked, expected in (
        ("mlp", None, (DEPTH, 8, 32)),  # no deeper than the head
        ("eagle", None, (5, 8, 32)),
        ("eagle", 1, (1, 8, 9)),  # no more nodes than there are candidates
        ("eagle", 9, (9, 8, 32)),
    ):
        speculative = {"model": make(name, target), "tree": "dynamic", "num_speculative_tokens": asked}
        assert LLM(target, num_gpu_blocks_override=16, speculative_config=speculative).tree == GrowingTree(*expected)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3-narrow"])
@torch.no_grad()
def test_a_prompt_leaves_the_keys_of_a_whole_pass(setting, name):
    target, _ = setting
    head = make(name, target).to(target.device)
    llm = LLM(target, max_num_seqs=1, speculative_config={"model": head, "num_speculative_tokens": DEPTH})
    drafter, device = llm.engine.drafter, target.device
    generator = torch.Generator().manual_seed(3)
    feature = torch.randn(40, head.fc.in_features, generator=generator).to(device)
    if name == "eagle":  # which reads a token's embedding beside
        feature = feature[:, : target.config.hidden_size]
    rows, kept = torch.arange(40, device=device), []
    table, committed = (torch.tensor(x, device=device) for x in ([[1]], [0]))
    index = build_tree_index(
        table, committed, rows, rows.expand(40, 40), drafter.kv_shape[1], drafter.dtype, is_chain=True
    )
    for fill in (drafter.fill, lambda *rows: drafter.run(*rows, from_target=True)):
        drafter.kv.zero_()
        fill(ForwardPass(rows % VOCAB, rows, PAGE + rows, index), feature)
        kept.append(drafter.kv.clone())
    assert kept[0].any()
    assert torch.equal(*kept)


@pytest.mark.parametrize("name", ["mlp", "eagle", "target"])
def test_a_dynamic_tree_of_fewer_nodes_than_its_depth(name, tmp_path):
    (tmp_path / "tree.json").write_text(json.dumps({"dynamic": dict(max_depth=DEPTH, width=1, num_nodes=3)}))
    target = llama()
    speculative = {"model": make(name, target), "tree": str(tmp_path / "tree.json")}
    assert outputs(LLM(target, speculative_config=speculative), 0.0) == outputs(LLM(target), 0.0)


def test_a_head_whose_file_names_no_layers_reads_the_targets_default_ones():
    target = llama(num_hidden_layers=8)
    head = make("eagle3", target)
    head.config = replace(head.config, aux_layer_ids=None)
    llm = LLM(target, speculative_config={"model": head})
    assert llm.engine.drafter.streams == default_aux_layers(8)
    assert outputs(llm, 0.0) == outputs(LLM(target), 0.0)


def test_a_draft_model_of_another_vocabulary_is_refused():
    target = llama()
    other = LlamaForCausalLM(LlamaConfig(**target.config.to_dict() | dict(vocab_size=98)))
    with pytest.raises(ValueError, match="has a vocabulary of 98 tokens, the target one of 97"):
        LLM(target, speculative_config={"model": other, "num_speculative_tokens": 2})


def test_prompt_lookup_by_its_name():
    target = llama()
    plain = outputs(LLM(target), 0.0)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    assert outputs(LLM(target, speculative_config=speculative), 0.0) == plain
