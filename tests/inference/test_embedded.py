"""The embedded target with its shipped heads: equal outputs, acceptance, and training's view against the engine's."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import LLM, SamplingParams, load_head
from headstart.inference.forbidden_tokens import bad_word_sequences
from headstart.inference.prompt_files import read_prompts, render_prompt
from headstart.inference.speculation.tree import build_static_tree, save_tree
from headstart.train.teacher.features import FrozenTarget

ASSETS = Path(__file__).resolve().parents[2] / "assets"
TARGET, HEADS = ASSETS / "stdlib-coder", ASSETS / "stdlib-coder-medusa"
NUM_PROMPTS = 32
FEW = 10  # of them, on the CPU: above every batch tried, so that seats are used again
FEWER = 3  # one at a time
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    module = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [render_prompt(tokenizer, prompt) for prompt in read_prompts(TARGET / "heldout.jsonl", count=NUM_PROMPTS)]
    tree = build_static_tree(json.loads((HEADS / "tree.json").read_text())["rates"], 64)
    tree_file = tmp_path_factory.mktemp("tree") / "64.json"
    save_tree(tree, tree_file)
    return module, tokenizer, prompts, str(tree_file)


@pytest.fixture(scope="module")
def plain(embedded):
    """Tokens without drafts, per temperature: together, which is quick; one at a time they are seen to be the same."""
    module, tokenizer, prompts, _ = embedded
    llm = LLM(module, tokenizer=tokenizer, max_num_seqs=FEW)
    params = {t: SamplingParams(temperature=t, max_tokens=MAX_TOKENS, seed=5) for t in (0.0, 0.8)}
    return {t: [o.outputs[0].token_ids for o in llm.generate(prompts[:FEW], params[t])] for t in params}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "tree", "batch"),
    [(0.0, "chain", 1), (0.0, "chain", 8), (0.0, "tree of 64", 1), (0.8, "chain", 1), (0.8, "tree of 64", 8)],
)
def test_shipped_heads_change_no_token_and_are_accepted(embedded, plain, temperature, tree, batch):
    module, tokenizer, prompts, tree_file = embedded
    speculative = {"model": str(HEADS), "tree": "chain" if tree == "chain" else tree_file}
    llm = LLM(module, tokenizer=tokenizer, max_num_seqs=batch, speculative_config=speculative)
    assert llm.tree.num_nodes == (5 if tree == "chain" else 64)
    count = FEWER if batch == 1 else FEW
    outputs = llm.generate(prompts[:count], SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=5))
    assert [o.outputs[0].token_ids for o in outputs] == plain[temperature][:count]
    least = {("chain", 0.0): 1.5, ("tree of 64", 0.0): 2.0, ("chain", 0.8): 1.2, ("tree of 64", 0.8): 1.6}
    assert llm.get_stats()["acceptance_length"] >= least[tree, temperature]


def test_shipped_heads_change_no_token_whatever_the_parameters(embedded):
    """One request with each parameter, in one batch; the first ones are checked for what they ask."""
    module, tokenizer, prompts, _ = embedded
    given = [
        dict(bad_words=["return", "self.", "os.path", "None"]),
        dict(repetition_penalty=1.3),
        dict(presence_penalty=0.8, frequency_penalty=0.4),
        dict(min_p=0.1, logit_bias={tokenizer(" return")["input_ids"][0]: 5}),
        dict(allowed_token_ids=list(range(0, len(tokenizer), 2)), min_tokens=10),
        {},
    ]
    params = [SamplingParams(temperature=0.8, max_tokens=24, seed=5, **own) for own in given]
    alone = LLM(module, tokenizer=tokenizer, max_num_seqs=1)
    expected = [o.outputs[0].token_ids for o in alone.generate(prompts[: len(given)], params)]
    bad = bad_word_sequences(params[0].bad_words, tokenizer)
    assert not any(tuple(expected[0][i : i + len(word)]) == word for word in bad for i in range(24))
    assert not any(token % 2 for token in expected[4])
    llm = LLM(module, tokenizer=tokenizer, max_num_seqs=4, speculative_config={"model": str(HEADS), "tree": "static"})
    assert [o.outputs[0].token_ids for o in llm.generate(prompts[: len(given)], params)] == expected
    assert llm.get_stats()["acceptance_length"] > 1.2


def test_training_and_engine_agree_on_every_accepted_count(embedded):
    """At every root of the engine's chain run, the training forward on that text gives the same accepted count."""
    module, tokenizer, prompts, _ = embedded
    llm = LLM(module, tokenizer=tokenizer, max_num_seqs=1, speculative_config={"model": str(HEADS), "tree": "chain"})
    step, steps = llm.engine.graphs.step, []
    strict = step.verifier

    def recording(tree, draft, target):
        result, batch = strict(tree, draft, target), target.batch
        steps.append((batch.committed.item(), result[1].item(), batch.remaining.item() - 1))
        return result

    step.verifier = recording
    head, target = load_head(HEADS, dtype=torch.float32), FrozenTarget(module)
    checked, counts = 0, set()
    for prompt in prompts[:8]:
        steps.clear()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
        text = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
        with torch.no_grad():
            features = target.features(text, torch.arange(text.shape[1])[None], torch.zeros_like(text))
            logits, offsets = head(features)
        guesses = [one[0].argmax(-1) for one in logits]  # per head [T]
        for committed, accepted, limit in steps:
            at = committed - 1  # the position whose feature drafts; the root stands at `committed`
            count = 0
            while count < min(limit, len(guesses)) and guesses[count][at] == text[0, at + offsets[count]]:
                count += 1
            assert count == accepted, (prompt["prompt"], committed)
            checked += 1
            counts.add(count)
    assert checked > 150
    assert counts >= {0, 1, 2, 3}


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shipped_heads_change_no_token_on_the_gpu(embedded, temperature):
    _, _, prompts, tree_file = embedded
    params = SamplingParams(temperature=temperature, max_tokens=32, seed=5)
    plain = LLM(str(TARGET), device="cuda").generate(prompts, params)
    for tree, least in (("chain", 1.2), (tree_file, 1.6)):
        llm = LLM(str(TARGET), device="cuda", speculative_config={"model": str(HEADS), "tree": tree})
        assert (llm.device.type, llm.dtype) == ("cuda", torch.bfloat16)
        outputs = llm.generate(prompts, params)
        assert llm.get_stats()["acceptance_length"] >= least
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
