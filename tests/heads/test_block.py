"""Block drafters against their definition (block_definition.py): features, keys, masks and positions."""

from copy import deepcopy

import pytest
import torch
from transformers import LlamaConfig

from headstart.heads import block as block_module
from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.block_parts import Convolution, Selector
from headstart.heads.checkpoint import check_head_fits
from headstart.tests.heads.block_definition import (
    DOCUMENTS,
    POSITIONS,
    SIZE,
    H,
    T,
    V,
    inputs,
    largest_error,
    make,
)
from headstart.tests.heads.formats.test_block import SHAPE

MEMBERS = {
    "dflash": {},
    "dflash-anchored-lm_head": dict(sample_from_anchor=True, draft_vocab_size=V),
    "dspark-draft_vocabulary": dict(edge_rank=3, draft_vocab_size=20),
    "dspark-anchored": dict(edge_rank=3, sample_from_anchor=True),
    "dflash2": dict(selector_rank=3, selector_top_k=7, conv_kernel_size=2, conv_group_size=4),
    "dflash2-selector-lm_head": dict(selector_rank=5, draft_vocab_size=V),
    "dflash2-convolution-draft_vocabulary": dict(conv_kernel_size=3, conv_group_size=24, draft_vocab_size=20),
}
SCALES = dict(output_multiplier=0.3, final_logit_softcapping=2.0, input_embedding_scale=3.0)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_predictions_equal_the_definition(is_causal, member):
    head = make(is_causal=is_causal, **MEMBERS[member])
    assert largest_error(head, is_causal) < 1e-5
    assert largest_error(head, not is_causal) > 1e-3


@pytest.mark.parametrize("changes", [*({one: SCALES[one]} for one in SCALES), SCALES], ids=[*SCALES, "all"])
@pytest.mark.parametrize("member", MEMBERS)
def test_scaled_and_capped_predictions_equal_the_definition(member, changes):
    # Of the largest logit, which a cap of 2 makes small: some CPUs are 1.0006e-5 away.
    assert largest_error(make(**MEMBERS[member] | changes)) < 2e-5


def caps_first(head):
    multiplier, cap = head.config.output_multiplier, head.config.final_logit_softcapping
    return {"scaled": lambda logits: torch.tanh(logits / cap) * cap * multiplier}


def caps_after_the_correction(head):
    right, scaled = head.correction.forward, head.scaled
    head.correction.forward = lambda *given: scaled(right(*given))
    return {"scaled": lambda logits: logits}


@pytest.mark.parametrize("member", ["dspark-anchored", "dflash2"])
@pytest.mark.parametrize("mutate", [caps_first, caps_after_the_correction])
def test_scales_in_another_place_are_caught(mutate, member):
    head = make(**MEMBERS[member] | SCALES)
    for name, mutant in mutate(head).items():
        setattr(head, name, mutant)
    assert largest_error(head) > 1e-3


def test_scaled_logits_are_made_in_fp32_and_others_left_alone():
    """So that tokens near the cap do not become alike: bfloat16 knows no number between 19.875 and 20."""
    logits = torch.tensor([[60.0, 61.0, 64.0]], dtype=torch.bfloat16)
    assert make().scaled(logits) is logits
    capped = make(final_logit_softcapping=20.0).scaled(logits)
    assert capped.dtype == torch.float32
    assert capped[0].diff().min() > 0
    assert make(output_multiplier=0.5).scaled(logits.double()).dtype == torch.float64


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "2", True])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_cannot_be_are_refused(name, value):
    if (name, value) == ("final_logit_softcapping", 0.0):
        assert make(**{name: value}).config == make().config  # no cap
        return
    with pytest.raises(ValueError, match=f"BlockConfig.{name} must be a number "):
        make(**{name: value})


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


DFLASH2 = MEMBERS["dflash2"]


def test_dflash2_starts_as_the_dflash_that_it_is_given():
    torch.manual_seed(0)
    heads = [BlockHead(BlockConfig(**SHAPE, **changes)) for changes in ({}, DFLASH2)]
    new = heads[1].load_state_dict(heads[0].state_dict(), strict=False).missing_keys  # all but DFlash2's parts
    assert len(new) == 3 + 2 * 2 * 2
    features, tokens, lm_head = inputs()
    found = []
    for head in heads:
        head.take_embedding(torch.ones(V, H) * torch.arange(V)[:, None])
        predictions = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head)
        found.append([predictions.logits(state, k) for k, state in enumerate(predictions.states)])
    for plain, corrected in zip(*found):
        kept = corrected > -torch.inf
        assert torch.equal(kept, plain >= plain.topk(7).values[:, -1:])
        assert torch.equal(plain[kept], corrected[kept])
    found[1][0][found[1][0] > -torch.inf].square().sum().backward()
    learns = {name for name, one in heads[1].named_parameters() if one.grad is not None and one.grad.any()}
    # A and P are multiplied by B, which is zero in the first step.
    assert {*new} - learns == {f"candidate_selector.{x}" for x in ("predecessor_codebook", "hidden_projection.weight")}


def convolve_across_blocks(self, x, base, corrections):
    """A mutant of Convolution.convolve: the blocks of a row are one."""
    mutant = deepcopy(self)
    mutant.block_size = x.shape[-2]
    return CONVOLVE(mutant, x, base, corrections)


CONVOLVE = Convolution.convolve
DFLASH2_MUTANTS = {
    "a tap that reads the block before": (Convolution, "convolve", convolve_across_blocks),
    "the corrections of the other side": (
        *(Convolution, "corrections"),
        lambda self, x, right=Convolution.corrections: right(self, x)[::-1],
    ),
    "the kernel of what goes in for what comes out": (
        *(Convolution, "convolve"),
        lambda self, x, base, corrections: CONVOLVE(self, x, self.base_kernel[0], corrections),
    ),
    "candidates one too few": (
        *(Selector, "candidates"),
        lambda self, logits: logits.topk(self.top_k - 1).indices,
    ),
    "the slot's own token": (
        *(Selector, "before"),
        lambda self, tokens, right=Selector.before: right(self, tokens.roll(-1)),
    ),
}


@pytest.mark.parametrize("mutant", DFLASH2_MUTANTS)
def test_wrong_parts_of_dflash2_are_caught(monkeypatch, mutant):
    monkeypatch.setattr(*DFLASH2_MUTANTS[mutant])
    assert largest_error(make(**DFLASH2)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(selector_rank=3, edge_rank=3), "has parts of DSpark .* and of DFlash2"),
        (
            dict(conv_kernel_size=2, conv_group_size=8, confidence=True, confidence_sees_token=False),
            "no file holds both",
        ),
        (dict(selector_rank=3, selector_top_k=51), "selector_top_k must be from 2 to 50, got 51"),
        (dict(selector_rank=3, draft_vocab_size=20), "must be the vocab_size 50 or None with a selector"),
        (dict(conv_kernel_size=7, conv_group_size=8), "at most the block's 6 slots, got 7"),
        (dict(conv_kernel_size=2), "conv_group_size must divide the hidden_size 24, got 16"),
    ],
)
def test_parts_of_dflash2_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


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
    plain, edged, both = (make(**one).draft_bytes(100) for one in ({}, dict(edge_rank=3), DFLASH2))
    of_w2, of_p, of_convolutions = 4 * V * 3, 4 * 3 * H, 4 * 2 * 2 * (2 * 2 * H + 2 * 2 * 6 * H)
    assert edged == plain | {"first": plain["first"] + of_w2, "level": of_w2}
    assert both == plain | {"first": plain["first"] + of_p + of_convolutions}


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


@pytest.mark.parametrize("changes", [{}, dict(edge_rank=3), dict(edge_rank=3, sample_from_anchor=True), DFLASH2])
@torch.no_grad()
def test_outputs_at_some_rows_are_those_of_predict(changes):
    # fp64: sums of other shapes round differently, in fp32 on some CPUs by twice the tolerance.
    head, (features, tokens, lm_head) = make(**changes).double(), inputs()
    features, lm_head = features.double(), lm_head.double()
    rows = torch.tensor([1, 4, 8])
    following = torch.nn.functional.pad(tokens[:1], (0, 3))[:, 1:].unfold(1, 3, 1)
    packed = features[:1], following, POSITIONS[:1], DOCUMENTS[:1]
    predictions = head.predict(features, tokens, POSITIONS, DOCUMENTS, lm_head)
    for depth, found in enumerate(head.outputs_at(rows, *packed, lm_head_weight=lm_head)):
        logits = predictions.whole_logits or predictions.logits  # checks compare finite numbers
        torch.testing.assert_close(found, logits(predictions.states[depth][rows], depth))
        drafted = predictions.logits(predictions.states[depth][rows], depth)
        torch.testing.assert_close(found.where(drafted > -torch.inf, -torch.inf), drafted)
        assert found.isfinite().all()
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
