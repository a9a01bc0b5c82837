"""A target that runs as its own module (OPT) behind the server, from its folder: answers and streams equal LLM's own."""

import openai
import pytest
import torch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from headstart import LLM, SamplingParams
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.tests.inference.server.serving import NAME, PROMPTS, TARGET, running

NEW = 13  # one token after the prompt, then by four where every draft is right
FEW = [40, 41, 42]  # tokens: where an output has no others, prompt lookup is often right
GIVEN = [dict(temperature=0.0), dict(temperature=0.8, seed=5), dict(temperature=1.0, seed=6, allowed_token_ids=FEW)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small random OPT with the embedded target's tokenizer, and a smaller one that can draft for it."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    found = []
    for seed, width in enumerate((48, 24)):
        shape = dict(hidden_size=width, word_embed_proj_dim=width, ffn_dim=2 * width, num_attention_heads=4)
        torch.manual_seed(seed)
        config = OPTConfig(
            **shape, **ids, vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=256, init_std=0.3
        )
        found.append(tmp_path_factory.mktemp(f"opt-{width}"))
        OPTForCausalLM(config).eval().save_pretrained(found[-1])
        tokenizer.save_pretrained(found[-1])
    return found


@pytest.fixture(scope="module")
def own(folders):
    """Texts of LLM without speculation, alone: [prompt][parameters]"""
    llm = LLM(str(folders[0]), dtype="float32", device="cpu")
    params = [SamplingParams(max_tokens=NEW, **given) for given in GIVEN]
    return [[llm.generate([prompt], one)[0].outputs[0].text for one in params] for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("kind", ["ngram", "draft model", "the target itself"])
def test_answers_and_streams_of_an_opt_are_those_of_llm(kind, folders, own):
    target, draft = map(str, folders)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    if kind != "ngram":
        config = {"model": draft if kind == "draft model" else target, "num_speculative_tokens": 3}
    llm = LLM(target, dtype="float32", device="cpu", speculative_config=config)
    assert isinstance(llm.engine.decoder, ModuleDecoder)
    told = {"return_speculation_metrics": True}
    accepted = drafted = 0
    with running(llm) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
        for prompt, texts in zip(PROMPTS, own):
            for given, text in zip(GIVEN, texts):
                asked = dict(model=NAME, prompt=prompt, max_tokens=NEW, extra_body=given | told)
                answer = client.completions.create(**asked)
                assert answer.choices[0].text == text
                pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
                assert "".join(pieces) == text
                accepted += answer.metrics["speculative_decoding"]["num_accepted_draft_tokens"]
                drafted += answer.metrics["speculative_decoding"]["num_draft_tokens"]
    assert drafted > 0
    assert accepted >= {"ngram": 1, "draft model": 0, "the target itself": 0.9 * drafted}[kind]
