"""What heads read of a target besides its last state: residual streams, by layer, and the embedding."""

import pytest
import torch
import transformers

from headstart.train.data import pack
from headstart.train.features import FrozenTarget

SHAPE = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gpt2": transformers.GPT2Config(vocab_size=48, n_embd=32, n_layer=3, n_head=4),
    "neox": transformers.GPTNeoXConfig(**SHAPE),
}
DOCUMENTS = [torch.randint(0, 48, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 1, 14)]


def make_target(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:  # norms that do something
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return FrozenTarget(model)


def packed_rows():
    return pack([(d.tolist(), [True] * len(d)) for d in DOCUMENTS], 29)


def batch(packed):
    return packed.input_ids, packed.position_ids, packed.document_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_the_librarys_hidden_states_and_the_one_before_the_norm(family):
    target, packed = make_target(FAMILIES[family]), packed_rows()
    found = target.features(*batch(packed), layers=(0, 1, 2, 3))
    assert found.shape == (1, 29, 5 * 32)
    norm = next(m for name, m in target.decoder.named_children() if name in ("norm", "ln_f", "final_layer_norm"))
    for i, document in enumerate(DOCUMENTS):
        alone = target.model(input_ids=document[None], output_hidden_states=True)
        last, *streams = found[packed.document_ids == i].split(32, -1)
        for k in range(3):
            torch.testing.assert_close(streams[k], alone.hidden_states[k][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, alone.hidden_states[3][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm(streams[3]), last, rtol=1e-5, atol=1e-6)
        assert (streams[3] - last).abs().max() > 0.05
        assert all((streams[k + 1] - streams[k]).abs().max() > 1e-3 for k in range(3))


def test_asking_for_streams_leaves_the_target_as_it_was():
    target, packed = make_target(FAMILIES["llama"]), packed_rows()
    before = target.features(*batch(packed))
    some = target.features(*batch(packed), layers=(1, 3))
    assert torch.equal(some[..., :32], before)
    assert torch.equal(target.features(*batch(packed)), before)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in target.check_layers(()))
    everything = target.features(*batch(packed), layers=(0, 1, 2, 3)).split(32, -1)
    assert torch.equal(some, torch.cat([everything[0], everything[2], everything[4]], -1))


@pytest.mark.parametrize("layers", [(1, 4), (-1,), (2, 1), (1, 1)])
def test_layers_that_the_target_does_not_have_are_refused(layers):
    target = make_target(FAMILIES["llama"])
    with pytest.raises(ValueError, match=r"layer ids must rise from 0 .* to at most 3 .*got \["):
        target.features(*batch(packed_rows()), layers=layers)


def test_target_whose_layers_cannot_be_told_is_refused():
    target = make_target(FAMILIES["llama"])
    target.decoder.more = torch.nn.ModuleList([torch.nn.Identity()] * 3)
    with pytest.raises(ValueError, match="LlamaModel holds 2 lists of 3 layers, not one"):
        target.check_layers((1,))


def test_embedding_is_the_table_that_tokens_are_looked_up_in():
    target = make_target(FAMILIES["gpt2"])
    assert target.embedding is target.model.transformer.wte.weight
