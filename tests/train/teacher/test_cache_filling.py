"""How the folder of features is filled, by one process, several or a later run, and how it is repaired."""

import fcntl
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.tests.train.teacher.small_caches import (
    Died,
    count_forwards,
    everything,
    make_target,
    packed_rows,
    process,
)
from headstart.train.teacher.feature_cache import FeatureCache, describe

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


def test_runs_share_a_cache_and_train_as_with_their_own(trainers, read_metrics, tmp_path, monkeypatch):
    shared = {"cache_features": True, "feature_cache": tmp_path / "cache", "max_steps": 3}
    calls = count_forwards(monkeypatch)
    trainers["medusa"].run(**shared, output=tmp_path / "first")
    filled = len(calls)
    trainers["medusa"].run(**shared, output=tmp_path / "second", batch_rows=1, accumulate=2)
    trainers["mlp_speculator"].run(**shared, output=tmp_path / "third")
    assert calls[filled:] == [1] * 4  # `check` computes two rows of every run
    own = shared | {"feature_cache": ""}
    trainers["mlp_speculator"].run(**own, output=tmp_path / "own")
    assert read_metrics(run="own") == read_metrics(run="third")
    assert not (tmp_path / "own" / "features").exists()
    assert (tmp_path / "cache" / "cache.json").exists()
    with pytest.raises(ValueError, match="something else than this run asks for: rows"):
        trainers["medusa"].main(**shared, output=tmp_path / "fourth", max_tokens=300)
