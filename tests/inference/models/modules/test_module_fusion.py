"""What a module launches per layer: a model that silently falls back to many small kernels is caught, and so are other results."""

from collections import Counter

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.inference.models.decoder import Decoder, ForwardPass
from headstart.inference.models.modules import deferred, expert_modules, fused_ops, packed_heads
from headstart.inference.models.modules.deferred import VIEWS, Deferred
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.models.modules.row_ops import RowOps
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.tests.inference.models.small_architectures import small_model

KERNELS = {
    deferred: ("linear_parts", "add_parts"),
    fused_ops: ("add_rms_norm", "rms_norm", "add_layer_norm", "layer_norm", "gate_up_silu"),
    packed_heads: ("rotary_kv_write",),
}
# Beside attention. add_parts is a launch where a product has several ranges of K.
LLAMA = {"linear_parts": 3, "add_rms_norm": 2, "gate_up_silu": 1, "rotary_kv_write": 1}
GELU = {"linear_parts": 4, "add_parts": 1, "add_layer_norm": 2, "rotary_kv_write": 1, "gelu": 1}
MIXTURE = {
    "linear_parts": 3,
    "add_parts": 1,
    "add_rms_norm": 2,
    "rotary_kv_write": 1,
    "softmax": 1,
    "topk": 1,
    "experts": 1,
}
PER_LAYER = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "phi3": LLAMA,
    "opt": {"linear_parts": 4, "add_parts": 1, "add_layer_norm": 2, "rotary_kv_write": 1, "relu": 1},
    "gpt_bigcode": GELU,
    "starcoder2": GELU,
    "mixtral": MIXTURE | {"sum": 1, "div_": 1},
    "qwen3_moe": MIXTURE,
}


def one_pass(decoder, rows=7, dtype=torch.float32):
    """Hidden states of so many requests' first tokens."""
    layers, hk, dim, _ = decoder.kv_shape
    device = decoder.device
    kv = torch.zeros(layers, 2, (rows + 1) * hk * PAGE, dim, dtype=dtype, device=device)
    pages, node = torch.arange(1, rows + 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.arange(rows, device=device) % 5
    index = build_tree_index(pages[:, None], torch.zeros_like(pages), node, node[None], hk, dtype)
    return decoder.forward(ForwardPass(torch.arange(rows, device=device), positions, pages * PAGE, index), kv)[0]


@pytest.fixture
def launches(monkeypatch):
    """model type, layers  ->  how often a pass calls each kernel and each other operation that is more than a view"""
    found = Counter()

    def count(where, name):
        own = getattr(where, name)

        def counted(*args, **kwargs):
            found[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    dispatch = RowOps.__torch_dispatch__

    def counting(self, function, types, args=(), kwargs=None):
        result = dispatch(self, function, types, args, kwargs)
        name = function._schema.name.removeprefix("aten::")
        if not isinstance(result, Deferred) and name not in {*VIEWS, *fused_ops.FUSED} - {"mul", "add"}:
            found[name] += 1
        return result

    def counts(model_type, num_layers):
        layers = "n_layer" if model_type == "gpt_bigcode" else "num_hidden_layers"
        decoder = ModuleDecoder(small_model(model_type, **{layers: num_layers}), 100)
        with monkeypatch.context():
            for where, names in KERNELS.items():
                for name in names:
                    count(where, name)
            monkeypatch.setattr(RowOps, "__torch_dispatch__", counting)
            count(expert_modules, "experts")
            found.clear()
            one_pass(decoder)
            monkeypatch.undo()
        return Counter(found)

    return counts


@pytest.mark.parametrize("model_type", PER_LAYER)
def test_a_layer_is_a_handful_of_kernels(model_type, launches):
    found = launches(model_type, 3) - launches(model_type, 2)
    found["mul"] -= found["gate_up_silu"]  # the same operation, counted twice
    assert +found == PER_LAYER[model_type]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_llama_as_its_own_module_computes_what_the_packed_decoder_does(model_type, dtype):
    model = small_model(model_type, dtype)
    packed = one_pass(Decoder.from_module(model, max_positions=100), dtype=dtype)
    found = one_pass(ModuleDecoder(model, 100), dtype=dtype)
    torch.testing.assert_close(found, packed, rtol=1e-5, atol=1e-5)
    assert not torch.equal(packed[1:], packed[:-1])


@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_packed_weights_serve_several_decoders_and_are_saved_as_they_were(model_type, tmp_path):
    model = small_model(model_type)
    model.save_pretrained(tmp_path / "before")
    first, second = ModuleDecoder(model, 100), ModuleDecoder(model, 100)
    assert torch.equal(one_pass(first), one_pass(second))
    place = {id(group): group.w.data_ptr() for group in first._packed.values()}
    assert sorted(place.values()) == sorted({group.w.data_ptr() for group in second._packed.values()})
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / name / "model.safetensors" for name in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()


def other_weight(attention):
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()


def other_bias(attention):
    attention.v_proj.bias = torch.nn.Parameter(attention.v_proj.bias + 5)


@pytest.mark.parametrize("change", [other_weight, other_bias])
def test_a_module_that_was_given_other_weights_is_refused(change):
    model = small_model("opt")
    decoder = ModuleDecoder(model, 100)
    one_pass(decoder)
    change(model.model.decoder.layers[0].self_attn)
    with pytest.raises(RuntimeError, match="given other weights"):
        one_pass(decoder)


def test_a_library_that_wraps_norms_keeps_them():
    model = small_model("llama")
    plain, norm = one_pass(ModuleDecoder(model, 100)), model.model.layers[0].input_layernorm
    calls, own = [], norm.forward
    norm.forward = lambda x: calls.append(1) or own(x)
    found = one_pass(ModuleDecoder(model, 100))
    assert calls
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_llamas_as_modules_change_no_bit_with_other_company(model_type, monkeypatch):
    monkeypatch.setattr("headstart.inference.models.support.check_packed", refuse)
    llm = LLM(small_model(model_type), max_model_len=200, max_num_seqs=3)
    assert isinstance(llm.engine.decoder, ModuleDecoder)
    prompts = [[7, 3, 90, 12, 55], [1, 2], list(range(20, 90))]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=12, ignore_eos=True, logprobs=2) for i in range(3)]
    together = [o.outputs[0] for o in llm.generate(prompts, params)]
    for prompt, one, expected in zip(prompts, params, together):
        found = llm.generate([prompt], [one])[0].outputs[0]
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def refuse(config):
    from headstart.inference.models.architectures import UnsupportedArchitecture

    raise UnsupportedArchitecture("for the sake of the test")
