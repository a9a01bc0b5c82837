"""Sliding layers in files of block drafters: what each project means by the same keys."""

import re

import pytest
import torch

from headstart.heads.families import from_file, to_file
from headstart.tests.heads.formats.test_block import file_of, make

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=9)
SLIDES = dict(sliding_layers=(0,), sliding_window=9)


@pytest.mark.parametrize(
    ("said", "nested", "expected", "notes"),
    [
        ({}, {}, dict(sliding_is_causal=True), 1),  # SpecForge's, which z-lab's look like
        ({"is_causal": False}, {}, {}, 0),
        ({}, {"causal": False}, {}, 0),
        ({}, {"causal": True}, dict(sliding_is_causal=True, is_causal=True), 0),
    ],
)
def test_sliding_layers_of_published_files_are_read(said, nested, expected, notes):
    tensors, config = file_of()
    config |= SLIDING | said | {"dflash_config": config["dflash_config"] | nested}
    _, reading = from_file(tensors, config)
    assert (reading.config, len(reading.notes)) == (make(**SLIDES, **expected).config, notes)


@pytest.mark.parametrize(("non_causal", "is_causal"), [(True, False), (False, True), (None, True)])
def test_sliding_layers_of_the_library_are_read(non_causal, is_causal):
    tensors, config = to_file(make(), "speculators", torch.randn(50, 24))
    config["transformer_layer_config"] |= SLIDING
    config["sliding_window_non_causal"] = non_causal
    _, reading = from_file(tensors, config)
    expected = make(**SLIDES, sliding_is_causal=is_causal, window_of_block=True).config
    assert (reading.config, reading.notes) == (expected, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            '"use_sliding_window": None and "sliding_window": None beside 1',
        ),
        ({"use_sliding_window": True, "sliding_window": 9}, '"sliding_window": 9 beside 0 layers of sliding_attention'),
        (SLIDING | {"swa_window_size": 5}, '"sliding_window": 9 and "swa_window_size": 5: readers differ'),
        (SLIDING | {"sliding_window": 5}, "sliding_window must be at least a block's 6 slots, got 5"),
        ({"layer_types": ["full_attention", "chunked"]}, "expected a list of full_attention and sliding_attention"),
        (
            {"dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3, 5], "use_swa": True}},
            '"use_swa": True; only False',
        ),
    ],
)
def test_keys_of_sliding_layers_that_do_not_fit_are_named(changes, message):
    tensors, config = file_of()
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(tensors, config | changes)
