"""z-lab's files of block drafters: what is written is read back, published keys are read, and other dialects are named."""

import json
import re

import pytest
import torch

from headstart.heads.block import BlockConfig, BlockHead
from headstart.heads.checkpoint import load_head, read_head, save_head
from headstart.heads.families import family_of, from_file, recognise, to_file

SHAPE = dict(
    hidden_size=24,
    vocab_size=50,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    mask_token_id=49,
    aux_layer_ids=(2, 4, 6),
    num_target_layers=8,
    num_speculative_tokens=5,
    rope_theta=1e6,
    base_model_name_or_path="some/target",
)


def make(**changes):
    torch.manual_seed(0)
    head = BlockHead(BlockConfig(**SHAPE | changes))
    head.take_embedding(torch.randn(50, 24))
    return head


def file_of(head=None):
    """A file as z-lab's code writes it: of the keys that we write, only those that it has."""
    tensors, config = to_file(head or make(), "dflash")
    for key in ("is_causal", "rope_parameters", "num_speculative_tokens", "dtype", "mlp_bias"):
        config.pop(key, None)
    return tensors, json.loads(json.dumps(config))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_head_is_read_back(tmp_path, is_causal):
    head = make(is_causal=is_causal)
    save_head(head, tmp_path / "head")
    file = read_head(tmp_path / "head")
    assert (file.format, file.notes, file.head.config) == ("dflash", (), head.config)
    assert family_of(file.head).key == "block"
    assert file.head.needs_embedding
    found, expected = file.head.state_dict(), head.state_dict()
    assert found.keys() == expected.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    said = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (said["architectures"], said["model_type"], said["block_size"]) == (["DFlashDraftModel"], "qwen3", 6)
    assert said["dflash_config"] == {"mask_token_id": 49, "target_layer_ids": [1, 3, 5]}
    assert load_head(tmp_path / "head", dtype="bfloat16").fc.weight.dtype == torch.bfloat16


def test_published_names_are_z_labs():
    """The list is of files on the Hub, written out here: to_file and from_file agree with each other whatever they say."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    parts = ["input_layernorm", "post_attention_layernorm", *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))]
    parts += [f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names |= {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    tensors, _ = to_file(make(), "dflash")
    assert tensors.keys() == names
    assert recognise(names).key == "block"


def test_newer_and_older_places_of_keys_are_read():
    tensors, config = file_of()
    kind, reading = from_file(tensors, config)
    assert (kind, reading.config, reading.notes) == (BlockHead, make().config, [])
    moved = config | {"dflash_config": config["dflash_config"] | {"block_size": 6, "causal": True}}
    del moved["block_size"]
    assert from_file(tensors, moved)[1].config == make(is_causal=True).config
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    assert from_file(prefixed, config)[1].config == make().config


def test_tensors_decide():
    tensors, config = file_of()
    _, reading = from_file(tensors, config | {"num_hidden_layers": 5, "intermediate_size": 41})
    assert reading.config == make().config
    assert [note.split(";")[0] for note in reading.notes] == [
        'config.json says "intermediate_size": 41',
        'config.json says "num_hidden_layers": 5',
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_size": None},
            '"block_size", at its top or in dflash_config: a whole number of at least 2; it says None',
        ),
        ({"block_size": 1}, "a whole number of at least 2; it says 1"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, 'config.json must say "mask_token_id"'),
        ({"dflash_config": {"mask_token_id": 49}}, 'must say "target_layer_ids" in dflash_config'),
        ({"dflash_config": [1]}, '"dflash_config": [1], expected an object'),
        (
            {"dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3]}},
            "has 72 columns, expected 48: target_layer_ids",
        ),
        ({"dflash_config": {"mask_token_id": 49, "target_layer_ids": [5, 3, 1]}}, "must be ascending layer numbers"),
        (
            {"dflash_config": {"mask_token_id": 50, "target_layer_ids": [1, 3, 5]}},
            "must be below the vocab_size 50, got 50",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, '"layer_types" with sliding_attention'),
        ({"is_causal": "no"}, "must say is_causal or dflash_config's causal, true or false"),
        ({"speculators_model_type": "dflash"}, "\"speculators_model_type\": 'dflash'"),
        ({"sample_from_anchor": True}, '"sample_from_anchor": True; only False is supported'),
        ({"output_multiplier": 0.5}, '"output_multiplier": 0.5; only 1.0 is supported'),
    ],
)
def test_keys_that_do_not_fit_are_named(changes, message):
    tensors, config = file_of()
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(tensors, config | changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("markov_head.markov_w1.weight", "markov_head.markov_w1.weight belongs to DSpark's edge"),
        ("confidence_head.proj.weight", "belongs to DSpark's confidence"),
        ("candidate_selector.hidden_projection.weight", "belongs to DFlash2's selector"),
        ("layers.0.attention_conv.base_kernel", "layers.0.attention_conv.base_kernel belongs to DFlash2's convolution"),
        ("lm_head.weight", "lm_head.weight belongs to the dialect of speculators or DeepSpec"),
        ("layers.1.self_attn.o_proj.bias", "unexpected: layers.1.self_attn.o_proj.bias"),
    ],
)
def test_tensors_of_other_members_are_named(name, message):
    tensors, config = file_of()
    with pytest.raises(ValueError, match=message):
        from_file(tensors | {name: torch.zeros(2, 2)}, config)


def test_missing_and_misshapen_tensors_are_named():
    tensors, config = file_of()
    without = {name: tensor for name, tensor in tensors.items() if name != "layers.1.self_attn.k_norm.weight"}
    with pytest.raises(ValueError, match=r"missing: layers\.1.self_attn.k_norm.weight"):
        from_file(without, config)
    with pytest.raises(ValueError, match=r"tensor norm.weight is \(3,\), expected \(24,\)"):
        from_file(tensors | {"norm.weight": torch.zeros(3)}, config)
