"""EAGLE-1 heads survive both dialects, whose configs have the keys that their readers need. Published files: test_published.py."""

import json

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import check_head_fits, find_head, load_head, save_head
from headstart.heads.families import family_of
from headstart.heads.formats.eagle import from_file, to_file
from headstart.tests.heads.published import LAYOUTS
from headstart.tests.heads.published_eagle import I, eagle, llama
from headstart.tests.heads.test_checkpoint import edit_config, llama_config, same_head
from headstart.tests.heads.test_eagle import H, T, V, make, one_document, text


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("format", ["eagle-vllm", "eagle-sglang"])
def test_saved_heads_load_bit_by_bit(tmp_path, format, qkv_bias):
    scaling = {"rope_type": "linear", "factor": 2.0}
    head = make(attention_bias=qkv_bias, rope_scaling=scaling, base_model_name_or_path="some/target").float()
    save_head(head, tmp_path / "head", format=format)
    loaded = load_head(tmp_path / "head")
    assert family_of(loaded).name == "EAGLE"
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
        name: tensor.shape for name, tensor in eagle(head_dim=10).items()
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
    assert set(tensors) == set(eagle(fc_bias=True))
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


def test_published_bin_files_without_embedding_take_the_targets(tmp_path):
    layout = LAYOUTS["EAGLE, fc.bias without the key"]
    layout.write(tmp_path)
    assert find_head(tmp_path) == tmp_path
    head = load_head(tmp_path, dtype="float32")
    assert head.needs_embedding
    assert torch.equal(head.fc.weight, layout.tensors["fc.weight"].float())
    check_head_fits(head, llama_config())
    head.take_embedding(torch.randn(V, H))
    features, tokens = text()
    assert head(features.float(), tokens, *one_document(T)).isfinite().all()
    save_head(head, tmp_path / "again")
    assert load_head(tmp_path / "again").needs_embedding  # the target's embedding is not written
    with pytest.raises(ValueError, match="hidden size 24, the target has 48"):
        check_head_fits(head, llama_config(hidden_size=48))


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
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
    shape = from_file(eagle(), llama(**keys))[0]
    assert shape.rope_theta == theta
    assert shape.rope_scaling == (scaling and {"rope_type": scaling, "factor": 2.0})


def test_configs_of_older_heads_say_less():
    square = {f"layers.0.self_attn.{one}_proj.weight": torch.randn(H, H) for one in "qkvo"}
    shape = from_file(eagle() | square, {"num_attention_heads": 6})[0]
    assert (shape.head_dim, shape.num_attention_heads, shape.num_key_value_heads) == (4, 6, 6)
    assert (shape.vocab_size, shape.rms_norm_eps, shape.rope_theta, shape.base_model_name_or_path) == (V, 1e-6, 1e4, "")


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
