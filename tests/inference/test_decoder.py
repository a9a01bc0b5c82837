"""The engine's decoder against transformers' own forward, for each supported family, in fp32."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headstart.inference.cache import PagedCache
from headstart.inference.decoder import Decoder, UnsupportedArchitecture, check_supported
from headstart.inference.engine import Engine
from headstart.inference.tree import chain
from headstart.inference.verify import TreeTensors

SHAPE = dict(
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=113,
    max_position_embeddings=300,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama-head-dim": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=20)),
    "llama-rope-llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama-rope-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # biases and norms start as constants: give them something to show
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    tokens = torch.randint(0, 113, (1, 150))
    with torch.no_grad():
        expected = model(tokens).logits[0]
    decoder = Decoder(model, 300)
    cache = PagedCache(2, 4, decoder.num_kv_heads, decoder.head_dim, torch.float32, torch.device("cpu"))
    engine = Engine(decoder, cache, None, frozenset())
    table = cache.block_table([SimpleNamespace(pages=[3, 1, 2])])
    found = []
    with torch.no_grad():
        for start in range(0, 150, 50):
            hidden = engine._forward(
                TreeTensors(chain(49), "cpu"), tokens[:, start : start + 50], torch.tensor([start]), table, [start]
            )
            found.append(decoder.logits(hidden[0]))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (MistralConfig(**SHAPE, sliding_window=64), "sliding-window"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "activation"),
        (
            LlamaConfig(**(SHAPE | dict(hidden_size=96, num_attention_heads=48, num_key_value_heads=2))),
            "48 query heads",
        ),
        (
            LlamaConfig(**SHAPE, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_does_not_run_yet_is_refused_with_what_does(config, what):
    with pytest.raises(UnsupportedArchitecture, match=f"does not run {what}.*It runs model types llama"):
        check_supported(config)
