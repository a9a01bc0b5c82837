"""Every way of drafting: it changes no bit, drafts the same whoever shares the batch, and drafts what the head says.

The heads are random, so almost every draft is wrong: the paths by which drafts are dropped are walked all the time. With the
target as its own draft model every draft is right.
"""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.inference.engine.sampling import SamplingParams
from headstart.inference.llm import LLM
from headstart.inference.speculation.drafters.own_cache import OwnCacheDrafter
from headstart.inference.speculation.tree import DynamicTree, build_static_tree, save_tree
from headstart.kernels.sampling.philox import gumbel
from headstart.tests.kernels.speculation.test_dynamic_tree import grow_naively

VOCAB, DEPTH = 97, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TREES = ("chain", "static", "dynamic")
LENGTHS = (1, 63, 130, 2, 17, 64, 3, 65)  # of the prompts: below, at and across pages; eight, as many as run at once
ALONE = 3  # so many of them are also run one at a time, which is most of the time
TEMPERATURES = (0.0, 0.8)


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    tokens = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None)
    config = LlamaConfig(**shape | changes, **tokens, max_position_embeddings=512, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def make(name, target):
    """What drafts, by a name."""
    config = target.config
    torch.manual_seed(7)
    if name == "medusa":
        head = Medusa(MedusaConfig(config.hidden_size, VOCAB, DEPTH))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return head
    if name.startswith("mlp"):
        plain = dict(tie_weights=False, scale_input=False) if name == "mlp-untied" else {}
        return MLPSpeculator(MLPSpeculatorConfig(config.hidden_size, VOCAB, 32, DEPTH, **plain))
    if name == "eagle":
        head = Eagle(EagleConfig.for_target(config, fc_bias=True, attention_bias=True))
    elif name == "eagle3":
        head = Eagle3(Eagle3Config.for_target(config, aux_layer_ids=(0, 2, 4), draft_vocab_size=40))
        chosen = torch.randperm(VOCAB)[:40].sort().values
        head.set_draft_vocabulary(chosen - torch.arange(40), torch.isin(torch.arange(VOCAB), chosen))
    elif name == "eagle3-narrow":  # of another width, over the whole vocabulary, one feature
        shape = dict(hidden_size=32, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1)
        head = Eagle3(Eagle3Config.for_target(config, aux_layer_ids=(3,), norm_before_residual=True, **shape))
    else:
        return {"target": target, "model": llama(1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)}[name]
    for parameter in head.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    if not isinstance(head, Eagle3) or not head.config.own_embedding:
        head.take_embedding(target.model.embed_tokens.weight)
    return head


DRAFTERS = ("medusa", "mlp", "mlp-untied", "eagle", "eagle3", "eagle3-narrow", "model", "target")


@pytest.fixture(scope="module")
def tree_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    save_tree(build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.5, 0.2], [0.4]], 16), folder / "static.json")
    (folder / "dynamic.json").write_text(json.dumps({"dynamic": dict(max_depth=DEPTH, width=3, num_nodes=14)}))
    return {"chain": "chain"} | {name: str(folder / f"{name}.json") for name in ("static", "dynamic")}


def prompts_and_params(temperature, count=None, max_tokens=7, **changes):
    """The first `count` prompts, all unless told, each with a seed of its own."""
    generator = torch.Generator().manual_seed(4)  # at which every drafter has a token or more accepted
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS[:count]]
    common = dict(temperature=temperature, max_tokens=max_tokens) | changes
    return prompts, [SamplingParams(seed=i, **common) for i in range(len(prompts))]


def outputs(llm, temperature, **changes):
    found = [x.outputs[0] for x in llm.generate(*prompts_and_params(temperature, **changes))]
    return [(x.token_ids, x.logprobs) for x in found]


@pytest.fixture(scope="module", params=DEVICES)
def setting(request):
    """(target, {temperature: plain outputs}) on a device."""
    target = llama().to(request.param)
    plain = LLM(target, max_num_seqs=1)
    return target, {t: outputs(plain, t, logprobs=2) for t in TEMPERATURES}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_bit_changes(setting, tree_files, name, tree):
    if (name, tree) == ("medusa", "dynamic"):
        pytest.skip("Medusa heads draft no dynamic trees: test_what_cannot_be_drafted_is_refused")
    target, plain = setting
    head, accepted = make(name, target).to(target.device), 0
    for batch, count in ((1, ALONE), (8, len(LENGTHS))):
        llm = LLM(
            target,
            max_num_seqs=batch,
            max_num_batched_tokens=48,  # prompts come in chunks
            speculative_config={"model": head, "num_speculative_tokens": DEPTH, "tree": tree_files[tree]},
        )
        for temperature in TEMPERATURES:
            found = outputs(llm, temperature, count=count, logprobs=2)
            assert found == plain[temperature][:count], (batch, temperature)
        metrics = llm.get_metrics()
        if name == "target" and tree != "dynamic":  # 6 tokens behind the first, by 5, then the one that is left
            assert metrics["num_spec_steps"] == 2 * 2 * count
        accepted += metrics["num_accepted_tokens"]
        llm.engine.scheduler.check()
    assert accepted > 0 or tree == "chain"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["mlp", "eagle", "eagle3", "model", "target"])
def test_under_a_ratio_rule_the_company_changes_nothing(setting, tree_files, name, tree):
    """Drafts are drawn from the draft's own laws: these depend on the request alone, not on the batch or on pages it found."""
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
        assert llm.get_metrics()["prefix_cache_hits"] == 0
        greedy = [tokens for tokens, _ in outputs(llm, 0.0, count=count)]
        assert greedy == [tokens for tokens, _ in plain[0.0][:count]]
        assert llm.get_metrics()["prefix_cache_hits"] > 0
    found.append(outputs(llm, 0.8))  # on the pages of the earlier ones
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


class Watched:
    """Keeps the logits of every level that a drafter computes, and what it drafted."""

    def __init__(self, drafter):
        self.steps, self.levels = [], []
        self.start, self.expand, self.propose = drafter.start, drafter.expand, drafter.propose
        drafter.start, drafter.expand, drafter.propose = self._start, self._expand, self._propose

    def _start(self, batch):
        found = self.start(batch)
        self.levels = [found[0][0, 0].clone()]
        return found

    def _expand(self, *arguments):
        found = self.expand(*arguments)
        self.levels.append(found[0][0, 0].clone())
        return found

    def _propose(self, batch, tree, shape=None):
        drafted = self.propose(batch, tree, shape)
        self.steps.append((batch.committed.item(), drafted.tokens[0].tolist(), self.levels))
        return drafted


@pytest.mark.parametrize("name", ["mlp", "mlp-untied", "eagle", "eagle3", "eagle3-narrow"])
def test_the_engine_drafts_what_the_head_says_of_the_same_text(setting, name):
    """The training forward over the whole text, with the drafted tokens behind the root, gives the logits of every level."""
    target, _ = setting
    head = make(name, target).to(target.device)
    speculative = {"model": head, "num_speculative_tokens": DEPTH}
    llm = LLM(target, max_num_seqs=1, enforce_eager=True, speculative_config=speculative)  # a graph cannot be watched
    watched = Watched(llm.engine.drafter)
    prompt = prompts_and_params(0.0)[0][1]
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].token_ids
    text, compared = prompt + output, 0
    for committed, drafted, levels in watched.steps:
        if text[: committed + 1][-1] != drafted[0] or committed + 1 > len(text):
            continue  # launched before its request was seen to have ended
        known = torch.tensor([text[:committed]], device=target.device)
        with torch.no_grad():
            expected = say(head, target, known, torch.tensor(drafted, device=target.device))
        for level, logits in zip(levels, expected):
            kept = level > -torch.inf
            assert kept.sum() == len(logits[logits > -torch.inf])
            error = (level[kept] - logits[kept]).abs().max()
            assert error < 1e-3 * logits[kept].abs().max()  # of random weights the states grow from layer to layer
            compared += 1
    assert compared >= 2 * DEPTH


def say(head, target, known, drafted):
    """Logits [V] of every step behind the text `known` [1, L] and the tokens `drafted` [D + 1], by the training forward."""
    found = target.model(known, output_hidden_states=True)
    length, final = known.shape[1], found.last_hidden_state
    if isinstance(head, MLPSpeculator):
        return [x[0] for x in head(final[:, -1], drafted[None, :DEPTH])[0]]
    following = torch.cat((known[0, 1:], drafted))  # the token at t + 1, of every t
    positions, one = torch.arange(length, device=known.device)[None], torch.zeros_like(known)
    if isinstance(head, Eagle):
        # Its training forward is one step; unrolled on its own states, row by row, that is the text with the states as features.
        features, states = final, []
        for step in range(DEPTH):
            count = length + step
            at, document = (
                torch.arange(count, device=known.device)[None],
                torch.zeros(1, count, dtype=torch.long, device=known.device),
            )
            states.append(head(features, following[None, :count], at, document)[:, -1:])
            features = torch.cat((features, states[-1]), 1)
        return [target.lm_head(state)[0, 0] for state in states]
    streams = [found.hidden_states[i] for i in head.features if i < target.config.num_hidden_layers]
    if target.config.num_hidden_layers in head.features:
        kept = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        target.model(known)
        hook.remove()
        streams.append(kept[0])
    tokens = torch.stack([following[i : i + length] for i in range(DEPTH)], -1)[None]
    states = head(torch.cat(streams, -1), tokens, positions, one, DEPTH)
    logits = [head.logits(state)[0, -1] for state in states]
    if head.d2t is None:
        return logits
    return [x.new_full((VOCAB,), -torch.inf).index_copy(0, head.draft_token_ids, x) for x in logits]


class WatchedGrowth(Watched):
    """Keeps the law behind every expanded path of tokens, and the topology of what was drafted."""

    def _start(self, batch):
        found = self.start(batch)
        self.rows, self.levels = [], {(): found[0][0, 0].clone()}
        return found

    def _expand(self, batch, level, tokens, state):
        found = self.expand(batch, level, tokens, state)
        self.rows += tokens[0].tolist()
        for way, logits in zip(level.ancestors[0].tolist(), found[0][:, 0]):
            self.levels[tuple(self.rows[row] for row in way)] = logits.clone()
        return found

    def _propose(self, batch, tree, shape=None):
        drafted = self.propose(batch, tree, shape)
        keys = batch.seed, batch.sample, batch.committed + 1
        self.steps.append((keys, drafted.tokens[0].tolist(), drafted.topology, self.levels))
        return drafted


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_dynamic_tree_is_the_one_that_heaps_grow_from_the_head_s_laws(setting, tree_files, temperature):
    target, _ = setting
    head = make("eagle3", target).to(target.device)
    speculative = {"model": head, "tree": tree_files["dynamic"]}
    llm = LLM(target, max_num_seqs=1, enforce_eager=True, speculative_config=speculative)
    watched = WatchedGrowth(llm.engine.drafter)
    params = SamplingParams(seed=5, temperature=temperature, max_tokens=8)
    prompt, compared = prompts_and_params(0.0)[0][1], 0
    text = prompt + llm.generate(prompt, params)[0].outputs[0].token_ids

    def children(laws, keys, path):
        law = laws[path].double()
        if not temperature:
            found = law.log_softmax(0).topk(3)
            return list(zip(found.indices.tolist(), found.values.tolist()))
        seed, sample, position = keys
        found = (law / temperature + gumbel(seed, sample, position + len(path), VOCAB)[0]).topk(3)
        return list(zip(found.indices.tolist(), found.values.log_softmax(0).tolist()))

    for keys, tokens, topology, laws in watched.steps:
        _, tree = grow_naively(lambda path, laws=laws, keys=keys: children(laws, keys, path), 3, DEPTH, 14)
        paths = [()]
        for token, parent in zip(tokens[1:], topology.parents[0, 1:].tolist()):
            paths.append((*paths[parent], token))
        assert paths == [(), *tree]
        assert topology.depths[0].tolist() == [len(path) for path in paths]
        for path, ancestors in zip(paths, topology.ancestors[0].tolist()):
            assert [paths[node] for node in ancestors] == [path[:depth] for depth in range(DEPTH + 1)]
        committed = keys[2].item() - 1
        if text[: committed + 1][-1] != tokens[0] or committed + 1 > len(text):
            continue  # launched before its request was seen to have ended
        known = torch.tensor([text[:committed]], device=target.device)
        for path in (path for path in laws if len(path) == DEPTH - 1):
            with torch.no_grad():
                expected = say(head, target, known, torch.tensor([tokens[0], *path, 0], device=target.device))
            for depth, logits in enumerate(expected):
                law, kept = laws[path[:depth]], logits > -torch.inf
                assert torch.equal(law > -torch.inf, kept)
                assert (law[kept] - logits[kept]).abs().max() < 2e-4 * logits[kept].abs().max()
                compared += 1
    assert compared >= 3 * 3 * DEPTH


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(name="medusa", tree="dynamic"), "Medusa heads do not look at each other's tokens"),
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
        (dict(name="model", num_speculative_tokens=3, tree="static"), "the method 'draft_model' has none"),
        (dict(method="ngram", num_speculative_tokens=3, tree="static"), "the method 'ngram' has none"),
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
            "65 candidates behind a node, at most 64 can be drawn",
        ),
        (dict(parents=[-1, 0, 0], ranks=[0, 0, 97]), "98 candidates behind a node, at most 64 can be drawn"),
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
        assert LLM(target, num_gpu_blocks_override=16, speculative_config=speculative).tree == DynamicTree(*expected)


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
