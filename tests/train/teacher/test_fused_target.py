"""The frozen target on the engine's norms and activations: the library's formulas, where no graph is recorded, and nowhere else."""

import pytest
import torch
import transformers

from headstart.train.teacher import fused_target
from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.fused_attention import attention_keywords
from headstart.train.teacher.fused_target import fuse

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 100,
}
# How many of their modules are of the formulas: of a layer two norms (Qwen 3: four), an attention and an MLP; the last norm.
FAMILIES = {
    "llama": (transformers.LlamaConfig(**SHAPE), 9),
    "qwen3": (transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16), 13),
    "gelu": (
        transformers.LlamaConfig(**SHAPE, hidden_act="gelu", initializer_range=1e-3),
        7,
    ),  # of small products all are alike
    "gemma": (transformers.GemmaConfig(**SHAPE, num_key_value_heads=2, head_dim=16), 2),
    "gpt2": (transformers.GPT2Config(vocab_size=48, n_embd=64, n_layer=2, n_head=4), 0),
}


def make(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family][0]).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # norms that do something
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_the_formulas_are_found(family):
    model = make(family)
    assert fuse(model) == FAMILIES[family][1]
    assert fuse(model) == 0


GROUPED = SHAPE | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# What each layer's attention tells the attention function; None: it is left alone.
ATTENTIONS = {
    "MistralConfig": (GROUPED | {"sliding_window": 7}, [{"sliding_window": 7}] * 2),
    "Gemma2Config": (
        GROUPED | {"head_dim": 16, "sliding_window": 5},
        [{"sliding_window": 5, "softcap": 50.0}, {"sliding_window": None, "softcap": 50.0}],
    ),
    "SmolLM3Config": (
        GROUPED | {"no_rope_layers": [1, 0]},
        [{"sliding_window": None}, None],
    ),  # the last does not rotate
    "CohereConfig": (GROUPED, [None, None]),  # pairs side by side
    "GlmConfig": (GROUPED | {"head_dim": 16}, [None, None]),  # half of each head
    "GptOssConfig": (GROUPED | {"head_dim": 16, "num_local_experts": 4}, [None, None]),  # sinks
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_is_taken_over_layer_by_layer_where_it_is_ours(kind):
    keys, expected = ATTENTIONS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys)).eval()
    before = model.config._attn_implementation
    assert [attention_keywords(layer.self_attn) for layer in model.model.layers] == expected
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model.model.layers[0].self_attn)


RUN = [("MistralConfig", "sdpa"), ("SmolLM3Config", "sdpa"), ("MistralConfig", "eager"), ("Gemma2Config", "eager")]


@pytest.mark.parametrize(("kind", "attention"), RUN)
def test_attention_on_the_kernel_gives_the_librarys_logits(kind, attention, monkeypatch):
    """On the CPU, as if it were a GPU. Eager attention is not one of the library's functions: it is left to it."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**ATTENTIONS[kind][0])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(0))
    calls, real = [], fused_target.attend
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        fuse(model)
        monkeypatch.setattr(fused_target, "on_triton", lambda x: True)
        monkeypatch.setattr(fused_target, "attend", lambda *given: calls.append(given[-1]) or real(*given))
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
        assert len(calls) == (sum(map(bool, ATTENTIONS[kind][1])) if attention == "sdpa" else 0)
        model(input_ids=ids, use_cache=True)  # a cache wants the keys: the library's own way
        assert len(calls) == (sum(map(bool, ATTENTIONS[kind][1])) if attention == "sdpa" else 0)


def test_packed_weights_are_left_to_their_library():
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(100, 32, dtype=torch.uint8), requires_grad=False)
    assert fuse(model) == 7


def test_kernels_run_without_a_graph_alone(monkeypatch):
    """On the CPU, as if it were a GPU: there the kernels' references stand for them."""
    model, calls = make("llama"), []
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, use_cache=False).logits
    fuse(model)
    monkeypatch.setattr(fused_target, "on_triton", lambda x: calls.append(x.dtype) or True)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)  # with gradients switched on
    assert not calls
    with torch.no_grad():
        assert torch.equal(
            model.double()(input_ids=ids, use_cache=False).logits.float(),
            make("llama").double()(input_ids=ids, use_cache=False).logits.float(),
        )
        assert not calls
        torch.testing.assert_close(model.float()(input_ids=ids, use_cache=False).logits, expected)
    assert len(calls) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_features_are_the_librarys(family, dtype):
    plain, fused = (make(family).to("cuda", dtype) for _ in range(2))
    gold = make(family).to("cuda", torch.float64)
    target = FrozenTarget(fused)
    assert all("forward" in vars(layer.mlp) for layer in target.decoder.layers)
    ids = torch.randint(0, 48, (3, 70), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        exact, *found = (model(input_ids=ids, use_cache=False).logits.double() for model in (gold, plain, fused))
    library, ours = ((logits - exact).abs().mean().item() for logits in found)
    assert ours <= 1.2 * library
