"""Medusa heads survive every format bit by bit; configs have the keys that readers need. Published files: test_published.py."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from headstart.heads.checkpoint import load_head, save_head
from headstart.tests.heads.test_checkpoint import H, V, llama_config, make_head, same_head


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("shared", "format"), [(False, "medusa"), (True, "medusa-shared"), (False, "vllm"), (True, "vllm")]
)
def test_saved_heads_load_bit_by_bit(tmp_path, shared, format, num_layers):
    head = make_head(num_layers=num_layers, shared=shared)
    save_head(head, tmp_path / "head", format=format, lm_head_weight=torch.randn(V, H))
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head.config
    assert same_head(loaded, head)


@pytest.mark.parametrize(("shared", "weights"), [(False, 3), (True, 2)])
def test_default_format_is_the_one_that_fits_the_head(tmp_path, shared, weights):
    save_head(make_head(num_heads=1, shared=shared), tmp_path / "head")
    assert len(load_file(tmp_path / "head" / "medusa_lm_head.safetensors")) == weights
    assert not (tmp_path / "head" / "medusa_lm_head.pt").exists()
    assert load_head(tmp_path / "head").config.shared_lm_head is shared


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_logits_are_those_of_the_original_code(tmp_path, shared, num_layers):
    """FasterDecoding's maths, written here from its .pt: Sequential(ResBlock, ..., Linear), all by the file's names."""
    save_head(make_head(num_layers=num_layers, shared=shared), tmp_path / "head", torch_file=True)
    raw = torch.load(tmp_path / "head" / "medusa_lm_head.pt", weights_only=True)
    features, target_lm_head = torch.randn(5, H), torch.randn(V, H)
    ours, offsets = load_head(tmp_path / "head")(features, target_lm_head)
    assert offsets == (2, 3, 4)
    for k in range(3):
        x = features
        for j in range(num_layers):
            x = x + F.silu(x @ raw[f"{k}.{j}.linear.weight"].T + raw[f"{k}.{j}.linear.bias"])
        expected = x @ (target_lm_head if shared else raw[f"{k}.{num_layers}.weight"]).T
        torch.testing.assert_close(ours[k], expected, rtol=1e-5, atol=1e-4)


def test_files_hold_the_published_names_and_keys(tmp_path):
    head = make_head(num_heads=2)
    save_head(head, tmp_path / "medusa")
    assert sorted(load_file(tmp_path / "medusa" / "medusa_lm_head.safetensors")) == [
        *("0.0.linear.bias", "0.0.linear.weight", "0.1.weight"),
        *("1.0.linear.bias", "1.0.linear.weight", "1.1.weight"),
    ]
    config = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert {key: config[key] for key in config if key != "transformers_version"} == {
        "base_model_name_or_path": "some/target",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
    }
    save_head(make_head(num_heads=2, shared=True), tmp_path / "shared")
    config = json.loads((tmp_path / "shared" / "config.json").read_text())
    assert (config["version"], config["hidden_size"], config["vocab_size"]) == ("2", H, V)
    assert "architectures" not in config


def read_vllm_config(path):
    """Read a config.json as vLLM's MedusaConfig.from_pretrained does: any key with "num" and "heads" is num_heads."""
    config = json.loads(path.read_text())
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    return config


@pytest.mark.parametrize("shared", [False, True])
def test_vllm_files_give_its_reader_every_tensor_and_key(tmp_path, shared):
    head, target_lm_head = make_head(num_layers=2, shared=shared), torch.randn(V, H)
    save_head(head, tmp_path / "head", format="vllm", lm_head_weight=target_lm_head)
    config = read_vllm_config(tmp_path / "head" / "config.json")
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    assert (config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]) == (H, V, V)
    assert (config["max_paths"], config["topk"], config["logit_scale"]) == (64, 10, 1.0)
    assert config["medusa_fc_bias"] is True
    assert config["original_lm_head"] is shared

    tensors = load_file(tmp_path / "head" / "model.safetensors")
    parts = ("weight", "bias")
    blocks = {f"blocks.{k}.layers.{j}.{part}" for k in range(3) for j in range(2) for part in parts}
    assert set(tensors) == blocks | ({"lm_heads.0.weight"} if shared else {f"lm_heads.{k}.weight" for k in range(3)})
    if shared:
        assert torch.equal(tensors["lm_heads.0.weight"], target_lm_head)
    assert torch.equal(tensors["blocks.2.layers.1.bias"], head.heads[2].blocks[1].linear.bias)


def test_blocks_tied_by_the_original_code_come_apart(tmp_path):
    """The original code repeats one ResBlock object if layers > 1, so its .pt shares storage between the names."""
    block, lm_head = torch.nn.Linear(H, H), torch.nn.Linear(H, V, bias=False)
    names = {f"0.{j}.linear.{part}": value for j in range(2) for part, value in block.state_dict().items()}
    (tmp_path / "head").mkdir()
    torch.save(names | {"0.2.weight": lm_head.weight.detach()}, tmp_path / "head" / "medusa_lm_head.pt")
    (tmp_path / "head" / "config.json").write_text("{}")
    first, second = (one.linear.weight for one in load_head(tmp_path / "head").heads[0].blocks)
    assert torch.equal(first, block.weight)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_the_dtype_is_said_where_readers_ask_for_it(tmp_path):
    """SGLang assumes float16 if the config has no dtype, whatever the dtype of tensors and target."""
    for format, expected in (("vllm", "bfloat16"), ("medusa", None)):
        save_head(make_head(), tmp_path / format, format=format, dtype="bfloat16")
        config = json.loads((tmp_path / format / "config.json").read_text())
        assert config.get("dtype") == config.get("torch_dtype") == expected


def test_shared_heads_without_vocab_size_ask_the_target_they_name(tmp_path):
    llama_config(vocab_size=V, hidden_size=H).save_pretrained(tmp_path / "target")
    save_head(make_head(shared=True, base=str(tmp_path / "target")), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("vocab_size", "hidden_size")})
    )
    assert load_head(tmp_path / "head").config.vocab_size == V
    (tmp_path / "target" / "config.json").unlink()
    with pytest.raises(ValueError, match=r'add "vocab_size" to config\.json'):
        load_head(tmp_path / "head")


def test_formats_that_do_not_fit_the_head_are_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="use 'medusa-shared'"):
        save_head(make_head(shared=True), tmp_path / "head", format="medusa")
    with pytest.raises(ValueError, match="use 'medusa'"):
        save_head(make_head(), tmp_path / "head", format="medusa-shared")
    with pytest.raises(ValueError, match="pass lm_head_weight"):
        save_head(make_head(shared=True), tmp_path / "head", format="vllm")
    with pytest.raises(ValueError, match=r"'gguf'.*expected one of medusa, medusa-shared, vllm"):
        save_head(make_head(), tmp_path / "head", format="gguf")
    assert list(tmp_path.iterdir()) == []
