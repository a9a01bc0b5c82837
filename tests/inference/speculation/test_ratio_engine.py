"""The ratio rules in the engine: greedy tokens at temperature 0, outputs of the target's distribution, depth limits, what is
refused.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import headstart.inference.engine.step as step_module
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.inference.engine.step import Step, draft_scores
from headstart.inference.llm import LLM
from headstart.inference.prompt_files import read_prompts, render_prompt
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.options import SpeculativeOptions
from headstart.inference.speculation.speculation import choose_speculation
from headstart.inference.speculation.tree import Tree, build_static_tree, load_tree, save_tree
from headstart.tests.inference.speculation.g_test import surprise

ASSETS = Path(__file__).resolve().parents[3] / "assets"
RATIO_RULES = ("token", "block", "recursive", "traversal")
TREE = Tree((-1, 0, 0, 0, 1, 1, 2, 4), (0, 0, 1, 2, 0, 1, 0, 0))
GAPS = Tree(TREE.parents, (0, 0, 2, 5, 1, 3, 4, 3))  # the same shape, with ranks left out


@pytest.fixture(scope="module")
def tree_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    save_tree(TREE, path)
    return str(path)


def small_target(vocab_size):
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    head = Medusa(MedusaConfig(num_heads=3, hidden_size=16, vocab_size=vocab_size, shared_lm_head=False))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model, head.requires_grad_(False)


@pytest.fixture(scope="module")
def embedded():
    """The embedded target, its tokenizer, three prompts, greedy parameters and the outputs without drafts."""
    module = AutoModelForCausalLM.from_pretrained(ASSETS / "stdlib-coder", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "stdlib-coder")
    prompts = [render_prompt(tokenizer, p) for p in read_prompts(ASSETS / "stdlib-coder" / "heldout.jsonl", count=3)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    plain = [o.outputs[0].token_ids for o in LLM(module, tokenizer=tokenizer).generate(prompts, params)]
    return module, tokenizer, prompts, params, plain


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_at_temperature_0_the_embedded_target_speaks_as_without_drafts(rule, tree_file, embedded):
    module, tokenizer, prompts, params, plain = embedded
    for method, tree in product(
        ("probabilistic", "greedy"), ("chain", tree_file)[: 1 if rule in RATIO_RULES[:2] else 2]
    ):
        speculative = {"model": str(ASSETS / "stdlib-coder-medusa"), "tree": tree, "verifier": rule}
        llm = LLM(module, tokenizer=tokenizer, speculative_config=speculative | {"draft_sample_method": method})
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == plain
        assert llm.get_stats()["acceptance_length"] > 1.2


def speculations(tree, model):
    """Every verifier of trees with every way of sampling that it allows: [speculative_config]."""
    methods = ("probabilistic", "top_and_one", "greedy")
    found = [
        {"verifier": rule, "draft_sample_method": m} for rule in ("strict", "recursive", "traversal") for m in methods
    ]
    found += [{"verifier": "strict"}, {"rejection_sample_method": "standard"}, {"rejection_sample_method": "block"}]
    return [{"model": model, "tree": tree} | one for one in found]


@pytest.mark.parametrize("size", [12, 32, 48])
def test_a_tree_from_the_builder_works_with_every_verifier(size, embedded, tmp_path):
    """Of these rates, which no rank leads down: the best trees of these sizes leave ranks out."""
    head, path = str(ASSETS / "stdlib-coder-medusa"), str(tmp_path / "tree.json")
    rates = json.loads((ASSETS / "stdlib-coder-medusa" / "tree.json").read_text())["rates"]
    tree = build_static_tree(rates, size)
    assert tree != tree.without_gaps()
    save_tree(tree, path, rates)
    module, tokenizer, prompts, params, plain = embedded
    for speculative in speculations(path, head):
        choice = choose_speculation(SpeculativeOptions.parse(speculative), module.config, max_num_seqs=1)
        assert choice.tree.parents == tree.parents
        if size == 12:
            llm = LLM(module, tokenizer=tokenizer, max_num_seqs=1, speculative_config=speculative)
            assert [o.outputs[0].token_ids for o in llm.generate(prompts[:1], params)] == plain[:1]
            assert llm.engine.metrics.as_dict()["acceptance_length"] > 1.2


def test_draws_fill_the_gaps_of_a_tree(tmp_path):
    """A tree with gaps and the same without: equal tokens where children are drawn; under `strict`, those of plain decoding."""
    model, head = small_target(11)
    files = [str(tmp_path / name) for name in ("gaps.json", "filled.json")]
    save_tree(GAPS, files[0])
    save_tree(TREE, files[1])
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=10) for i in range(8)]

    def tokens(**options):
        outputs = LLM(model, max_num_seqs=4, **options).generate([[1, 4]] * 8, params)
        return [o.outputs[0].token_ids for o in outputs]

    plain = tokens()
    for gaps, filled in zip(*(speculations(file, head) for file in files)):
        found = tokens(speculative_config=gaps)
        if gaps.get("verifier") == "strict":
            assert found == plain
        elif gaps.get("draft_sample_method") != "greedy":
            assert found == tokens(speculative_config=filled)
    assert load_tree(files[0]) == GAPS, "chosen drafts keep their ranks"


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_distribution_is_the_one_behind_all_of_a_requests_parameters(rule, tree_file):
    module, head = small_target(24)
    own = dict(repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={3: 1.5}, min_p=0.05, min_tokens=4)
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **own)] * 3
    prompts = [[1, 2, 3], [7, 7, 8, 9], [5]]
    plain = [o.outputs[0].token_ids for o in LLM(module).generate(prompts, params)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert plain != [o.outputs[0].token_ids for o in LLM(module).generate(prompts, greedy)], "they change nothing"
    tree = "chain" if rule in RATIO_RULES[:2] else tree_file
    llm = LLM(module, speculative_config={"model": head, "tree": tree, "verifier": rule})
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == plain


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_on_the_gpu_too_and_in_graphs_as_without(rule, tree_file):
    target, head = str(ASSETS / "stdlib-coder"), str(ASSETS / "stdlib-coder-medusa")
    plain = LLM(target, device="cuda")
    prompts = [render_prompt(plain.tokenizer, p) for p in read_prompts(f"{target}/heldout.jsonl", count=12)]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, greedy)]
    for tree in ("chain", tree_file)[: 1 if rule in RATIO_RULES[:2] else 2]:
        speculative = {"model": head, "tree": tree, "verifier": rule}
        llm = LLM(target, device="cuda", speculative_config=speculative)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == expected
        # Mixed: a replay that left a signal after would hang or change the next one's tokens.
        mixed = [
            SamplingParams(temperature=0.4 * (i % 3), top_k=40 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)
            for i in range(len(prompts))
        ]
        eager = LLM(target, device="cuda", enforce_eager=True, max_num_seqs=5, speculative_config=speculative)
        found, again = ([o.outputs[0].token_ids for o in one.generate(prompts, mixed)] for one in (llm, eager))
        assert found == again
        assert llm.get_stats()["acceptance_length"] > 1.2


def test_a_greedy_request_among_others_is_greedy():
    model, head = small_target(11)
    plain = LLM(model, max_num_seqs=4).generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=12))
    for rule in RATIO_RULES:
        llm = LLM(model, max_num_seqs=4, speculative_config={"model": head, "verifier": rule})
        params = [SamplingParams(temperature=t, max_tokens=12, seed=i) for i, t in enumerate((1.0, 0.0, 0.6, 1.3))]
        outputs = llm.generate([[1, 2, 3]] * 4, params)
        assert outputs[1].outputs[0].token_ids == plain[0].outputs[0].token_ids
        assert all(len(o.outputs[0].token_ids) == 12 for o in outputs)


def exact_joint(model, prompt, temperature, top_k, num_tokens):
    """The distribution of the next tokens from forward passes over all prefixes.  [V] * num_tokens"""
    vocab_size = model.config.vocab_size
    joint = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([prompt])
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(prefixes).logits[:, -1].double()
        if top_k:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        joint = (joint[:, None] * (logits / temperature).softmax(-1)).flatten()
        following = torch.arange(vocab_size).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab_size, 0), following], 1)
    return joint


def counts_of(llm, prompt, count, seed=0, **params):
    """How often each of the first three tokens came, the first drawn after the prompt, the others by speculation."""
    size = llm.engine.decoder.vocab_size
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=5, n=count, seed=seed, **params))
    tokens = torch.tensor([one.token_ids[:3] for one in output.outputs])
    return torch.bincount((tokens * size ** torch.arange(2, -1, -1)).sum(1), minlength=size**3)


@pytest.mark.parametrize(
    ("rule", "method", "top_k"),
    [
        ("token", "probabilistic", 0),
        ("block", "probabilistic", 3),
        ("recursive", "top_and_one", 0),
        ("traversal", "probabilistic", 3),
        ("traversal", "greedy", 0),
    ],
)
def test_the_engines_outputs_follow_the_targets_distribution(rule, method, top_k, tree_file):
    model, head = small_target(5)
    tree = tree_file if rule in ("recursive", "traversal") else "chain"
    speculative = {"model": head, "tree": tree, "verifier": rule, "draft_sample_method": method}
    llm = LLM(model, max_num_seqs=128, speculative_config=speculative)
    counts = counts_of(llm, [1, 4], 1500, temperature=0.9, top_k=top_k)
    joint = exact_joint(model, [1, 4], 0.9, top_k, 3)
    assert surprise(counts, joint) < 6
    assert 1.2 < llm.get_stats()["acceptance_length"] < 3.5
    # The test can fail: of the distribution at another temperature this is no sample.
    assert surprise(counts, exact_joint(model, [1, 4], 1.1, top_k, 3)) > 6


def test_the_same_seed_gives_the_same_tokens_in_any_company():
    model, head = small_target(11)
    outputs = []
    for batch in (1, 6):
        llm = LLM(model, max_num_seqs=batch, speculative_config={"model": head, "verifier": "block"})
        params = [SamplingParams(temperature=0.8, max_tokens=20, seed=i) for i in range(6)]
        outputs.append([o.outputs[0].token_ids for o in llm.generate([[1, 2, 3 + i] for i in range(6)], params)])
    assert outputs[0] == outputs[1]


def test_verifiers_and_ways_of_drawing_by_the_names_of_vllm(tree_file):
    model, head = small_target(11)

    def build(**speculative):
        engine = LLM(model, speculative_config={"model": head} | speculative).engine
        return engine.graphs.step.verifier.name, engine.drafter.sampling

    assert build() == ("strict", "shared_noise")
    assert build(rejection_sample_method="strict", draft_sample_method="greedy") == ("strict", "greedy")
    for method, tree, name in (
        ("standard", "chain", "token"),
        ("block", "chain", "block"),
        ("probabilistic", tree_file, "recursive"),
        ("block", tree_file, "traversal"),
    ):
        assert build(rejection_sample_method=method, tree=tree) == (name, "sampled")
    assert build(verifier="recursive", draft_sample_method="top_and_one")[1] == "top_and_one"


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"verifier": "block", "tree": "TREE"}, "defined on chains only"),
        ({"verifier": "token", "draft_sample_method": "shared_noise"}, "noise of their own"),
        ({"verifier": "token", "rejection_sample_method": "block"}, "give one of them"),
        ({"rejection_sample_method": "fast"}, "rejection_sample_method must be one of"),
        ({"draft_sample_method": "random"}, "draft_sample_method must be one of greedy, shared_noise, sampled"),
        ({"verifier": "block", "acceptance_length": 2.0}, "belong to the verifier 'synthetic'"),
    ],
)
def test_what_would_not_keep_the_distribution_is_refused(speculative, message, tree_file):
    model, head = small_target(11)
    if "tree" in speculative:
        speculative = speculative | {"tree": tree_file}
    with pytest.raises(ValueError, match=message):
        LLM(model, speculative_config={"model": head} | speculative)


@pytest.mark.parametrize("rule", ["strict", "token"])
def test_drafts_follow_what_a_request_asks_of_its_logits(rule, monkeypatch):
    module, head = small_target(24)
    seen = []

    def recorded(*arguments):
        found = draft_scores(*arguments)
        seen.append(found[:2])
        return found

    monkeypatch.setattr(step_module, "draft_scores", recorded)
    llm = LLM(module, speculative_config={"model": head, "tree": "chain", "verifier": rule})
    allowed = [2, 3, 5, 7, 11]
    own = dict(temperature=0.9, top_k=3, allowed_token_ids=allowed, max_tokens=40, ignore_eos=True)
    params = [SamplingParams(seed=seed, **own) for seed in range(20)]
    prompts = [[1, 2, 3 + seed % 5] for seed in range(20)]
    llm.generate(prompts, params)
    with_own = llm.get_stats()["acceptance_length"]
    assert seen
    for scores, temperature in seen:
        kept = scores > -torch.inf
        assert (kept.sum(-1) <= 3).all()
        assert not kept[..., [token for token in range(24) if token not in allowed]].any()
        assert (temperature == 1).all()
    # Without: heads that do not know of them draft what cannot be said.
    monkeypatch.setattr(Step, "_processor", lambda *_: None)
    llm = LLM(module, speculative_config={"model": head, "tree": "chain", "verifier": rule})
    llm.generate(prompts, params)
    assert llm.get_stats()["acceptance_length"] < with_own
