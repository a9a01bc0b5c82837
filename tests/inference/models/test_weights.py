"""Reading weights: what a checkpoint may look like, what is said of one that does not fit, and how much memory it takes."""

import json
import os
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import headstart.inference.models.checkpoint_files as files_module
import headstart.inference.models.weights as weights_module
from headstart.inference.models.checkpoint_files import find_files, read_header
from headstart.inference.models.decoder import Decoder
from headstart.inference.models.weights import load_weights, tensor_plan, weight_bytes

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=67,
    initializer_range=0.3,
)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=["one file", "shards"])
def checkpoint(request, tmp_path):
    """(folder, config) of a random Llama, in one file or in several."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="10KB" if request.param == "shards" else "1GB")
    return folder, model.config


def file_of(folder, name):
    """The safetensors file that holds a tensor."""
    return next(path for path in folder.glob("*.safetensors") if name in read_header(path))


def rewrite(folder, name, change):
    """Give the file that holds `name` what `change` makes of its tensors."""
    path = file_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def packed(weights):
    yield from (weights.embedding, weights.norm, weights.lm_head)
    for layer in weights.layers:
        yield from (layer.qkv[0], layer.out[0], layer.gate_up[0], layer.down[0], layer.input_norm, layer.post_norm)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [weights_module.CHUNK_BYTES, 100])
def test_tensors_are_cast_as_transformers_casts_them(dtype, stored, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(stored).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    weights = load_weights(tmp_path, model.config, dtype, "cpu")
    layer, module = weights.layers[1], model.model.layers[1]
    attention = module.self_attn
    expected = torch.cat([one.weight for one in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert layer.qkv[0].dtype == dtype
    assert torch.equal(layer.qkv[0], expected)
    assert torch.equal(layer.gate_up[0], torch.cat([module.mlp.gate_proj.weight, module.mlp.up_proj.weight]))
    assert torch.equal(layer.down[0], module.mlp.down_proj.weight)
    assert torch.equal(layer.out[0], attention.o_proj.weight)
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)
    assert torch.equal(weights.lm_head, model.lm_head.weight)


def test_loading_holds_the_weights_once(tmp_path):
    """What torch allocates while loading peaks at the packed weights, cast or not; a second copy would be twice that.

    The profiler also counts the mapped files, which take no memory of their own: they are taken off.
    """
    shape = SHAPE | dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=5000)
    config = LlamaConfig(**shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="4MB")
    mapped = weight_bytes(config, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
            weights = load_weights(tmp_path, config, dtype, "cpu")
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        need = weight_bytes(config, dtype)
        assert sum(tensor.nbytes for tensor in packed(weights)) == need
        assert need <= peak - mapped <= 1.02 * need


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_onto_a_gpu_holds_the_weights_once(dtype, tmp_path):
    shape = SHAPE | dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=65536)
    config = LlamaConfig(**shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100MB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(tmp_path, config, dtype, "cuda")
    peak, need = torch.cuda.max_memory_allocated() - before, weight_bytes(config, dtype)
    assert need > 4 * weights_module.CHUNK_BYTES
    assert need <= peak <= need + 2 * weights_module.CHUNK_BYTES
    on_host = load_weights(tmp_path, config, dtype, "cpu")
    for one, other in zip(packed(weights), packed(on_host), strict=True):
        assert one.is_cuda
        assert torch.equal(one.cpu(), other)


@pytest.mark.gpu
def test_weights_too_large_for_the_gpu_are_refused_with_both_sizes():
    config = LlamaConfig(hidden_size=65536, intermediate_size=262144, num_attention_heads=512, num_hidden_layers=80)
    with pytest.raises(ValueError, match=r"the weights take \d+\.\d GiB in bfloat16 and \d+\.\d GiB are free on cuda"):
        Decoder.from_pretrained(None, config, torch.bfloat16, "cuda", 64, load_format="dummy")


# --- tied embeddings ---


def tied_checkpoint(folder, change):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    rewrite(folder, "model.embed_tokens.weight", change)
    return config


def test_tied_embeddings_may_be_stored_under_either_name_or_both(tmp_path):
    def both(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def neither(tensors):
        del tensors["model.embed_tokens.weight"]

    expected = None
    for number, change in enumerate((dict, both, other)):
        config = tied_checkpoint(tmp_path / str(number), change)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weights = load_weights(tmp_path / str(number), config, torch.float32, "cpu")
        assert weights.lm_head is weights.embedding
        expected = weights.embedding if expected is None else expected
        assert torch.equal(weights.embedding, expected)
    config = tied_checkpoint(tmp_path / "neither", neither)
    with pytest.raises(ValueError, match=r"it lacks model\.embed_tokens\.weight"):
        load_weights(tmp_path / "neither", config, torch.float32, "cpu")


def test_tied_embeddings_that_differ_are_both_used_as_transformers_does(tmp_path):
    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    config = tied_checkpoint(tmp_path, differ)
    with pytest.warns(
        UserWarning, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but .* different values"
    ):
        weights = load_weights(tmp_path, config, torch.float32, "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(weights.lm_head, model.lm_head.weight)
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)


# --- checkpoints that do not fit ---


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails the test if a tensor is allocated or read: what is wrong must be said before."""

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
    with pytest.raises(ValueError, match=r"it lacks model\.layers\S*, .* and 14 more; it holds \S*router\.weight"):
        load_weights(folder, config, torch.float32, "cpu")
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"it holds model\.layers\.1\.\S*, .* and 4 more, which this"):
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
        with pytest.raises(ValueError, match="is no index of safetensors shards"):
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


# --- the progress bar ---


@pytest.mark.parametrize(("large", "terminal", "shown"), [(0, True, True), (0, False, False), (2**30, True, False)])
def test_a_bar_shows_for_large_models_on_a_terminal(checkpoint, large, terminal, shown, monkeypatch, capsys):
    folder, config = checkpoint
    monkeypatch.setattr(weights_module, "LARGE_BYTES", large)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    load_weights(folder, config, torch.float32, "cpu")
    written = capsys.readouterr().err
    assert ("loading weights: 100%" in written) == shown


def test_the_plan_lists_every_tensor_once():
    names = [name for parts in tensor_plan(LlamaConfig(**SHAPE)).values() for name in parts]
    assert len(names) == len(set(names))


def test_the_index_file_is_plain_json(tmp_path):
    """transformers still writes the index that read_index expects."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path, max_shard_size="10KB")
    assert set(json.loads((tmp_path / "model.safetensors.index.json").read_text())) >= {"weight_map"}
