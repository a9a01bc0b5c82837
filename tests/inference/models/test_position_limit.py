"""Longest sequences: with scaled rope they go to the length that it was scaled to, in the engine as in transformers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import LLM, SamplingParams
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.inference.models.decoder import position_limit
from headstart.train.teacher.features import FrozenTarget

LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
ORIGINAL = dict(original_max_position_embeddings=64)
# rope_parameters, max_position_embeddings, the limit
LIMITS = {
    "default": (dict(rope_type="default", rope_theta=10000.0), 64, 64),
    "linear": (LINEAR, 64, 256),
    "linear by no whole number": (LINEAR | dict(factor=2.55), 64, 163),
    "yarn": (YARN | ORIGINAL, 64, 256),
    "yarn without the original length": (YARN, 64, 256),
    "yarn with room for more, as Qwen3 is published": (YARN | ORIGINAL, 80, 256),
    "yarn in a config of the scaled length": (YARN | ORIGINAL, 256, 256),
    "yarn in a config of a greater length": (YARN | ORIGINAL, 300, 300),
    "llama3, always in a config of the scaled length": (LLAMA3 | ORIGINAL, 256, 256),
}


def make_model(rope, length):
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=113,
        max_position_embeddings=length,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters=dict(rope),
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", LIMITS)
def test_every_position_up_to_the_limit_is_that_of_transformers(name):
    rope, length, limit = LIMITS[name]
    model = make_model(rope, length)
    llm = LLM(model, max_num_seqs=1)
    assert position_limit(model.config) == llm.max_model_len == FrozenTarget(model).max_positions == limit
    prompt = torch.randint(0, 113, (limit - 9,)).tolist()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, prompt_logprobs=0))
    tokens = torch.tensor(prompt + output.outputs[0].token_ids)
    assert len(tokens) == limit
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].log_softmax(-1)
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:])]
    assert found == pytest.approx(expected[range(limit - 10), prompt[1:]].tolist(), abs=2e-4)
    assert torch.equal(expected[limit - 10 : -1].argmax(-1), tokens[limit - 9 :])
    with pytest.raises(ValueError, match=f"own limit of {limit}, got {limit + 1}"):
        LLM(model, max_model_len=limit + 1)


def test_speculation_changes_no_token_past_max_position_embeddings():
    model = make_model(YARN | ORIGINAL, 64)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=150) for t in (0.0, 1.0)]
    prompts = [torch.randint(0, 113, (length,)).tolist() for length in (90, 60)]
    plain = [o.outputs[0].token_ids for o in LLM(model).generate(prompts, params)]
    assert min(map(len, plain)) == 150
    head = Eagle(EagleConfig.for_target(model.config))
    for speculative in (dict(model=head), dict(method="ngram")):
        llm = LLM(model, speculative_config=speculative | dict(num_speculative_tokens=4))
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == plain
