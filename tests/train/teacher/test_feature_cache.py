"""The folder of features: what it holds, and what it belongs to.

How it is filled and repaired: test_cache_filling.py.
"""

import os
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headstart.inference.llm import LLM
from headstart.tests.train.teacher.small_caches import (
    CPU,
    count_forwards,
    everything,
    make_target,
    packed_rows,
    process,
    read,
)
from headstart.train import medusa
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.packed.packing import pack
from headstart.train.teacher import feature_cache
from headstart.train.teacher.feature_cache import FeatureCache, describe, to_float8
from headstart.train.teacher.features import FrozenTarget, load_target

ASSET = os.path.join(os.path.dirname(__file__), "..", "..", "..", "assets", "stdlib-coder")


# ---- what it holds ----


def test_cache_gives_streams_back_as_they_were_computed(open_cache, small_shards):
    target, packed = make_target(), packed_rows()
    cache = open_cache(target, packed, layers=(1, 3))
    assert cache.num_shards > 5
    assert f"{len(packed.input_ids)} rows x 13 tokens x 96 values in float32 take" in open_cache.said[0]
    index = np.array([9, 0, 17, 9])
    parts = packed.input_ids[index], packed.position_ids[index], packed.document_ids[index]
    torch.testing.assert_close(read(cache, index), target.features(*parts, (1, 3)), rtol=1e-5, atol=1e-6)
    pairs = [slice(0, 2), slice(8, 10), slice(16, 18)]  # the forwards that these rows were computed in
    found = [
        target.features(packed.input_ids[p], packed.position_ids[p], packed.document_ids[p], (1, 3)) for p in pairs
    ]
    assert torch.equal(read(cache, index), torch.stack([found[1][1], found[0][0], found[2][1], found[1][1]]))


def test_size_that_is_told_first_is_the_size_on_disk(open_cache, small_shards, tmp_path):
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float8_e4m3fn)):
        cache = open_cache(make_target(), packed_rows(), layers=(1,), dtype=dtype)
        files = [load_file(path) for path in (tmp_path / "cache").glob("*.safetensors")]
        held = sum(tensor.nbytes for file in files for tensor in file.values())
        rows, per_token = len(packed_rows().input_ids), (4 * 64, 2 * 64, 64 + 2 * 4)[i]
        assert held == rows * 13 * per_token
        cache._check_disk()
        assert f"take {held / 1e6:,.0f} MB of disk" in open_cache.said[0]
        shutil.rmtree(tmp_path / "cache")


def test_bfloat16_and_float8_are_off_by_their_rounding(open_cache, tmp_path):
    target, packed = make_target(), packed_rows()
    exact = everything(open_cache(target, packed, layers=(0, 3)))
    for dtype, least, most in ((torch.bfloat16, 5e-4, 3e-3), (torch.float8_e4m3fn, 0.01, 0.04)):
        shutil.rmtree(tmp_path / "cache")
        kept = everything(open_cache(target, packed, layers=(0, 3), dtype=dtype))
        assert kept.dtype == torch.float32
        for a, b in zip(kept.split(32, -1), exact.split(32, -1)):
            error = ((a - b).norm(dim=-1) / b.norm(dim=-1)).mean().item()
            assert least < error < most


def test_float8_keeps_small_channels_beside_outliers():
    torch.manual_seed(0)
    states = torch.randn(50, 64)
    states[:, 5] *= 1000
    states[3] = 0
    states[4] *= 1e-30
    values, scales = to_float8(states)
    found = values.float() * scales[:, None]
    assert torch.equal(found[3], torch.zeros(64))
    inside = states.abs() > states.abs().amax(-1, keepdim=True) * 2.0**-14
    assert inside[5:].float().mean() > 0.9
    worst = ((found - states).abs() / states.abs())[inside].max().item()
    assert 0.04 < worst <= 2.0**-4
    assert (values.float().abs().amax(-1)[5:] == 448).all()


def test_float8_costs_the_embedded_target_little_of_its_distribution():
    target = FrozenTarget(load_target(ASSET, CPU, "float32")[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSET)
    conversations = load_conversations(os.path.join(ASSET, "heldout.jsonl"))[:4]
    packed = pack(encode_conversations(tokenizer, conversations), 256)
    states = target.features(packed.input_ids[:2], packed.position_ids[:2], packed.document_ids[:2])
    states = states[packed.document_ids[:2] >= 0]
    values, scales = to_float8(states)
    kept = values.float() * scales[:, None]
    assert 0.015 < ((kept - states).norm(dim=-1) / states.norm(dim=-1)).mean() < 0.025
    p, q = (target.lm_head(x).log_softmax(-1) for x in (states, kept))
    assert 1e-4 < (p.exp() * (p - q)).sum(-1).mean() < 1.5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_on_a_gpu_are_those_on_the_cpu(open_cache, small_shards, dtype):
    cache = open_cache(make_target(), packed_rows(), layers=(2,), dtype=dtype)
    index = np.array([5, 3, 11])
    assert torch.equal(cache.features(cache.read(index, pinned=True), torch.device("cuda")).cpu(), read(cache, index))


# ---- what it belongs to ----


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"packed": packed_rows(seed=1)}, "rows '.*', now"),
        ({"target": make_target(seed=1)}, "target '.*', now"),
        ({"target": make_target(rms_norm_eps=1e-3)}, "target '.*', now"),
        ({"layers": (2,)}, r"layers \[1\], now \[2\]"),
        ({"layers": (1, 2)}, r"layers \[1\], now \[1, 2\]; num_streams 2, now 3"),
        ({"dtype": torch.bfloat16}, "dtype 'float32', now 'bfloat16'"),
    ],
)
def test_cache_of_something_else_is_refused_by_name(open_cache, tmp_path, changes, named):
    same = {"target": make_target(), "packed": packed_rows(), "layers": (1,)}
    open_cache(**same)
    before = {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    with pytest.raises(ValueError, match=rf"is of something else than this run asks for: {named}"):
        open_cache(**same | changes)
    assert {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before
    open_cache(**same)


def test_one_changed_matrix_makes_another_target():
    target, packed = make_target(), packed_rows()
    before = describe(target, packed, torch.float32)
    assert describe(make_target(), packed, torch.float32) == before
    target.model.model.layers[1].mlp.up_proj.weight.data *= 1.01
    after = describe(target, packed, torch.float32)
    assert [name for name in before if before[name] != after[name]] == ["target"]


def test_folder_of_something_else_is_left_alone(open_cache, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, and is not a feature cache"):
        open_cache(make_target(), packed_rows())
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["notes.txt"]


def test_cache_larger_than_the_disk_is_refused(tmp_path):
    description = describe(make_target(), packed_rows(), torch.float32) | {"num_rows": 10**12}
    said = []
    with pytest.raises(ValueError, match="set cache_features to false"):
        FeatureCache(tmp_path / "new" / "cache", description, torch.float32, process(), said.append)
    assert "1000000000000 rows x 13 tokens" in said[0]
    assert not list(tmp_path.iterdir())


def test_layout_is_that_of_the_cache_that_is_there(open_cache, small_shards, monkeypatch):
    target, packed = make_target(), packed_rows()
    first = everything(open_cache(target, packed))
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1 << 20)
    calls = count_forwards(monkeypatch)
    assert torch.equal(everything(open_cache(target, packed)), first)
    assert not calls


def test_engine_on_the_target_does_not_make_it_another(tmp_path):
    """It packs the target's weights, and only runs that measure have one."""
    model, tokenizer = load_target(ASSET, CPU, "float32")
    packed = packed_rows()
    before = describe(FrozenTarget(model), packed, torch.float32)
    LLM(model=model, tokenizer=tokenizer, max_model_len=64)
    assert describe(FrozenTarget(model), packed, torch.float32) == before


def test_folder_without_a_cache_to_keep_in_it_is_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match=r"feature_cache '.*' is given and cache_features is false"):
        medusa.main(arguments(feature_cache=tmp_path / "cache"))
