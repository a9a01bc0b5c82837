"""The frozen target on the engine's norms and activations: the library's formulas, where no graph is recorded, and nowhere else."""

import pytest
import torch
import transformers

from headstart.train.teacher import fused_target
from headstart.train.teacher.features import FrozenTarget
from headstart.train.teacher.fused_target import fuse

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 100,
}
# How many of their modules are of the formulas: two norms a layer (Qwen 3: four) and the last, and one MLP a layer.
FAMILIES = {
    "llama": (transformers.LlamaConfig(**SHAPE), 7),
    "qwen3": (transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16), 11),
    "gelu": (
        transformers.LlamaConfig(**SHAPE, hidden_act="gelu", initializer_range=1e-3),
        5,
    ),  # of small products all are alike
    "gemma": (transformers.GemmaConfig(**SHAPE, num_key_value_heads=2, head_dim=16), 0),
    "gpt2": (transformers.GPT2Config(vocab_size=48, n_embd=64, n_layer=2, n_head=4), 0),
}


def make(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family][0]).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # norms that do something
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_the_formulas_are_found(family):
    model = make(family)
    assert fuse(model) == FAMILIES[family][1]
    assert fuse(model) == 0


def test_packed_weights_are_left_to_their_library():
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(100, 32, dtype=torch.uint8), requires_grad=False)
    assert fuse(model) == 5


def test_kernels_run_without_a_graph_alone(monkeypatch):
    """On the CPU, as if it were a GPU: there the kernels' references stand for them."""
    model, calls = make("llama"), []
    ids = torch.randint(0, 48, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids).logits
    fuse(model)
    monkeypatch.setattr(fused_target, "on_triton", lambda x: calls.append(x.dtype) or True)
    assert torch.equal(model(input_ids=ids).logits, expected)  # with gradients switched on
    assert not calls
    with torch.no_grad():
        assert torch.equal(
            model.double()(input_ids=ids).logits.float(), make("llama").double()(input_ids=ids).logits.float()
        )
        assert not calls
        torch.testing.assert_close(model.float()(input_ids=ids).logits, expected)
    assert len(calls) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_features_are_the_librarys(family, dtype):
    plain, fused = (make(family).to("cuda", dtype) for _ in range(2))
    gold = make(family).to("cuda", torch.float64)
    target = FrozenTarget(fused)
    assert all("forward" in vars(layer.mlp) for layer in target.decoder.layers)
    ids = torch.randint(0, 48, (3, 70), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        exact, *found = (model(input_ids=ids).logits.double() for model in (gold, plain, fused))
    library, ours = ((logits - exact).abs().mean().item() for logits in found)
    assert ours <= 1.2 * library
