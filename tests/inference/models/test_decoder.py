"""The engine's decoder against transformers' own forward in fp32: every family and rope type, from files and from modules."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.inference.engine.cache import PagedCache
from headstart.inference.models.architectures import ARCHITECTURES, Architecture, UnsupportedArchitecture
from headstart.inference.models.decoder import Decoder, ForwardPass, check_packed
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.models.modules.module_source import parameter_bytes
from headstart.inference.models.shapes import SHAPES, config_of
from headstart.inference.models.support import decoder_class
from headstart.inference.models.weights import tensor_plan, weight_bytes
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index

SHAPE = dict(
    model_type="llama",
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=113,
    max_position_embeddings=300,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=5.0)
# Windows are shorter than the prompt, and neither a multiple of a tile nor of a page.
WINDOWS = dict(use_sliding_window=True, sliding_window=37, layer_types=["full_attention", "sliding_attention"] * 2)
MODELS = {
    "llama-2": dict(num_key_value_heads=6),
    "llama-3": dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    "llama-tied": dict(tie_word_embeddings=True),
    "llama-biases": dict(attention_bias=True, mlp_bias=True),
    "llama-head-dim-20": dict(head_dim=20),
    "llama-rope-linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama-rope-llama3": dict(rope_parameters=LLAMA3),
    "llama-rope-yarn": dict(rope_parameters=YARN),
    "llama-rope-yarn-factor": dict(rope_parameters=YARN | dict(attention_factor=0.7, beta_fast=16.0, beta_slow=2.0)),
    "mistral": dict(model_type="mistral", sliding_window=None),
    "mistral-window": dict(model_type="mistral", sliding_window=37),
    "mistral-window-1": dict(model_type="mistral", sliding_window=1),
    "qwen2": dict(model_type="qwen2", head_dim=None, hidden_size=96),  # published ones do not say head_dim
    "qwen2-tied-windows": dict(model_type="qwen2", tie_word_embeddings=True, num_hidden_layers=4, **WINDOWS),
    "qwen2-max-window-layers": dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=70, max_window_layers=1
    ),
    "qwen3": dict(model_type="qwen3"),
    "qwen3-wide-heads-biases": dict(model_type="qwen3", head_dim=32, attention_bias=True),
    "qwen3-windows": dict(model_type="qwen3", num_hidden_layers=4, **WINDOWS),
    "granite": dict(model_type="granite", **GRANITE),
    "granite-biases-tied": dict(
        model_type="granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **GRANITE
    ),
}
LENGTH = 150
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_model(seed=1, **changes):
    torch.manual_seed(seed)
    shape = SHAPE | changes
    if shape["head_dim"] is None:
        del shape["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).eval()
    for parameter in model.parameters():  # biases and norms start as constants: make them random
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def run_decoder(decoder, tokens, passes):
    """Logits [T, V] of `tokens` [T] computed as chains of `passes` tokens each, over pages in no particular order."""
    device, num_pages = decoder.device, -(-len(tokens) // PAGE)
    cache = PagedCache(num_pages, *decoder.kv_shape, decoder.device)
    table = torch.arange(num_pages, 0, -1, device=device)[None]
    found, start = [], 0
    with torch.no_grad():
        for count in passes:
            positions = torch.arange(start, start + count, device=device)
            chain = torch.arange(count, device=device)
            index = build_tree_index(
                table,
                torch.tensor([start], device=device),
                chain,
                chain.expand(count, count).contiguous(),
                decoder.num_kv_heads,
                decoder.dtype,
            )
            seats = table[0, positions // PAGE] * PAGE + positions % PAGE
            batch = ForwardPass(tokens[start : start + count].to(device), positions, seats, index)
            found.append(decoder.logits(decoder.forward(batch, cache.kv)[0]))
            start += count
    assert start == len(tokens)
    return torch.cat(found).cpu()


def assert_agrees(found, expected):
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def expected_logits(model, tokens):
    with torch.no_grad():
        return model(tokens[None]).logits[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name, device, tmp_path):
    """From one file and from shards, in long chains, in short ones across tile and page borders, and token by token."""
    model = make_model(**MODELS[name])
    tokens = torch.randint(0, 113, (LENGTH,))
    expected = expected_logits(model, tokens)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3

    config = AutoConfig.from_pretrained(tmp_path / "one")
    decoders = [
        Decoder.from_pretrained(tmp_path / folder, config, dtype=torch.float32, device=device, max_positions=300)
        for folder in ("one", "many")
    ]
    for one, many in zip(_tensors(decoders[0]), _tensors(decoders[1]), strict=True):
        assert torch.equal(one, many)
    decoder = decoders[0]
    assert decoder.device.type == device
    assert (decoder.lm_head.data_ptr() == decoder.embedding.data_ptr()) == model.config.tie_word_embeddings
    assert_agrees(run_decoder(decoder, tokens, [64, 64, 22]), expected)
    assert_agrees(run_decoder(decoder, tokens, [1] * LENGTH), expected)
    assert_agrees(run_decoder(decoder, tokens, [13, 3, 1, 30, 17, 1, 64, 21]), expected)


def test_a_further_llama_like_architecture_is_one_declaration(tmp_path, monkeypatch):
    model = make_model(model_type="seed_oss", attention_bias=False, attention_out_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path)
    how = dict(dtype=torch.float32, device="cpu", max_positions=300)
    with pytest.raises(UnsupportedArchitecture, match="does not run model type 'seed_oss' yet"):
        Decoder.from_pretrained(tmp_path, model.config, **how)
    monkeypatch.setitem(ARCHITECTURES, "seed_oss", Architecture(out_bias="attention_out_bias"))
    tokens = torch.randint(0, 113, (LENGTH,))
    expected = expected_logits(model, tokens)
    for decoder in (Decoder.from_pretrained(tmp_path, model.config, **how), Decoder.from_module(model, 300)):
        assert_agrees(run_decoder(decoder, tokens, [64, 64, 22]), expected)


def _tensors(decoder):
    yield from (decoder.embedding, decoder.norm.weight, decoder.lm_head)
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        for part in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
            yield from (tensor.to_dense() for tensor in part if tensor is not None)
        norms = (layer.input_norm.weight, layer.post_norm.weight, attention.q_norm, attention.k_norm)
        yield from (tensor for tensor in norms if tensor is not None)


@pytest.mark.parametrize("name", ["llama-tied", "llama-biases", "qwen3-windows", "granite-biases-tied"])
def test_a_modules_memory_is_shared(name):
    model = make_model(**MODELS[name])
    tokens = torch.randint(0, 113, (LENGTH,))
    expected = expected_logits(model, tokens)
    decoder = Decoder.from_module(model, 300)
    again = Decoder.from_module(model, 300)
    storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(decoder)}
    for parameter in model.parameters():
        assert parameter.untyped_storage().data_ptr() in storages
    for first, second in zip(_tensors(decoder), _tensors(again), strict=True):
        assert first.data_ptr() == second.data_ptr()
    assert_agrees(run_decoder(decoder, tokens, [64, 64, 22]), expected)
    assert_agrees(expected_logits(model, tokens), expected)  # the module still computes what it did
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(2)
    changed = run_decoder(decoder, tokens, [64, 64, 22])
    assert not torch.allclose(changed, expected, atol=1e-2)
    assert_agrees(changed, expected_logits(model, tokens))


OLD_ROPE = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
    "yarn": {name: value for name, value in YARN.items() if name != "rope_theta"},
}


@pytest.mark.parametrize("kind", OLD_ROPE)
def test_configs_of_older_transformers_mean_the_same(kind, tmp_path):
    """`rope_scaling` beside `rope_theta`, as almost every published config has it."""
    new = {"linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0), "llama3": LLAMA3, "yarn": YARN}[kind]
    model = make_model(rope_parameters=new)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 10000.0, "rope_scaling": OLD_ROPE[kind]}))
    tokens = torch.randint(0, 113, (LENGTH,))
    config = AutoConfig.from_pretrained(tmp_path)
    decoder = Decoder.from_pretrained(tmp_path, config, dtype=torch.float32, device="cpu", max_positions=300)
    assert_agrees(run_decoder(decoder, tokens, [64, 64, 22]), expected_logits(model, tokens))


@pytest.mark.parametrize(
    "change",
    [
        dict(rope_parameters=YARN | dict(factor=3.9)),
        dict(model_type="mistral", sliding_window=38),
        dict(model_type="qwen3", **(WINDOWS | dict(layer_types=["full_attention"] * 3 + ["sliding_attention"]))),
        dict(model_type="granite", **(GRANITE | dict(residual_multiplier=0.401))),
        dict(model_type="granite", **(GRANITE | dict(attention_multiplier=0.301))),
    ],
)
def test_the_comparison_notices_a_wrong_config(change):
    """The tolerance is tight enough: a decoder built with a slightly different config disagrees."""
    right = next(
        MODELS[name]
        for name in ("llama-rope-yarn", "mistral-window", "qwen3-windows", "granite")
        if MODELS[name].get("model_type", "llama") == change.get("model_type", "llama")
    )
    model = make_model(**right)
    wrong = copy.deepcopy(model.config)
    for name, value in change.items():
        if name != "model_type":
            setattr(wrong, name, value)
    tokens = torch.randint(0, 113, (LENGTH,))
    expected = expected_logits(model, tokens)
    model.config = wrong
    with pytest.raises(AssertionError):
        assert_agrees(run_decoder(Decoder.from_module(model, 300), tokens, [64, 64, 22]), expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (dict(hidden_act="gelu"), "activation 'gelu'"),
        (dict(hidden_size=130, num_attention_heads=65, num_key_value_heads=1), "65 query heads"),
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rope type 'dynamic'"),
        (
            dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5)),
            "partial rotation",
        ),
        (dict(model_type="gemma"), "model type 'gemma'"),
        (dict(head_dim=320), "a head dimension of 320"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantised weights"),
        (
            dict(model_type="qwen2", layer_types=["full_attention", "chunked_attention", "full_attention"]),
            "layers of type 'chunked_attention'",
        ),
    ],
)
def test_what_does_not_run_yet_is_refused_with_what_does(changes, what):
    config = AutoConfig.for_model(**(SHAPE | changes))
    with pytest.raises(UnsupportedArchitecture, match=f"does not run {what}.*It runs model types llama.*unquantised"):
        check_packed(config)
    with pytest.raises(UnsupportedArchitecture, match=f"does not run {what}"):
        # Before any file is looked for.
        Decoder.from_pretrained("nowhere", config, dtype=torch.float32, device="cpu", max_positions=300)


def test_random_weights_are_repeatable_and_keep_activations_finite():
    config = AutoConfig.for_model(**(SHAPE | dict(model_type="qwen3", num_hidden_layers=24, attention_bias=True)))
    first, second = (
        Decoder.from_pretrained(None, config, dtype=torch.float32, device="cpu", max_positions=300, load_format="dummy")
        for _ in range(2)
    )
    for one, other in zip(_tensors(first), _tensors(second), strict=True):
        assert torch.equal(one, other)
    tokens = torch.arange(100) % 113
    logits = run_decoder(first, tokens, [64, 36])
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
    assert logits.argmax(-1).unique().numel() > 10  # it does not always choose the same token
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy"):
        Decoder.from_pretrained(None, config, dtype=torch.float32, device="cpu", max_positions=300, load_format="pt")


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_run_and_have_their_size(name):
    billions = {
        "llama-3-8b": 8.030,
        "llama-3-8b-2layers": 1.487,
        "llama-3-70b": 70.554,
        "llama-2-7b": 6.738,
        "mistral-7b": 7.242,
        "qwen2.5-7b": 7.616,
        "qwen3-8b": 8.191,
        "opt-6.7b": 6.658,
        "opt-125m": 0.125,
        "granite-20b-code": 20.067,
        "mixtral-8x7b": 46.703,
    }
    config = config_of(name)
    if decoder_class(config) is ModuleDecoder:
        assert parameter_bytes(config, torch.bfloat16) / 2e9 == pytest.approx(billions[name], abs=6e-4)
        return
    assert weight_bytes(config, torch.bfloat16) / 2e9 == pytest.approx(billions[name], abs=6e-4)
    # The plan names just what transformers' own model holds.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: shape for parts in tensor_plan(config).values() for name, shape in parts.items()} == held
    with pytest.raises(ValueError, match=r"no shape 'llama-4'.*llama-2-7b, llama-3-70b"):
        config_of("llama-4")


@pytest.mark.parametrize(
    ("dtype", "of_logits"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_logits_on_the_cpu_have_32_bits_at_least(dtype, of_logits):
    decoder = Decoder.from_module(make_model().to(getattr(torch, dtype)), max_positions=300)
    assert run_decoder(decoder, torch.randint(0, 113, (3,)), [3]).dtype == getattr(torch, of_logits)


@pytest.mark.gpu
def test_a_wide_decoder_in_bfloat16_stays_near_fp32():
    """Two layers of the 8B's width on the GPU: bf16 logits against the same weights in fp32, beside transformers' own bf16."""
    config = config_of("llama-3-8b-2layers")
    decoder = Decoder.from_pretrained(
        None, config, dtype=torch.bfloat16, device="cuda", max_positions=1024, load_format="dummy"
    )
    tokens = torch.randint(0, config.vocab_size, (LENGTH,))
    found = run_decoder(decoder, tokens, [64, 64, 22])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).cuda()
    hq, hk, d = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(decoder.embedding)
        model.model.norm.weight.copy_(decoder.norm.weight)
        model.lm_head.weight.copy_(decoder.lm_head)
        for theirs, ours in zip(model.model.layers, decoder.layers):
            qkv = ours.attention.qkv.weight.split((hq * d, hk * d, hk * d))
            for projection, rows in zip(("q_proj", "k_proj", "v_proj"), qkv):
                getattr(theirs.self_attn, projection).weight.copy_(rows)
            for projection, rows in zip(("gate_proj", "up_proj"), ours.mlp.gate_up.weight.chunk(2)):
                getattr(theirs.mlp, projection).weight.copy_(rows)
            theirs.self_attn.o_proj.weight.copy_(ours.attention.out.weight)
            theirs.mlp.down_proj.weight.copy_(ours.mlp.down.weight)
            theirs.input_layernorm.weight.copy_(ours.input_norm.weight)
            theirs.post_attention_layernorm.weight.copy_(ours.post_norm.weight)
        library = model(tokens[None].cuda()).logits[0].float().cpu()
        exact = model.float()(tokens[None].cuda()).logits[0].cpu()
    error, theirs = (found.float() - exact).square().mean().sqrt(), (library - exact).square().mean().sqrt()
    assert error <= 1.2 * theirs
