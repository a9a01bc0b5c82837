"""Loading weights: they equal transformers', tied ones too, take their memory once, and show a progress bar if large."""

import sys
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import headstart.inference.models.weights as weights_module
from headstart.inference.models.decoder import Decoder
from headstart.inference.models.weights import load_weights, tensor_plan, weight_bytes
from headstart.tests.inference.models.small_checkpoints import SHAPE, packed, rewrite


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
        Decoder.from_pretrained(
            None, config, dtype=torch.bfloat16, device="cuda", max_positions=64, load_format="dummy"
        )


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
