"""`headstart verify-lossless`: a lossless engine passes, and each check fails when its promise is broken."""

import json
import random
from collections import Counter

import pytest

import headstart.inference.speculation.verifiers as verify_module
from headstart.cli import main
from headstart.evaluation import lossless
from headstart.evaluation.lossless import Check, two_sample_test, verdict, verify_lossless
from headstart.inference.llm import LLM
from headstart.kernels.speculation.verify_strict import verify_strict

COLD = 0.1  # at 1 the random target's distribution is so flat that no sample occurs twice
PROMPTS = [{"prompt_token_ids": [5, 9, 2, 7]}, {"prompt_token_ids": [3, 1, 4, 1, 5, 9]}]


@pytest.fixture(scope="module")
def base(target_folder):
    return LLM(target_folder, max_model_len=64, device="cpu", dtype="float32")


def kinds(checks):
    return [(check.kind, check.passed) for check in checks]


def test_speculation_as_shipped_is_found_lossless(base, head_folder):
    speculative = {"model": str(head_folder), "tree": "chain"}
    checks = verify_lossless(base, speculative, PROMPTS, (0.0, COLD), max_tokens=12, batch=4, samples=100)
    assert kinds(checks)[:5] == [("bits", True)] * 4 + [("distribution", True)]
    assert checks[5].kind == "control"
    passed, sentence = verdict(checks, "strict")
    assert passed
    assert sentence.startswith("lossless: the same bits at every temperature tried")


def test_a_rule_that_takes_every_first_draft_is_found_out(base, head_folder, monkeypatch):
    def credulous(parents, depths, tokens, target_tokens, depth_limit, max_depth):
        believed = target_tokens.clone()
        if max_depth:  # plain decoding has no drafts
            believed[:, 0] = tokens[:, 1]  # the first draft is taken for the target's own token
        return verify_strict(parents, depths, tokens, believed, depth_limit, max_depth)

    monkeypatch.setattr(verify_module, "verify_strict", credulous)
    speculative = {"model": str(head_folder), "tree": "chain"}
    checks = verify_lossless(base, speculative, PROMPTS, (0.0, COLD), max_tokens=12, batch=4, samples=100)
    assert ("bits", False) in kinds(checks)
    assert ("distribution", False) in kinds(checks)
    assert not verdict(checks, "strict")[0]


def test_the_two_sample_test_has_the_rate_it_promises_and_power():
    dice = random.Random(0)

    def samples(weights, count=400):
        return Counter(tuple(dice.choices(range(5), weights, k=3)) for _ in range(count))

    same = [two_sample_test(samples([5, 2, 1, 1, 1]), samples([5, 2, 1, 1, 1]))[0] for _ in range(200)]
    assert 0.02 < sum(p < 0.1 for p in same) / 200 < 0.2
    assert two_sample_test(samples([5, 2, 1, 1, 1]), samples([3, 4, 1, 1, 1]))[0] < 1e-6
    assert two_sample_test(Counter({(1,): 50}), Counter({(1,): 70})) == (1.0, 1)
    chance, cells = two_sample_test(Counter({(1, 2): 60, (1, 3): 40}), Counter({(1, 2): 40, (1, 3): 60}))
    assert cells == 2
    assert 0.001 < chance < 0.02


def test_a_verdict_says_what_was_and_was_not_seen():
    good, blind, bad = (Check("distribution", "", "", passed) for passed in (True, None, False))
    same = Check("bits", "", "", True)
    found = "and no difference in distribution found"
    assert verdict([good], "token") == (True, f"lossless: bits not compared {found}")
    assert verdict([same, good], "token") == (True, f"lossless: the same tokens at temperature 0 {found}")
    assert not verdict([], "token")[0]
    assert "raise --samples" in verdict([good, blind], "strict")[1]
    assert verdict([good, bad], "strict")[1].startswith("NOT lossless")


def test_the_command_prints_the_evidence_and_a_verdict(target_folder, head_folder, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    arguments = ["verify-lossless", "--model", str(target_folder), "--head", str(head_folder), "--device", "cpu"]
    options = ["--prompts", str(prompts), "--num-prompts", "2", "--max-tokens", "8", "--max-model-len", "64"]
    assert main([*arguments, *options, "--samples", "0", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("none differs") == 4
    assert "lossless: the same bits at every temperature" in printed
    found = json.loads(output.read_text())
    assert found["lossless"]
    assert len(found["checks"]) == 4
    assert main(["verify-lossless", "--model", str(target_folder)]) == 2
    assert "name a drafter with --head or --method" in capsys.readouterr().err
    assert main([*arguments, "--samples", "-1"]) == 2
    assert lossless.ALPHA < 0.001
