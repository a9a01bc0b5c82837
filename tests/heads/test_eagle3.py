"""EAGLE-3's unrolled training forward equals a step-by-step implementation, row by row in fp64; mistakes change its logits."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from headstart.heads.draft_vocabulary import build_draft_vocabulary
from headstart.heads.eagle3 import Eagle3, Eagle3Config, default_aux_layers, principal_directions
from headstart.tests.heads.eagle_reference import eagle3_logits, eagle3_states
from headstart.tests.heads.test_eagle import SHAPE, H, T, V, one_document, randomize, text

HT, VD, S = 20, 11, 4  # a target of another width; draft vocabulary; steps
SHAPE3 = SHAPE | dict(target_hidden_size=HT, draft_vocab_size=VD, aux_layer_ids=(1, 3, 5))


def make(**changes):
    return randomize(Eagle3(Eagle3Config(**SHAPE3 | changes)))


def logits_of(head, *inputs, **options):
    return torch.stack([head.logits(state) for state in head(*inputs, **options)], 1)  # [B, S, T, VD]


def reference(head, features, tokens, num_steps, mutant=None):
    states = eagle3_states(head.state_dict(), head.config, features, tokens, num_steps, mutant)
    return torch.stack([eagle3_logits(head.state_dict(), head.config, state, mutant) for state in states])


@pytest.mark.parametrize(("num_steps", "layers"), [(1, (1, 3, 5)), (2, (0,)), (8, (2, 7))])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_unrolled_logits_are_those_of_the_definition(num_steps, layers, norm_before_residual):
    head = make(norm_before_residual=norm_before_residual, aux_layer_ids=layers, attention_bias=num_steps == 2)
    features, tokens = text(width=len(layers) * HT, steps=(8,))
    found = logits_of(head, features, tokens, *one_document(T), num_steps=num_steps)
    expected = reference(head, features[0], tokens[0], num_steps)
    assert len(found[0]) == num_steps
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        ("features reversed", 0),
        ("state first", 0),
        ("other residual", 0),
        ("logits before norm", 0),
        ("first token again", 1),
        ("position t", 1),
        ("only step 0 seen", 2),
        ("step 0 forgotten", 2),
        ("norm in the loop", 1),
    ],
)
def test_every_mistake_changes_the_logits(mutant, first):
    """first: the first step that the mistake changes."""
    head = make()
    features, tokens = text(width=3 * HT, steps=(S,))
    found = logits_of(head, features, tokens, *one_document(T), num_steps=S)[0]
    error = (found - reference(head, features[0], tokens[0], S, mutant)).abs().amax((1, 2))
    assert (error[:first] < 1e-10).all()
    assert (error[first:] > 1e-3).all()


def test_documents_of_a_row_do_not_see_each_other():
    head = make()
    parts = [text(n, 3 * HT, (S,), seed=n) for n in (5, 8, 3)]
    features, tokens = (torch.cat(part, 1) for part in zip(*parts))
    positions = torch.cat([torch.arange(n) for n in (5, 8, 3)])[None]
    documents = torch.tensor([[0] * 5 + [1] * 8 + [-1] * 3])  # the last is padding
    packed = logits_of(head, features, tokens, positions, documents, num_steps=S)
    assert packed.isfinite().all()
    alone = [logits_of(head, *part, *one_document(part[1].shape[1]), num_steps=S) for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, 2), rtol=0, atol=1e-10)


def test_a_layer_that_adds_nothing_passes_the_state_on():
    head = make(target_hidden_size=H, aux_layer_ids=(3,))
    with torch.no_grad():
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.fc.weight.copy_(torch.eye(H))
    features, tokens = text(steps=(S,))
    for state in head(features, tokens, *one_document(T), num_steps=S):
        assert torch.equal(state, features)


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_everything_but_the_targets_embedding_is_trained(num_steps, own_embedding):
    head = make(target_hidden_size=HT if own_embedding else H)
    features, tokens = text(width=head.fc.in_features, steps=(S,))
    loss = logits_of(head, features, tokens, *one_document(T), num_steps=num_steps)[:, -1].square().sum()
    loss.backward()
    untouched = [name for name, one in head.named_parameters() if one.grad is None or not one.grad.any()]
    assert untouched == ([] if own_embedding else ["embed_tokens.weight"])
    assert head.embed_tokens.weight.requires_grad is own_embedding


def test_gradients_of_the_unrolled_forward_are_right():
    """Compared with finite differences of the loss; all of them include the join of the two softmaxes."""
    head = make()
    features, tokens = text(width=3 * HT, steps=(S,))

    def loss():
        return logits_of(head, features, tokens, *one_document(T), num_steps=S).logsumexp(-1).sum()

    loss().backward()
    for module in (
        head.midlayer.self_attn.q_proj,
        head.midlayer.self_attn.k_proj,
        head.midlayer.self_attn.v_proj,
        head.fc,
    ):
        direction = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        values = []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                module.weight.add_(direction, alpha=step)
                values.append(loss())
            module.weight.add_(direction, alpha=1e-5)
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close((module.weight.grad * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_more_steps_than_tokens_or_than_eight_are_refused():
    head = make()
    features, tokens = text(width=3 * HT, steps=(S,))
    for num_steps in (0, S + 1, 9):
        with pytest.raises(ValueError, match=f"from 1 to 8 and at most the 4 tokens given per row, got {num_steps}"):
            head(features, tokens, *one_document(T), num_steps=num_steps)


def test_a_head_starts_from_the_targets_tables():
    head = make(target_hidden_size=H)
    counts = torch.randint(100, (V,), generator=torch.Generator().manual_seed(3))
    head.set_draft_vocabulary(*build_draft_vocabulary(counts, VD, always=[30]))
    table, embedding = torch.randn(2, V, H, dtype=torch.float64)
    head.initialize_from_target(table, embedding)
    for row, id in enumerate(head.draft_token_ids.tolist()):
        assert torch.equal(head.lm_head.weight[row], table[id])
    assert head.embedding_is_targets
    assert head.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    with pytest.raises(ValueError, match=r"the target's lm_head is \(37, 20\), this head can start from \(37, 24\)"):
        head.initialize_from_target(torch.zeros(V, HT), embedding)
    with pytest.raises(ValueError, match=r"the target's embedding is \(37, 20\), this head can start from \(37, 24\)"):
        head.initialize_from_target(table, torch.zeros(V, HT))
    whole = make(draft_vocab_size=V, target_hidden_size=H)
    assert whole.d2t is whole.t2d is whole.draft_token_ids is None
    whole.initialize_from_target(table, embedding)
    assert torch.equal(whole.lm_head.weight, table)
    with pytest.raises(ValueError, match="drafts over the whole vocabulary"):
        whole.set_draft_vocabulary(*build_draft_vocabulary(counts, V))


def test_a_narrower_head_starts_with_as_much_of_the_targets_tables_as_its_width_can_hold():
    wide = H + 8
    head = make(target_hidden_size=wide)
    head.set_draft_vocabulary(*build_draft_vocabulary(torch.arange(V), VD))
    tables = torch.randn(2, V, wide, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    head.initialize_from_target(*tables)
    assert head.embed_tokens.weight.requires_grad
    assert not head.embedding_is_targets
    narrow = principal_directions(tables[0], H)
    assert torch.equal(head.lm_head.weight, narrow[head.draft_token_ids].double())
    # The rows' products with each other are those of the best table of this rank (Eckart and Young).
    left, values, _ = torch.linalg.svd(tables[1], full_matrices=False)
    best = (left[:, :H] * values[:H] ** 2) @ left[:, :H].T
    weight = head.embed_tokens.weight.detach()
    torch.testing.assert_close(weight @ weight.T, best, rtol=1e-4, atol=1e-3)


def test_a_narrower_layer_holds_fewer_of_the_targets_attention_heads():
    sizes = dict(vocab_size=V, intermediate_size=100, num_attention_heads=8, num_key_value_heads=2, head_dim=6)
    target = LlamaConfig(num_hidden_layers=8, hidden_size=32, **sizes)
    config = Eagle3Config.for_target(target, hidden_size=12)
    assert (config.hidden_size, config.target_hidden_size, config.own_embedding) == (12, 32, True)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 1, 6)
    assert config.intermediate_size == 64
    assert Eagle3Config.for_target(target, hidden_size=16).num_key_value_heads == 2
    wide = LlamaConfig(hidden_size=4096, intermediate_size=18944, num_attention_heads=32, num_hidden_layers=8)
    config = Eagle3Config.for_target(wide, hidden_size=2560)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (20, 20, 11840)
    for size in (10, 3, 36):
        with pytest.raises(ValueError, match=f"hidden_size {size}: .* here 32, .* take a multiple of 4"):
            Eagle3Config.for_target(target, hidden_size=size)


def test_draft_vocabulary_holds_the_most_frequent_tokens():
    counts = torch.tensor([4, 0, 9, 4, 4, 1, 9, 0])
    d2t, t2d = build_draft_vocabulary(counts, 4)
    assert (torch.arange(4) + d2t).tolist() == [0, 2, 3, 6]  # the lower ids of the tie of 4s
    assert t2d.nonzero().flatten().tolist() == [0, 2, 3, 6]
    d2t, t2d = build_draft_vocabulary(counts, 4, always=[7, 1, 7])
    assert (torch.arange(4) + d2t).tolist() == [1, 2, 6, 7]
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert build_draft_vocabulary(counts, 8)[0].tolist() == [0] * 8
    for size, always, message in (
        (9, (), "from 2 to the target's 8 tokens, got 9"),
        (1, (), "from 2 to the target's 8 tokens, got 1"),
        (4, (8,), r"tokens \[8\] are to be in the draft vocabulary, but the target's end at 7"),
        (2, (1, 2, 3), "3 tokens are to be in a draft vocabulary of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            build_draft_vocabulary(counts, size, always)


def test_aux_layers_are_ascending_and_default_to_the_published_ones():
    for bad in ((3, 1), (1, 1), (), (-1, 2), [1, 2], (1.0,)):
        with pytest.raises(ValueError, match="aux_layer_ids must be ascending layer numbers"):
            Eagle3Config(**SHAPE3 | {"aux_layer_ids": bad})
    assert default_aux_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="a target of 6 layers has no default aux layers"):
        default_aux_layers(6)
    sizes = dict(hidden_size=H, vocab_size=V, intermediate_size=40, num_attention_heads=6)
    config = Eagle3Config.for_target(LlamaConfig(num_hidden_layers=8, **sizes), draft_vocab_size=VD)
    assert (config.aux_layer_ids, config.target_hidden_size, config.draft_vocab_size) == ((2, 4, 5), H, VD)
    shallow = LlamaConfig(num_hidden_layers=2, **sizes)
    assert Eagle3Config.for_target(shallow, aux_layer_ids=(0, 2)).aux_layer_ids == (0, 2)
    with pytest.raises(ValueError, match="give aux_layer_ids"):
        Eagle3Config.for_target(shallow)


def test_a_head_whose_file_names_no_layers_asks_for_the_targets_depth():
    head = Eagle3(replace(make().config, aux_layer_ids=None))
    with pytest.raises(ValueError, match=r"call head\.take_depth"):
        _ = head.features
    head.take_depth(32)
    assert head.features == (2, 16, 29)
    head.take_depth(16)
    assert head.features == (2, 16, 29)
