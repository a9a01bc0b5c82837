"""What heads read of a target besides its last state: residual streams, by layer, and the embedding."""

import pytest
import torch
import transformers
from transformers.integrations import flex_attention

from headstart.heads import packed_attention
from headstart.train.data.packed.packing import pack
from headstart.train.teacher.features import FrozenTarget

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


# ---- FlexAttention, which a GPU computes packed rows with ----

WIDE = SHAPE | {"hidden_size": 64}  # heads of 16
FLEX_FAMILIES = {
    "llama": transformers.LlamaConfig(**WIDE, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=24),
    "neox": transformers.GPTNeoXConfig(**WIDE),
}


@pytest.mark.parametrize("family", FLEX_FAMILIES)
def test_flex_attention_gives_the_features_that_the_mask_gives(family, monkeypatch):
    """Uncompiled, as it runs on the CPU."""
    target, packed = make_target(FLEX_FAMILIES[family]), packed_rows()
    expected = target.features(*batch(packed), layers=(1, 2))
    before = target.model.config._attn_implementation
    uncompiled = lambda q, k, v, training, **given: flex_attention.flex_attention(q, k, v, **given)  # noqa: E731
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(packed_attention, "_compiled", lambda function: function)
    used, plain = [], flex_attention.flex_attention
    monkeypatch.setattr(flex_attention, "flex_attention", lambda *a, **b: (used.append(b), plain(*a, **b))[1])
    monkeypatch.setattr(FrozenTarget, "_takes_flex_attention", lambda self, device: True)
    found = target.features(*batch(packed), layers=(1, 2))
    assert [given["kernel_options"]["FORCE_USE_FLEX_ATTENTION"] for given in used] == [True] * 3
    inside = packed.document_ids >= 0
    torch.testing.assert_close(found[inside], expected[inside], rtol=1e-4, atol=1e-5)
    target.check(*batch(packed))
    assert target.model.config._attn_implementation == before
    one_document = packed.document_ids.clamp(max=0)
    assert (target.features(*batch(packed)[:2], one_document) - expected[..., :64])[inside].abs().max() > 1e-2


def test_targets_that_flex_attention_cannot_run_keep_the_mask():
    cuda = torch.device("cuda")
    with torch.no_grad():
        assert make_target(FLEX_FAMILIES["llama"])._takes_flex_attention(cuda)
        assert not make_target(FLEX_FAMILIES["llama"])._takes_flex_attention(torch.device("cpu"))
        assert not make_target(FAMILIES["llama"])._takes_flex_attention(cuda)  # heads of 8
        assert not make_target(FAMILIES["gpt2"])._takes_flex_attention(cuda)
        target = make_target(FLEX_FAMILIES["llama"])
        target.model.double()
        assert not target._takes_flex_attention(cuda)
    assert not make_target(FLEX_FAMILIES["llama"])._takes_flex_attention(cuda)  # with gradients


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FLEX_FAMILIES)
def test_flex_attention_on_a_gpu_gives_what_the_mask_and_each_document_alone_give(family, dtype, monkeypatch):
    lengths = (70, 1, 300, 129, 500, 40)
    documents = [torch.randint(0, 48, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    packed = pack([(d.tolist(), [True] * len(d)) for d in documents], 577)
    rows = [part.cuda() for part in batch(packed)]
    target = make_target(FLEX_FAMILIES[family])
    target.model.to("cuda", dtype)
    with torch.no_grad():
        assert target._takes_flex_attention(torch.device("cuda"))
    found = target.features(*rows, layers=(1, 3)).double()
    wrong = target.features(*rows[:2], rows[2].clamp(max=0), layers=(1, 3)).double()
    for i in range(len(rows[0])):
        target.check(*(part[i : i + 1] for part in rows))
    with monkeypatch.context() as patch:
        patch.setattr(FrozenTarget, "_takes_flex_attention", lambda self, device: False)
        masked = target.features(*rows, layers=(1, 3)).double()
        target.model.double()
        gold = target.features(*rows, layers=(1, 3))
    for i, document in enumerate(documents):
        alone = target.decoder(input_ids=document[None].cuda()).last_hidden_state[0]
        torch.testing.assert_close(gold[rows[2] == i][:, :64], alone, rtol=1e-6, atol=1e-7)
    inside = rows[2] >= 0
    errors = [(x - gold)[inside].abs().mean().item() for x in (found, masked, wrong)]
    assert errors[0] <= 2 * errors[1] + 1e-6
    assert errors[2] > 4 * errors[0]
