"""The folder of features: what it holds, what it belongs to, how it is filled, how it is repaired."""

import fcntl
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headstart.inference.llm import LLM
from headstart.train import medusa, mlp_speculator
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.packing import pack
from headstart.train.teacher import feature_cache
from headstart.train.teacher.feature_cache import FeatureCache, describe, to_float8
from headstart.train.teacher.features import FrozenTarget, load_target

CPU = torch.device("cpu")
NO_STOP = SimpleNamespace(agreed=lambda accelerator: False)
ASSET = os.path.join(os.path.dirname(__file__), "..", "..", "assets", "stdlib-coder")


class Died(Exception):
    """What ends a fill in the middle."""


def make_target(seed=0, **changes):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = transformers.LlamaConfig(**shape | changes)
    return FrozenTarget(transformers.AutoModelForCausalLM.from_config(config).eval())


def packed_rows(seed=0):
    rng = torch.Generator().manual_seed(seed)
    documents = [
        torch.randint(0, 48, (int(n),), generator=rng).tolist() for n in torch.randint(3, 12, (30,), generator=rng)
    ]
    return pack([(ids, [True] * len(ids)) for ids in documents], 13)


def process(rank=0, world=1):
    return SimpleNamespace(
        num_processes=world,
        process_index=rank,
        is_main_process=rank == 0,
        device=CPU,
        wait_for_everyone=lambda: None,
    )


@pytest.fixture
def small_shards(monkeypatch):
    """Two rows in a forward, four in a shard of the last states in float32."""
    monkeypatch.setattr(feature_cache, "TOKENS_PER_FORWARD", 26)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 4 * 13 * 32 * 4)


@pytest.fixture
def open_cache(tmp_path):
    """open_cache(target, packed, ...) -> a FeatureCache in tmp_path/"cache", filled; `said` holds its notes."""

    def build(target, packed, layers=(), dtype=torch.float32, rank=0, world=1):
        said = build.said = []
        folder = tmp_path / "cache"
        cache = FeatureCache(
            folder, describe(target, packed, dtype, layers), target.dtype, process(rank, world), said.append
        )
        assert cache.fill(target, packed, NO_STOP)
        return cache

    return build


def everything(cache):
    return cache.rows(np.arange(cache.description["num_rows"]), CPU)


def count_forwards(monkeypatch, until=None):
    """A list that grows with every forward of a FrozenTarget; the one after `until` of them dies."""
    calls, features = [], FrozenTarget.features

    def counted(self, *given):
        if len(calls) == until:
            raise Died
        calls.append(len(given[0]))
        return features(self, *given)

    monkeypatch.setattr(FrozenTarget, "features", counted)
    return calls


# ---- what it holds ----


def test_cache_gives_streams_back_as_they_were_computed(open_cache, small_shards):
    target, packed = make_target(), packed_rows()
    cache = open_cache(target, packed, layers=(1, 3))
    assert cache.num_shards > 5
    assert f"{len(packed.input_ids)} rows x 13 tokens x 96 values in float32 take" in open_cache.said[0]
    index = np.array([9, 0, 17, 9])
    parts = packed.input_ids[index], packed.position_ids[index], packed.document_ids[index]
    torch.testing.assert_close(cache.rows(index, CPU), target.features(*parts, (1, 3)), rtol=1e-5, atol=1e-6)
    pairs = [slice(0, 2), slice(8, 10), slice(16, 18)]  # the forwards that these rows were computed in
    found = [
        target.features(packed.input_ids[p], packed.position_ids[p], packed.document_ids[p], (1, 3)) for p in pairs
    ]
    assert torch.equal(cache.rows(index, CPU), torch.stack([found[1][1], found[0][0], found[2][1], found[1][1]]))


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


def test_float8_costs_the_embedded_target_little_of_its_law():
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
    assert torch.equal(cache.rows(index, torch.device("cuda")).cpu(), cache.rows(index, CPU))


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
    with pytest.raises(ValueError, match=r"holds notes\.txt, which is no feature cache"):
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


# ---- how it is filled ----


@pytest.mark.parametrize("forwards", [0, 1, 5, 8])
def test_killed_fill_goes_on_with_the_shards_that_are_missing(
    open_cache, small_shards, tmp_path, monkeypatch, forwards
):
    target, packed = make_target(), packed_rows()
    whole = everything(open_cache(target, packed))
    shutil.rmtree(tmp_path / "cache")
    with monkeypatch.context() as patch:
        count_forwards(patch, until=forwards)
        with pytest.raises(Died):
            open_cache(target, packed)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == forwards // 2
    calls = count_forwards(monkeypatch)
    cache = open_cache(target, packed)
    num_rows = len(packed.input_ids)
    assert sum(calls) == num_rows - forwards // 2 * 4
    assert torch.equal(everything(cache), whole)


def test_signal_ends_a_fill_between_forwards(open_cache, small_shards, tmp_path, monkeypatch):
    target, packed = make_target(), packed_rows()
    calls = count_forwards(monkeypatch)
    stop = SimpleNamespace(agreed=lambda accelerator: len(calls) == 3)
    description = describe(target, packed, torch.float32)
    cache = FeatureCache(tmp_path / "cache", description, torch.float32, process(), lambda text: None)
    assert not cache.fill(target, packed, stop)
    assert len(calls) == 3
    assert [path.name for path in sorted((tmp_path / "cache").iterdir())] == ["cache.json", "shard-00000.safetensors"]


def test_ranks_fill_different_shards(open_cache, small_shards, tmp_path, monkeypatch):
    target, packed = make_target(), packed_rows()
    whole = everything(open_cache(target, packed))
    calls = count_forwards(monkeypatch)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match="must be a folder that all of them see"):  # the other rank does nothing here
        open_cache(target, packed, rank=0, world=2)
    made = {path.name for path in (tmp_path / "cache").glob("*.safetensors")}
    assert made == {f"shard-{i:05d}.safetensors" for i in range(0, -(-len(packed.input_ids) // 4), 2)}
    forwards = len(calls)
    (tmp_path / "other").mkdir()
    for name in made:
        (tmp_path / "cache" / name).rename(tmp_path / "other" / name)
    with pytest.raises(ValueError, match="must be a folder that all of them see"):
        open_cache(target, packed, rank=1, world=2)
    assert not made & {path.name for path in (tmp_path / "cache").iterdir()}
    assert len(calls) == 2 * forwards  # though the other has a shard less to fill, or a shorter one
    for name in made:
        (tmp_path / "other" / name).rename(tmp_path / "cache" / name)
    assert torch.equal(everything(open_cache(target, packed)), whole)


# ---- how it is repaired ----


def flip(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def empty(path):
    path.write_bytes(b"")


def replace(path):
    save_file(load_file(path), path, metadata={"headstart": "another 0"})


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "are not those that were"),
        (cut, "is cut short"),
        (empty, "is cut short"),
        (replace, "is of another cache"),
    ],
)
def test_damaged_shard_is_named_and_computed_again(open_cache, small_shards, tmp_path, monkeypatch, harm, said):
    target, packed = make_target(), packed_rows()
    whole = everything(open_cache(target, packed))
    harm(tmp_path / "cache" / "shard-00002.safetensors")
    calls = count_forwards(monkeypatch)
    assert torch.equal(everything(open_cache(target, packed)), whole)
    assert calls == [2, 2]
    told = [text for text in open_cache.said if "computed again" in text]
    assert len(told) == 1
    assert "shard-00002" in told[0]
    assert said in told[0]
    assert torch.equal(everything(open_cache(target, packed)), whole)
    assert len(open_cache.said) == 1


def test_half_written_files_are_never_read_and_go_unless_they_are_being_written(open_cache, small_shards, tmp_path):
    target, packed = make_target(), packed_rows()
    whole = everything(open_cache(target, packed))
    shard = tmp_path / "cache" / "shard-00001.safetensors"
    dead = shard.with_name(f".{shard.name}.partial-0123abcd")
    alive = shard.with_name(f".{shard.name}.partial-89ef4567")
    shard.rename(dead)
    shutil.copy(dead, alive)
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert torch.equal(everything(open_cache(target, packed)), whole)
        assert (shard.exists(), dead.exists(), alive.exists()) == (True, False, True)


def test_manifest_lost_or_broken(open_cache, small_shards, tmp_path, monkeypatch):
    target, packed = make_target(), packed_rows()
    whole = everything(open_cache(target, packed))
    manifest = tmp_path / "cache" / "cache.json"
    content = manifest.read_text()
    manifest.unlink()
    calls = count_forwards(monkeypatch)
    assert torch.equal(everything(open_cache(target, packed)), whole)
    assert not calls
    assert manifest.read_text() == content
    manifest.write_text(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cache\.json is not the JSON that was written .*: remove"):
        open_cache(target, packed)
    manifest.write_text(json.dumps(json.loads(content) | {"format": 2}))
    with pytest.raises(ValueError, match="is of format 2, this version reads 1"):
        open_cache(target, packed)


# ---- several runs ----


def test_runs_share_a_cache_and_train_as_with_their_own(
    arguments, speculator_arguments, read_metrics, tmp_path, monkeypatch
):
    shared = {"cache_features": True, "feature_cache": tmp_path / "cache", "max_steps": 3}
    calls = count_forwards(monkeypatch)
    assert medusa.main(arguments(**shared, output=tmp_path / "first")) == 0
    filled = len(calls)
    assert medusa.main(arguments(**shared, output=tmp_path / "second", batch_rows=1, accumulate=2)) == 0
    assert mlp_speculator.main(speculator_arguments(**shared, output=tmp_path / "third")) == 0
    assert len(calls) == filled + 2  # `check` computes one row of every run
    own = shared | {"feature_cache": ""}
    assert mlp_speculator.main(speculator_arguments(**own, output=tmp_path / "own")) == 0
    assert read_metrics(run="own") == read_metrics(run="third")
    assert not (tmp_path / "own" / "features").exists()
    assert (tmp_path / "cache" / "cache.json").exists()
    with pytest.raises(ValueError, match="something else than this run asks for: rows"):
        medusa.main(arguments(**shared, output=tmp_path / "fourth", max_tokens=300))
