"""The files of a checkpoint, in a folder or on the Hub: which are read, and errors for those that do not fit."""

import json
import os
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headstart.inference.models.checkpoint_files as files_module
import headstart.inference.models.weights as weights_module
from headstart.inference.models.checkpoint_files import find_files
from headstart.inference.models.weights import load_weights
from headstart.tests.inference.models.small_checkpoints import SHAPE, file_of, packed, rewrite

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails the test if a tensor is allocated or read: errors must come before that."""

    def refuse(*_, **__):
        raise AssertionError("a tensor was allocated or read before the checkpoint was checked")

    monkeypatch.setattr(files_module, "safe_open", refuse)
    monkeypatch.setattr(weights_module, "_allocate", refuse)


def drop(tensors):
    del tensors[UP]


def add(tensors):
    tensors["model.layers.1.mlp.router.weight"] = torch.zeros(3)


def widen(tensors):
    tensors[UP] = torch.zeros(48, 33)


def quantise(tensors):
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"does not fit its config: it lacks model\.layers\.1\.mlp\.up_proj\.weight$"),
        (add, r"it holds model\.layers\.1\.mlp\.router\.weight, which this architecture does not have$"),
        (
            widen,
            r"model\.layers\.1\.mlp\.up_proj\.weight is \[48, 33\] in model\S*\.safetensors and \[48, 32\] by config",
        ),
        (quantise, r"model\.layers\.1\.mlp\.up_proj\.weight is F8_E4M3; quantised weights do not run yet"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, change, message):
    folder, config = checkpoint
    rewrite(folder, UP, change)
    with pytest.raises(ValueError, match=message):
        load_weights(folder, config, torch.float32, "cpu")


@pytest.mark.usefixtures("nothing_is_read")
def test_all_differences_are_said_at_once_and_long_lists_are_cut(checkpoint):
    folder, config = checkpoint
    rewrite(folder, UP, lambda tensors: (drop(tensors), add(tensors)))
    config.num_hidden_layers = 4
    with pytest.raises(ValueError, match=r"it lacks model\.layers\S*, .* and 11 more; it holds \S*router\.weight"):
        load_weights(folder, config, torch.float32, "cpu")
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"it holds model\.layers\.1\.\S*, .* and 1 more, which this"):
        load_weights(folder, config, torch.float32, "cpu")


def test_tables_of_positions_in_old_files_are_left_out(checkpoint):
    folder, config = checkpoint

    def old(tensors):
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    before = load_weights(folder, config, torch.float32, "cpu")
    rewrite(folder, UP, old)
    after = load_weights(folder, config, torch.float32, "cpu")
    assert torch.equal(after.layers[1].qkv[0], before.layers[1].qkv[0])


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("cut", [1, 4000])
def test_a_file_that_is_cut_short_is_named_with_its_tensor(checkpoint, cut):
    folder, config = checkpoint
    path = file_of(folder, UP)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(
        ValueError, match=rf"{path.name} is cut short: it has {size - cut} bytes and \S+ ends at \d+; copy"
    ):
        load_weights(folder, config, torch.float32, "cpu")


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut short or no safetensors file"),
        (b"\x00\x01", "is cut short or no safetensors file"),
        (b"\x10" + bytes(7) + b"{", "is cut short or no safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "is cut short or no safetensors file"),
        (b"\x02" + bytes(7) + b'{"', "is cut short or no safetensors file"),
        (b"\x11" + bytes(7) + b'{"a":{"shape":0}}', "is cut short or no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer.*git lfs pull"),
    ],
)
def test_a_file_of_another_kind_is_named(checkpoint, content, message):
    folder, config = checkpoint
    path = file_of(folder, UP)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name}.* {message}"):
        load_weights(folder, config, torch.float32, "cpu")


def test_bytes_that_belong_to_no_tensor_are_damage(checkpoint):
    folder, config = checkpoint
    path = file_of(folder, UP)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match=rf"{path.name} is damaged \(.*\); copy or download it again"):
        load_weights(folder, config, torch.float32, "cpu")


def test_missing_shards_and_broken_indices_are_named(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert [path.name for path in find_files(tmp_path)] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks {names[1]}, which its model.safetensors.index.json names"):
        find_files(tmp_path)
    for content in ("{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "../../etc/passwd"}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"shards: (it|a|Expecting) .*; copy or download it again"):
            find_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], r"holds its weights as pytorch_model\.bin, which .*Convert once .*save_pretrained"),
        (["consolidated.00.pth", "consolidated.01.pth"], r"as consolidated\.00\.pth, consolidated\.01\.pth, which"),
        (["model-q4.gguf"], r"as model-q4\.gguf"),
        (["adapter_config.json", "adapter_model.safetensors"], r"holds an adapter.*merge_and_unload"),
        ([], r"holds no weights: expected model\.safetensors, or model\.safetensors\.index\.json and its shards"),
    ],
)
def test_other_formats_are_refused_with_the_way_to_convert_them(tmp_path, names, message):
    for name in ("config.json", *names):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path, LlamaConfig(**SHAPE), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"config\.json is a file: expected a model folder"):
        find_files(tmp_path / "config.json")


# --- Hub ids ---

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached_repo(checkpoint, tmp_path, monkeypatch):
    """The checkpoint as somebody/tiny in a Hub cache, as a download leaves it."""
    folder, config = checkpoint
    repo = tmp_path / "cache" / "models--somebody--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repo / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    real = files_module.hf_hub_download
    monkeypatch.setattr(
        files_module,
        "hf_hub_download",
        lambda repo_id, name, **options: real(repo_id, name, cache_dir=tmp_path / "cache", **options),
    )
    return repo, folder, config


def test_hub_ids_are_read_from_the_cache_when_offline(cached_repo):
    repo, folder, config = cached_repo
    for revision in (None, COMMIT):
        config._commit_hash = revision
        found = load_weights("somebody/tiny", config, torch.float32, "cpu")
        for one, other in zip(packed(found), packed(load_weights(folder, config, torch.float32, "cpu")), strict=True):
            assert torch.equal(one, other)
    for path in (repo / "snapshots" / COMMIT).glob("*.safetensors"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"cannot get the weights of 'somebody/tiny'.*HF_HUB_OFFLINE is set.*gave no model"
    ):
        load_weights("somebody/tiny", config, torch.float32, "cpu")


def test_a_hub_repository_without_safetensors_says_how_to_convert(monkeypatch):
    from huggingface_hub.errors import EntryNotFoundError

    def absent(*_, **__):
        raise EntryNotFoundError("404")

    monkeypatch.setattr(files_module, "hf_hub_download", absent)
    monkeypatch.setattr(files_module, "list_repo_files", lambda *_, **__: ["config.json", "pytorch_model.bin"])
    with pytest.raises(ValueError, match=r'pytorch_model\.bin.*from_pretrained\("somebody/tiny"'):
        load_weights("somebody/tiny", LlamaConfig(**SHAPE), torch.float32, "cpu")


def test_the_index_file_is_plain_json(tmp_path):
    """transformers still writes the index that read_index expects."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path, max_shard_size="10KB")
    assert set(json.loads((tmp_path / "model.safetensors.index.json").read_text())) >= {"weight_map"}
