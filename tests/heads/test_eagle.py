"""EAGLE's training forward equals the paper's formulas, implemented row by row in fp64; every mistake tried changes its logits."""

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from headstart.heads.eagle import Eagle, EagleConfig
from headstart.tests.heads.eagle_reference import eagle_states

H, V, T = 24, 37, 7
SHAPE = dict(
    hidden_size=H,
    vocab_size=V,
    intermediate_size=36,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,  # heads x D is not H
    rms_norm_eps=1e-5,
    rope_theta=500.0,
)


def randomize(head, seed=0):
    """Make all tensors random and different; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) / (parameter.shape[-1] ** 0.5)
            parameter.copy_(1 + value if "norm" in name else value)
    return head.double()


def make(**changes):
    return randomize(Eagle(EagleConfig(**SHAPE | changes)))


def text(length=T, width=H, steps=(), seed=1):
    """Random features [1, T, width] and next tokens [1, T] or [1, T, steps]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, length, width, generator=generator, dtype=torch.float64)
    return features, torch.randint(V, (1, length, *steps), generator=generator)


def one_document(length):
    return torch.arange(length)[None], torch.zeros(1, length, dtype=torch.int64)


LM_HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_logits_are_those_of_the_definition(fc_bias, attention_bias):
    head = make(fc_bias=fc_bias, attention_bias=attention_bias)
    features, tokens = text()
    states = head(features, tokens, *one_document(T))
    expected = eagle_states(head.state_dict(), head.config, features[0], tokens[0])
    torch.testing.assert_close(states[0] @ LM_HEAD.T, expected @ LM_HEAD.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mutant", ["features first", "input norm", "residual normed", "no positions"])
def test_every_mistake_changes_the_logits(mutant):
    head = make()
    features, tokens = text()
    states = head(features, tokens, *one_document(T))[0]
    wrong = eagle_states(head.state_dict(), head.config, features[0], tokens[0], mutant)
    assert ((states - wrong) @ LM_HEAD.T).abs().max() > 1e-3


def test_documents_of_a_row_do_not_see_each_other():
    head = make()
    parts = [text(5, seed=3), text(8, seed=4), text(3, seed=5)]
    features, tokens = (torch.cat(part, 1) for part in zip(*parts))
    positions = torch.cat([torch.arange(n) for n in (5, 8, 3)])[None]
    documents = torch.tensor([[0] * 5 + [1] * 8 + [-1] * 3])  # the last is padding
    states = head(features, tokens, positions, documents)
    assert states.isfinite().all()
    alone = torch.cat([head(*part, *one_document(part[1].shape[1])) for part in parts], 1)
    torch.testing.assert_close(states, alone, rtol=0, atol=1e-12)
    mixed = head(features, tokens, positions, torch.zeros_like(documents))
    assert (mixed[:, 5:13] - states[:, 5:13]).abs().max() > 1e-3


def test_only_distances_between_positions_count():
    """A shift of all positions changes nothing; another distance between positions does."""
    head = make()
    positions, documents = one_document(T)
    states = head(*text(), positions, documents)
    torch.testing.assert_close(head(*text(), positions + 1, documents), states, rtol=0, atol=1e-10)
    assert (head(*text(), 2 * positions, documents) - states).abs().max() > 1e-3


def test_a_layer_that_adds_nothing_passes_the_feature_on():
    head = make()
    with torch.no_grad():
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
        head.fc.weight.copy_(torch.cat((torch.zeros(H, H), torch.eye(H)), 1))
    features, tokens = text()
    assert torch.equal(head(features, tokens, *one_document(T)), features)


@pytest.mark.parametrize("bias", [False, True])
def test_everything_but_the_embedding_is_trained(bias):
    head = make(fc_bias=bias, attention_bias=bias)
    head(*text(), *one_document(T)).square().sum().backward()
    untouched = [name for name, one in head.named_parameters() if one.grad is None or not one.grad.any()]
    assert untouched == ["embed_tokens.weight"]
    assert not head.embed_tokens.weight.requires_grad


def test_the_targets_embedding_is_shared_and_not_copied():
    head = make()
    table = torch.nn.Parameter(head.embed_tokens.weight.detach().float())
    expected = head(*text(), *one_document(T))
    head.embed_tokens = None
    assert head.needs_embedding
    with pytest.raises(ValueError, match=r"holds no embed_tokens: call head\.take_embedding"):
        head(*text(), *one_document(T))
    with pytest.raises(ValueError, match=r"embedding is \(37, 23\), .* \(37, 24\)"):
        head.take_embedding(table[:, :-1])
    head.take_embedding(table)
    assert head.embed_tokens.weight.data_ptr() == table.data_ptr()
    assert not head.needs_embedding
    torch.testing.assert_close(head(*text(), *one_document(T)), expected, rtol=0, atol=1e-6)
    assert table.requires_grad


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 7, "head_dim must be even, got 7"),
        ("num_key_value_heads", 4, "multiple of num_key_value_heads, got 6 and 4"),
        ("hidden_size", 0, "hidden_size must be a whole number of at least 1, got 0"),
        ("rms_norm_eps", "small", "rms_norm_eps must be a number above 0, got 'small'"),
        ("attention_bias", 1, "attention_bias must be true or false, got 1"),
        ("rope_scaling", {"rope_type": "dynamic"}, "rope_type 'dynamic', expected one of default, linear"),
    ],
)
def test_shapes_that_cannot_be_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        EagleConfig(**SHAPE | {field: value})


def test_a_head_for_a_target_takes_the_shape_of_its_layers():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    target = LlamaConfig(
        hidden_size=H,
        vocab_size=V,
        intermediate_size=40,
        num_attention_heads=6,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters=scaling | {"rope_theta": 5e5},
        max_position_embeddings=512,
    )
    config = EagleConfig.for_target(target, intermediate_size=50)
    assert (config.hidden_size, config.vocab_size, config.intermediate_size, config.head_dim) == (H, V, 50, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps) == (6, 3, 1e-5)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (5e5, scaling, 512)


def test_a_head_for_a_target_of_several_ropes_takes_that_of_layers_that_see_the_whole_text():
    def rope(theta):
        return {"rope_type": "default", "rope_theta": theta}

    ropes = {"sliding_attention": rope(1e4), "full_attention": rope(1e6) | {"rope_type": "linear", "factor": 8.0}}
    config = EagleConfig.for_target(Gemma3TextConfig(rope_parameters=ropes))
    assert (config.rope_theta, config.rope_scaling) == (1e6, {"rope_type": "linear", "factor": 8.0})
    target = Gemma3TextConfig()
    del target.rope_parameters["full_attention"]
    with pytest.raises(
        ValueError, match="rope parameters for layers of sliding_attention, but none for full_attention"
    ):
        EagleConfig.for_target(target)


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn", "linear"])
def test_angles_are_those_of_transformers(kind):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = None if kind == "default" else {"rope_type": kind, "factor": 4.0}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = 64
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = EagleConfig(**SHAPE | {"rope_scaling": scaling, "max_position_embeddings": 256})
    cos, sin = Eagle(config).rotary(torch.arange(200)[None], torch.float32)
    expected = LlamaRotaryEmbedding(config.llama_config())(torch.zeros(1), torch.arange(200)[None])
    for ours, theirs in zip((cos, sin), expected):
        torch.testing.assert_close(ours, theirs[0, :, : config.head_dim // 2], rtol=0, atol=1e-6)
