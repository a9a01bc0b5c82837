"""Block drafters against their definition, written out here block by block: features, keys, masks and positions."""

import pytest
import torch
from transformers import LlamaConfig

from headstart.heads import block as block_module
from headstart.heads.block import BlockConfig, BlockHead
from headstart.heads.checkpoint import check_head_fits
from headstart.tests.heads.formats.test_block import SHAPE

V, H, D, T, SIZE = 50, 24, 8, 11, 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4, [2] * 11])
POSITIONS = torch.tensor([[*range(7), *range(4)], [*range(30, 41)]])


def make(**changes):
    torch.manual_seed(0)
    head = BlockHead(BlockConfig(**SHAPE | changes))
    for parameter in head.parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if parameter.dim() == 1 else torch.randn_like(parameter) / 4
    head.take_embedding(torch.randn(V, H))
    return head


def inputs():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, T, 3 * H, generator=generator)
    return features, torch.randint(V, (2, T), generator=generator), torch.randn(V, H, generator=generator)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x, positions):
    """x [heads, rows, D], each pair (i, i + D / 2) as a complex number"""
    angles = positions[:, None].double() * 1e6 ** (-torch.arange(0, D, 2).double() / D)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def block_states(head, reaches, features, token, start, size=SIZE):
    """States [size, H] of one block, in float64: `features` [L, 3 H] are those of its context, at positions start, ...

    reaches: (is_causal, window, of_block) of each layer
    """
    w = {name: tensor.double() for name, tensor in head.state_dict().items()}
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][torch.tensor([token] + [SHAPE["mask_token_id"]] * (size - 1))]
    length = len(features)
    at_context, at_block = start + torch.arange(length), start + length + torch.arange(size)
    for i in range(SHAPE["num_hidden_layers"]):
        at = f"layers.{i}."
        q, k, v, o = (w[f"{at}self_attn.{one}_proj.weight"] for one in "qkvo")
        y = norm(x, w[f"{at}input_layernorm.weight"])

        def heads(z):
            return z.unflatten(-1, (-1, D)).transpose(0, 1)

        both = torch.cat((context, y))
        queries = turn(norm(heads(y @ q.T), w[f"{at}self_attn.q_norm.weight"]), at_block)
        keys = turn(norm(heads(both @ k.T), w[f"{at}self_attn.k_norm.weight"]), torch.cat((at_context, at_block)))
        values = heads(both @ v.T)
        out = []
        for head_number in range(4):
            scores = queries[head_number] @ keys[head_number // 2].T / D**0.5  # [size, L + size]
            is_causal, window, of_block = reaches[i]
            for slot in range(size):
                if is_causal:
                    scores[slot, length + slot + 1 :] = -torch.inf
                if window is not None:
                    kept = window if of_block else window - 1 - slot  # of the context
                    scores[slot, : max(length - max(kept, 0), 0)] = -torch.inf
            out.append(scores.softmax(-1) @ values[head_number // 2])
        x = x + torch.cat(out, -1) @ o.T
        y = norm(x, w[f"{at}post_attention_layernorm.weight"])
        gate, up, down = (w[f"{at}mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, w["norm.weight"])


def block_logits(head, reaches, features, tokens, start, lm_head):
    """Logits [5, V] of a block whose first slot holds tokens[0], if tokens[1:] are those before its later predictions."""
    size, lm_head = SIZE - head.config.sample_from_anchor, lm_head if head.lm_head is None else head.lm_head.weight
    logits = block_states(head, reaches, features, tokens[0], start, size)[size - 5 :] @ lm_head.double().T
    if head.markov_head is None:
        return logits
    w1, w2 = head.markov_head.markov_w1.weight.double(), head.markov_head.markov_w2.weight.double()
    return torch.stack([logits[k] + w2 @ w1[tokens[k]] for k in range(5)])


@torch.no_grad()
def largest_error(head, is_causal=False, reaches=None):
    """The largest difference of all predictions of all blocks from the definition, of the largest logit."""
    reaches = reaches or [(is_causal, None, False)] * 2
    features, tokens, lm_head = inputs()
    predictions = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head)
    found = torch.stack([predictions.logits(state, k) for k, state in enumerate(predictions.states)], 1)
    worst, largest = 0.0, 0.0
    for row, begin, end in ((0, 0, 7), (0, 7, 11), (1, 0, 11)):
        for last in range(begin, end - 1):
            read = features[row, begin : last + 1]
            given = torch.cat((tokens[row, last + 1 :], torch.zeros(5, dtype=torch.int64)))  # 0 after the row's end
            wanted = block_logits(head, reaches, read, given, POSITIONS[row, begin], lm_head)
            worst = max(worst, (found[row * T + last] - wanted).abs().max().item())
            largest = max(largest, wanted.abs().max().item())
    return worst / largest


@pytest.mark.parametrize(
    ("edge_rank", "anchored", "draft_vocab_size"), [(0, False, None), (0, True, V), (3, False, 20), (3, True, None)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_predictions_equal_the_definition(is_causal, edge_rank, anchored, draft_vocab_size):
    shape = dict(edge_rank=edge_rank, sample_from_anchor=anchored, draft_vocab_size=draft_vocab_size)
    head = make(is_causal=is_causal, **shape)
    assert largest_error(head, is_causal) < 1e-5
    assert largest_error(head, not is_causal) > 1e-3


FULL, ALL_CAUSAL = (False, None, False), (True, None, False)
# By the projects: layers, keys of BlockConfig, what each layer's slots see.
READINGS = {
    "z-lab: never causal": (dict(sliding_layers=(0,)), [(False, 7, False), FULL]),
    "SpecForge: causal in sliding layers": (
        dict(sliding_layers=(0,), sliding_is_causal=True),
        [(True, 7, False), FULL],
    ),
    "speculators: causal there, the block's window": (
        dict(sliding_layers=(1,), sliding_is_causal=True, window_of_block=True),
        [FULL, (True, 7, True)],
    ),
    "speculators: sliding_window_non_causal": (
        dict(sliding_layers=(0, 1), window_of_block=True),
        [(False, 7, True), (False, 7, True)],
    ),
    "causal everywhere": (
        dict(sliding_layers=(0,), sliding_is_causal=True, is_causal=True),
        [(True, 7, False), ALL_CAUSAL],
    ),
}


@pytest.mark.parametrize("reading", READINGS)
def test_sliding_layers_equal_the_definition_of_each_project(reading):
    changes, reaches = READINGS[reading]
    head = make(sliding_window=7, **changes)
    assert largest_error(head, reaches=reaches) < 1e-5
    wrong = [largest_error(head, reaches=other) for name, (_, other) in READINGS.items() if name != reading]
    assert min(wrong) > 1e-3


def test_sliding_layers_that_do_not_fit_are_refused():
    for changes, message in (
        (dict(sliding_layers=(2,), sliding_window=9), r"ascending layers below 2, got \(2,\)"),
        (dict(sliding_layers=(0,), sliding_window=5), "at least a block's 6 slots, got 5"),
        (dict(sliding_window=9), "belong to sliding_layers"),
        (dict(sliding_layers=(0,), sliding_window=9, is_causal=True), "set sliding_is_causal, too"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)


def test_an_own_lm_head_starts_as_rows_of_the_target_s():
    head, lm_head, embedding = make(draft_vocab_size=20), torch.randn(V, H), torch.randn(V, H)
    ids = torch.tensor([*range(0, 40, 2)])
    head.set_draft_vocabulary(ids - torch.arange(20), torch.isin(torch.arange(V), ids))
    head.initialize_from_target(lm_head, embedding)
    assert torch.equal(head.lm_head.weight, lm_head[ids])
    assert torch.equal(head.draft_token_ids, ids)
    assert not head.lm_head.weight.requires_grad
    states, previous = torch.randn(4, H), torch.tensor([1, 2, 3, 4])
    torch.testing.assert_close(head.logits(states, previous, None), states @ lm_head[ids].T)
    with pytest.raises(ValueError, match="drafts over the whole vocabulary"):
        make().set_draft_vocabulary(ids, ids)
    with pytest.raises(ValueError, match="draft_vocab_size must be None or from 2 to the vocab_size 50, got 51"):
        make(draft_vocab_size=51)


def test_an_edge_starts_without_effect():
    torch.manual_seed(0)
    heads = [BlockHead(BlockConfig(**SHAPE, edge_rank=rank)) for rank in (0, 3)]
    heads[1].load_state_dict(heads[0].state_dict(), strict=False)  # all but the edge
    states, previous, weight = torch.randn(4, H), torch.tensor([1, 2, 3, 4]), torch.randn(V, H)
    plain, corrected = (head.logits(states, previous, weight) for head in heads)
    assert torch.equal(plain, corrected)
    corrected.square().sum().backward()
    assert heads[1].markov_head.markov_w2.weight.grad.abs().min() > 0


@pytest.mark.parametrize("mutant", ["the token itself", "the token of the block's start"])
def test_an_edge_that_reads_another_token_is_caught(monkeypatch, mutant):
    head, (features, tokens, lm_head) = make(edge_rank=3), inputs()
    right, wrong = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head), tokens.roll(-1, 1)
    w1 = head.markov_head.markov_w1
    if mutant == "the token itself":
        monkeypatch.setattr(w1, "forward", lambda ids: torch.nn.functional.embedding(ids.roll(-1, 0), w1.weight))
    else:
        firsts = wrong.flatten()
        monkeypatch.setattr(w1, "forward", lambda ids: torch.nn.functional.embedding(firsts, w1.weight))
    assert right.states[0].shape == (2 * T, H + 3)
    assert largest_error(head) > 1e-3


@pytest.mark.parametrize("sees_token", [False, True])
def test_confidence_equals_the_definition(sees_token):
    head = make(edge_rank=3, confidence=True, confidence_sees_token=sees_token)
    states, previous = torch.randn(4, H), torch.tensor([7, 0, 49, 7])
    weight, bias = head.confidence_head.proj.weight[0].double(), head.confidence_head.proj.bias.double()
    wanted = states.double() @ weight[:H] + bias
    if sees_token:
        wanted += head.markov_head.markov_w1.weight[previous].double() @ weight[H:]
    torch.testing.assert_close(head.confidence_logits(states, previous).double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="reads the edge's table of tokens, and edge_rank is 0"):
        make(confidence=True)
    make(confidence=True, confidence_sees_token=False)


def test_weights_that_drafting_reads_are_counted():
    plain, edged = make().draft_bytes(100), make(edge_rank=3).draft_bytes(100)
    of_w2 = 4 * V * 3
    assert edged == plain | {"first": plain["first"] + of_w2, "level": of_w2}


def with_mask(change):
    """A mutant of BlockHead._mask: `change(mask, rows)` of its result."""
    right = BlockHead._mask
    return lambda self, rows, documents, reach: change(right(self, rows, documents, reach).clone(), rows)


def sees_neighbours(mask, rows):
    mask[..., T:] |= (
        torch.arange(rows.shape[1] * SIZE) // SIZE == torch.arange(rows.shape[1] * SIZE)[:, None] // SIZE + 1
    )
    return mask


def sees_one_feature_more(mask, rows):
    mask[..., 1:T] |= mask[..., : T - 1].clone()
    return mask


def sees_no_newest_feature(mask, rows):
    mask[..., : T - 1] &= mask[..., 1:T].clone()
    return mask


@pytest.mark.parametrize("change", [sees_neighbours, sees_one_feature_more, sees_no_newest_feature])
def test_wrong_masks_are_caught(monkeypatch, change):
    monkeypatch.setattr(BlockHead, "_mask", with_mask(change))
    assert largest_error(make()) > 1e-3


def test_context_keys_one_position_late_are_caught(monkeypatch):
    forward = block_module.BlockAttention.forward

    def late(self, x, context, rotations, mask):
        of_block, (cos, sin) = rotations
        return forward(self, x, context, (of_block, (cos.roll(-1, 0), sin.roll(-1, 0))), mask)

    monkeypatch.setattr(block_module.BlockAttention, "forward", late)
    assert largest_error(make()) > 1e-3


@pytest.mark.parametrize("changes", [{}, dict(edge_rank=3), dict(edge_rank=3, sample_from_anchor=True)])
@torch.no_grad()
def test_outputs_at_some_rows_are_those_of_predict(changes):
    head, (features, tokens, lm_head) = make(**changes), inputs()
    rows = torch.tensor([1, 4, 8])
    following = torch.nn.functional.pad(tokens[:1], (0, 3))[:, 1:].unfold(1, 3, 1)
    packed = features[:1], following, POSITIONS[:1], DOCUMENTS[:1]
    predictions = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head)
    for depth, found in enumerate(head.outputs_at(rows, *packed, lm_head_weight=lm_head)):
        torch.testing.assert_close(found, predictions.logits(predictions.states[depth][rows], depth))
    assert [x.shape for x in head.outputs_at(rows, *packed)] == [(3, H)] * 3


def test_another_target_is_refused():
    head = make()
    sizes = dict(hidden_size=H, vocab_size=V, num_hidden_layers=8, num_attention_heads=4)
    check_head_fits(head, LlamaConfig(**sizes))
    with pytest.raises(ValueError, match=r"aux layers \[2, 4, 6\], the target has layers 0 to 5"):
        check_head_fits(head, LlamaConfig(**sizes | dict(num_hidden_layers=6)))
    with pytest.raises(ValueError, match="attention_bias must be false"):
        make(attention_bias=True)
    with pytest.raises(ValueError, match="edge_rank must be a whole number of at least 0, got -1"):
        make(edge_rank=-1)
