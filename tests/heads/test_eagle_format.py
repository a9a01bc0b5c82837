"""EAGLE-1 heads survive both dialects, published files with their oddities are read, and what is wrong with one is said by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import check_head_fits, find_head, load_head, save_head
from headstart.heads.eagle_format import from_file, to_file
from headstart.heads.formats import family_of
from headstart.tests.heads.test_checkpoint import edit_config, llama_config, same_head
from headstart.tests.heads.test_eagle import H, T, V, make, one_document, text

I, Q, KV = 36, 60, 20  # inner size, rows of q, rows of k and v


def published(fc_bias=False, embedding=True, qkv_bias=False):
    """A file's tensors with exactly the published names and shapes, and the config of a published head."""
    shapes = {"fc.weight": (H, 2 * H), "layers.0.post_attention_layernorm.weight": (H,)}
    shapes |= {f"layers.0.self_attn.{one}_proj.weight": (rows, H) for one, rows in zip("qkv", (Q, KV, KV))}
    shapes |= {"layers.0.self_attn.o_proj.weight": (H, Q), "layers.0.mlp.down_proj.weight": (H, I)}
    shapes |= {f"layers.0.mlp.{one}_proj.weight": (I, H) for one in ("gate", "up")}
    shapes |= {"embed_tokens.weight": (V, H)} if embedding else {}
    shapes |= {"fc.bias": (H,)} if fc_bias else {}
    shapes |= (
        {f"layers.0.self_attn.{one}_proj.bias": (rows,) for one, rows in zip("qkv", (Q, KV, KV))} if qkv_bias else {}
    )
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": V, "num_attention_heads": 6, "head_dim": 10}
    return tensors, config | {"hidden_size": H, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "bias": False}


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("format", ["eagle-vllm", "eagle-sglang"])
def test_saved_heads_load_bit_by_bit(tmp_path, format, qkv_bias):
    scaling = {"rope_type": "linear", "factor": 2.0}
    head = make(attention_bias=qkv_bias, rope_scaling=scaling, base_model_name_or_path="some/target").float()
    save_head(head, tmp_path / "head", format=format)
    loaded = load_head(tmp_path / "head")
    assert family_of(loaded) == "EAGLE"
    assert loaded.config == head.config
    assert same_head(loaded, head)
    assert not loaded.embed_tokens.weight.requires_grad
    inputs = (*text(), *one_document(T))
    assert torch.equal(loaded.double()(*inputs), head.double()(*inputs))


def test_files_hold_the_published_names_and_keys(tmp_path):
    head = make().float()
    save_head(head, tmp_path / "vllm")
    save_head(head, tmp_path / "sglang", format="eagle-sglang")
    tensors, config = (load_file(tmp_path / "vllm" / "model.safetensors"), read_config(tmp_path / "vllm"))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in published()[0].items()
    }
    assert (config["architectures"], config["bias"], config["attention_bias"]) == (["LlamaForCausalLM"], False, False)
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_act"]) == ("llama", 1, "silu")
    assert (config["hidden_size"], config["vocab_size"], config["intermediate_size"]) == (H, V, I)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (6, 2, 10)
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, False)
    assert "qkv_bias" not in config
    tensors = load_file(tmp_path / "sglang" / "model.safetensors")
    assert set(tensors) == set(published(fc_bias=True)[0])
    assert not tensors["fc.bias"].any()
    config = read_config(tmp_path / "sglang")
    assert (config["architectures"], config["bias"]) == (["LlamaForCausalLMEagle"], False)
    assert to_file(make(attention_bias=True), "eagle-vllm")[1]["qkv_bias"] is True


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_bias_of_fc_is_kept_by_the_dialect_that_has_one(tmp_path):
    head = make(fc_bias=True).float()
    with pytest.raises(ValueError, match=r"'eagle-vllm' has no fc\.bias, which this head has: use 'eagle-sglang'"):
        save_head(head, tmp_path / "head", format="eagle-vllm")
    save_head(head, tmp_path / "head")
    assert read_config(tmp_path / "head")["architectures"] == ["LlamaForCausalLMEagle"]
    assert same_head(load_head(tmp_path / "head"), head)


def test_tensors_tell_of_biases_whatever_the_config_says():
    for key in ({}, {"bias": False}, {"bias": True}):
        tensors, config = published(fc_bias=True)
        del config["bias"]
        assert from_file(tensors, config | key)[0].fc_bias
        tensors, config = published(qkv_bias=True)
        shape = from_file(tensors, config | key)[0]
        assert (shape.fc_bias, shape.attention_bias) == (False, True)


def test_published_bin_files_without_embedding_take_the_targets(tmp_path):
    tensors, config = published(fc_bias=True, embedding=False)
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_head(tmp_path) == tmp_path
    head = load_head(tmp_path, dtype="float32")
    assert head.needs_embedding
    assert torch.equal(head.fc.weight, tensors["fc.weight"].half().float())
    check_head_fits(head, llama_config())
    head.take_embedding(torch.randn(V, H))
    features, tokens = text()
    assert head(features.float(), tokens, *one_document(T)).isfinite().all()
    save_head(head, tmp_path / "again")
    assert load_head(tmp_path / "again").needs_embedding  # what is the target's is not written
    with pytest.raises(ValueError, match="hidden size 24, the target has 48"):
        check_head_fits(head, llama_config(hidden_size=48))


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
            5e5,
            "linear",
        ),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 7.0, "linear"),
    ],
)
def test_rope_is_read_in_both_spellings(keys, theta, scaling):
    tensors, config = published()
    shape = from_file(tensors, config | keys)[0]
    assert shape.rope_theta == theta
    assert shape.rope_scaling == (scaling and {"rope_type": scaling, "factor": 2.0})


def test_configs_of_older_heads_say_less():
    tensors, _ = published()
    tensors["layers.0.self_attn.o_proj.weight"] = torch.randn(H, H)
    for one in "qkv":
        tensors[f"layers.0.self_attn.{one}_proj.weight"] = torch.randn(H, H)
    shape = from_file(tensors, {"num_attention_heads": 6})[0]
    assert (shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads) == (4, 6, 6)
    assert (shape.vocab_size, shape.rms_norm_eps, shape.rope_theta, shape.base_model_name_or_path) == (V, 1e-6, 1e4, "")


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def drop(name):
    return lambda tensors: tensors.pop(name)


def keep(tensors):
    return None


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (drop("layers.0.mlp.up_proj.weight"), {}, r"missing: layers\.0\.mlp\.up_proj\.weight$"),
        (drop("fc.weight"), {}, r"tensor fc\.weight is missing, expected two axes"),
        (drop("layers.0.self_attn.k_proj.weight"), {}, r"k_proj\.weight is missing"),
        (put("layers.0.input_layernorm.weight", torch.ones(H)), {}, r"unexpected: layers\.0\.input_layernorm\.weight$"),
        (put("lm_head.weight", torch.ones(V, H)), {}, r"unexpected: lm_head\.weight$"),
        (put("layers.0.self_attn.o_proj.bias", torch.ones(H)), {}, r"unexpected: layers\.0\.self_attn\.o_proj\.bias$"),
        (put("fc.weight", torch.ones(H, 3 * H)), {}, r"fc\.weight is \(24, 72\), expected \(24, 48\)"),
        (put("fc.bias", torch.zeros(H + 1)), {}, r"fc\.bias is \(25,\), expected \(24,\)"),
        (put("layers.0.self_attn.q_proj.bias", torch.ones(Q)), {}, r"missing: .*k_proj\.bias, .*v_proj\.bias"),
        (
            put("layers.0.mlp.up_proj.weight", torch.ones(I + 1, H)),
            {},
            r"up_proj\.weight is \(37, 24\), expected \(36, 24\)",
        ),
        (put("layers.0.self_attn.k_proj.weight", torch.ones(25, H)), {}, "has 25 rows, expected a multiple of .* 10"),
        (
            put("layers.0.post_attention_layernorm.weight", torch.ones(H, dtype=torch.int64)),
            {},
            r"post_attention_layernorm\.weight is torch\.int64, expected floating point",
        ),
        (keep, {"vocab_size": 99}, r'"vocab_size": 99, tensor embed_tokens\.weight says 37'),
        (
            keep,
            {"num_attention_heads": 5},
            r'"num_attention_heads": 5, the 60 rows of .*q_proj\.weight are 6 heads of 10',
        ),
        (keep, {"head_dim": None, "num_attention_heads": None}, 'must say "head_dim" or "num_attention_heads"'),
        (keep, {"hidden_act": "gelu"}, '"hidden_act": \'gelu\', expected "silu"'),
        (
            keep,
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
            "rope_theta twice and differently: 1.0, 2.0",
        ),
        (keep, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic', expected one of default"),
        (
            keep,
            {"rope_scaling": {"type": "llama3", "factor": 2.0}},
            "rope scaling .* is not complete: .*low_freq_factor",
        ),
        (keep, {"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, got 'small'"),
        (drop("embed_tokens.weight"), {"vocab_size": None}, 'must say "vocab_size"; it says None'),
    ],
)
def test_what_is_wrong_with_a_file_is_named(change, keys, message):
    tensors, config = published()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        from_file(tensors, config | keys)


def test_a_file_without_fc_is_still_known_for_an_eagle_head(tmp_path):
    save_head(make().float(), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    del tensors["fc.weight"]
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    (tmp_path / "head" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: tensor fc\.weight is missing"):
        load_head(tmp_path / "head")
    edit_config(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(ValueError, match=r"tensor fc\.weight is missing"):
        load_head(tmp_path / "head")
