"""Scales and caps in files of block drafters: read where z-lab's code looks, written where vLLM does, and refused elsewhere."""

import json
import re

import pytest
import torch

from headstart.heads.block_config import BlockConfig
from headstart.heads.checkpoint import read_head, save_head
from headstart.heads.families import from_file, to_file
from headstart.tests.heads.formats.test_block import DFLASH2, DSPARK, SHAPE, file_of, make

SCALES = dict(input_embedding_scale=2.5, output_multiplier=0.19611613513818404, final_logit_softcapping=20.0)
MEMBERS = {"dflash": {}, "dspark": DSPARK, "dflash2": DFLASH2}


@pytest.mark.parametrize("scales", [*({one: SCALES[one]} for one in SCALES), SCALES], ids=[*SCALES, "all"])
@pytest.mark.parametrize("member", MEMBERS)
def test_scales_are_read_back(tmp_path, member, scales):
    head = make(**MEMBERS[member] | scales)
    save_head(head, tmp_path / "head")
    file = read_head(tmp_path / "head")
    assert (file.format, file.notes, file.head.config) == ("dflash", (), head.config)
    said = json.loads((tmp_path / "head" / "config.json").read_text())
    assert {key: said["dflash_config"][key] for key in SCALES if key in said["dflash_config"]} == scales
    at_top = {key: said[key] for key in SCALES if key in said}
    assert at_top == (scales if member == "dspark" else {})
    with pytest.raises(
        ValueError, match=f"scale and cap nothing, and this head has {' and '.join(scales)}: use 'dflash'"
    ):
        save_head(head, tmp_path / "library", "speculators", lm_head_weight=torch.randn(50, 24))


def test_the_keys_of_a_published_dflash2_file_are_read():
    """Those of z-lab/Muse-Glimmer-30B-DFlash2, but for the sizes: all layers slide, none is causal, logits scaled and capped."""
    scales = {key: SCALES[key] for key in ("output_multiplier", "final_logit_softcapping")}
    slides = dict(sliding_layers=(0, 1), sliding_window=2048)
    tensors, ours = to_file(make(**DFLASH2 | scales | slides), "dflash")
    config = {key: ours[key] for key in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")}
    config |= {key: ours[key] for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "num_hidden_layers")}
    config |= dict(architectures=["DFlash2DraftModel"], model_type="qwen3", is_causal=False, num_target_layers=8)
    config |= dict(attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02)
    config |= dict(max_position_embeddings=131072, max_window_layers=2, tie_word_embeddings=False, use_cache=False)
    config |= dict(layer_types=["sliding_attention"] * 2, sliding_window=2048, use_sliding_window=True)
    config |= dict(rope_parameters=dict(rope_theta=500000.0, rope_type="default"))
    config["dflash_config"] = dict(
        block_size=6,
        mask_token_id=49,
        target_layer_ids=[1, 3, 5],
        selector_rank=3,
        selector_top_k=7,
        conv_kernel_size=2,
        conv_group_size=4,
        **scales,
    )
    _, reading = from_file(tensors, config)
    own = dict(rope_theta=500000.0, max_position_embeddings=131072, base_model_name_or_path="")
    assert reading.config == BlockConfig(**SHAPE | DFLASH2 | scales | slides | own)
    assert reading.notes == []


@pytest.mark.parametrize("neutral", [dict(output_multiplier=1.0, final_logit_softcapping=0), dict.fromkeys(SCALES)])
def test_neutral_values_are_none(neutral):
    tensors, config = file_of()
    config["dflash_config"] |= neutral
    _, reading = from_file(tensors, config)
    assert (reading.config, reading.notes) == (make().config, [])


def test_scales_at_the_top_count_and_those_in_dflash_config_count_more():
    tensors, config = file_of()
    config["dflash_config"]["output_multiplier"] = 0.5
    _, reading = from_file(tensors, config | SCALES)
    assert reading.config == make(**SCALES | dict(output_multiplier=0.5)).config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_multiplier": 0}, '"output_multiplier": 0, expected a number above 0'),
        ({"output_multiplier": -0.5}, '"output_multiplier": -0.5, expected a number above 0'),
        ({"input_embedding_scale": 0.0}, '"input_embedding_scale": 0.0, expected a number above 0'),
        ({"input_embedding_scale": "2"}, "\"input_embedding_scale\": '2', expected a number above 0"),
        ({"final_logit_softcapping": -20.0}, '"final_logit_softcapping": -20.0, expected a number of at least 0'),
        ({"final_logit_softcapping": True}, '"final_logit_softcapping": True, expected a number of at least 0'),
        ({"output_multiplier": float("inf")}, '"output_multiplier": inf, expected a number above 0'),
        ({"output_multiplier": float("nan")}, '"output_multiplier": nan, expected a number above 0'),
    ],
)
def test_values_that_cannot_be_are_named(changes, message):
    tensors, config = file_of()
    config["dflash_config"] |= changes
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(tensors, config)


@pytest.mark.parametrize("place", ["top", "layer"])
def test_the_speculators_library_knows_none(place):
    tensors, config = to_file(make(), "speculators", torch.randn(50, 24))
    (config if place == "top" else config["transformer_layer_config"])["final_logit_softcapping"] = 30.0
    with pytest.raises(ValueError, match=r"library, which has no such key, only 0\.0 is supported"):
        from_file(tensors, config)
