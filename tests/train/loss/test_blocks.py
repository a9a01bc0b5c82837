"""Anchors, labels, losses and gradients of blocks against plain loops over documents and blocks, through torch's own losses."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.block_parts import Convolution, Selector
from headstart.train.data.packed.packing import PackedRows
from headstart.train.loss import blocks as blocks_module
from headstart.train.loss.blocks import (
    BlockObjective,
    Blocks,
    accumulate_block_gradients,
    draw_blocks,
    summarize_blocks,
)
from headstart.train.loss.losses import Loss

H, V, K = 12, 23, 3
RATES = [0.5, 0.3, 0.2]  # of acceptance, which the weights of kl in lk hang on
WEIGHTS = [1.0, 0.7, 0.5]
SHAPE = {"hidden_size": H, "vocab_size": V, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"head_dim": 4, "num_hidden_layers": 2, "mask_token_id": 5, "aux_layer_ids": (0, 2)}


def make_rows(num_rows=3, length=31):
    """Rows of documents of odd lengths with padding at the end; most tokens supervised."""
    g = torch.Generator().manual_seed(0)
    document_ids, position_ids = torch.full((num_rows, length), -1), torch.zeros(num_rows, length, dtype=torch.int64)
    for row in range(num_rows):
        start, document = 0, 10 * row
        while start < length - 4:
            end = min(start + int(torch.randint(2, 12, (1,), generator=g)), length - 3)
            document_ids[row, start:end], position_ids[row, start:end] = document, torch.arange(end - start)
            start, document = end, document + 1
    supervised = (torch.rand(num_rows, length, generator=g) < 0.8) & (document_ids >= 0)
    return PackedRows(torch.randint(V, (num_rows, length), generator=g), position_ids, document_ids, supervised)


def make_head(**changes):
    torch.manual_seed(1)
    changes = {"num_speculative_tokens": K} | changes
    head = BlockHead(BlockConfig(**SHAPE | changes))
    head.take_embedding(torch.randn(V, H))
    head = head.double()
    for parameter in head.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4)
    lm_head = torch.nn.Linear(H, V, bias=False).double().requires_grad_(False)
    torch.nn.init.normal_(lm_head.weight, std=0.5)
    if head.lm_head is not None:  # drafts every second token
        head.set_draft_vocabulary(torch.arange(12), torch.arange(V) % 2 == 0)
        head.initialize_from_target(lm_head.weight, head.embed_tokens.weight)
    g = torch.Generator().manual_seed(2)
    rows = make_rows()
    last, streams = (torch.randn(*rows.input_ids.shape, size, generator=g).double() for size in (H, 2 * H))
    return head, lm_head, rows, last, streams


def anchors_by_loops(rows):
    """[(row, place)] of every token that may be an anchor."""
    ids, marks, found = rows.document_ids, rows.supervised, []
    for row in range(len(ids)):
        for a in range(1, ids.shape[1] - 1):
            alike = ids[row, a - 1] == ids[row, a] == ids[row, a + 1] != -1
            if alike and marks[row, a] and marks[row, a + 1]:
                found.append((row, a))
    return found


def labels_of(rows, row, a):
    """The depths of the block at this anchor that have a label."""
    ids, marks, length = rows.document_ids[row], rows.supervised[row], rows.row_length
    return [k for k in range(K) if a + 1 + k < length and ids[a + 1 + k] == ids[a] and marks[a + 1 + k]]


def choice_by_loops(selector, logits, state, before, label):
    """The cross entropy of DFlash2's choice among the likeliest tokens after the token `before`; 0 if the label is none of them."""
    among = sorted(range(V), key=lambda token: -logits[token])[: selector.top_k]
    if label not in among:
        return 0.0
    gate = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ state)
    scores = torch.stack([logits[token] + gate @ selector.successor_codebook[token] for token in among])
    return -scores.log_softmax(0)[among.index(label)]


def loss_by_loops(head, lm_head, rows, last, streams, blocks, objective):
    """The definition, one block of one document at a time. -> (loss, losses of each depth, labels)

    A block is given nothing but its document's features before the anchor: there is no mask.
    """
    total, of_depth, num_labels = 0.0, [0.0] * K, 0
    for row in range(len(blocks.anchors)):
        for a in blocks.anchors[row][blocks.valid[row, :, 0]].tolist():
            begin = a - int(rows.position_ids[row, a])
            places = torch.arange(begin, a)
            x = rows.input_ids[row]
            context = streams[row, begin:a][None]
            documents, positions = torch.zeros(1, len(places), dtype=torch.int64), (places - begin)[None]
            states = head(context, x[a][None, None], torch.tensor([[a - 1 - begin]]), positions, documents)[0, 0]
            values, rates, choices = {}, {}, {}
            for k in labels_of(rows, row, a):
                state, before = states[head.config.first_slot + k], x[a + k]
                drafted = list(range(0, V, 2)) if head.lm_head is not None else list(range(V))
                label = int(x[a + 1 + k])
                num_labels += 1
                if objective.loss.name == "hard" and label not in drafted:
                    continue
                cap = head.config.final_logit_softcapping
                logits = lm_head.weight[drafted] @ state * head.config.output_multiplier
                logits = cap * torch.tanh(logits / cap) if cap else logits
                if head.candidate_selector is not None:
                    choices[k] = choice_by_loops(head.candidate_selector, logits, state, before, label)
                if head.markov_head is not None:
                    logits = logits + head.markov_head.markov_w2.weight @ head.markov_head.markov_w1.weight[before]
                p, log_q = (lm_head.weight @ last[row, a + k]).softmax(-1)[drafted], logits.log_softmax(-1)
                alpha = torch.minimum(p, log_q.exp()).sum()
                kl, w = (p * (p.log() - log_q)).sum(), math.exp(-2.0 * RATES[k])
                hard = -log_q[drafted.index(label)] if label in drafted else None
                every = {"hard": hard, "kl": kl, "lk": w * kl + (1 - w) * (1 - alpha)}
                outside = 1 - p.sum()  # where q is 0
                far = 0.9 * ((p - log_q.exp()).abs().sum() + outside)
                every["hard-l1"] = far if hard is None else 0.1 * hard + far
                every |= {"lk-log": -alpha.log(), "tv": (p - log_q.exp()).abs().sum() / 2}
                values[k], rates[k] = every[objective.loss.name], alpha.detach()
                if head.confidence_head is not None:
                    read = torch.cat((state, head.markov_head.markov_w1.weight[before]))
                    sure = (head.confidence_head.proj.weight @ read + head.confidence_head.proj.bias)[0].sigmoid()
                    unsure = -(alpha.detach() * sure.log() + (1 - alpha.detach()) * (1 - sure).log())
                    total = total + objective.confidence_weight * objective.weights[k] * unsure
            for k, value in values.items():
                weight = objective.weights[k]
                if objective.dynamic:
                    chances = {i: math.exp(-one.item()) for i, one in values.items()}
                    weight = sum(math.prod((1 + chances[i]) / 2 for i in chances if i <= m) for m in chances if m >= k)
                total = total + weight * (value + objective.selector_weight * choices.get(k, 0))
                of_depth[k] += float(value.detach())
    return total / num_labels, of_depth, num_labels


def ours(head, lm_head, rows, last, streams, blocks, objective, chunk_tokens=7, num_labels=None):
    head.zero_grad()
    states = head(streams, *blocks.seen(rows.input_ids), rows.position_ids, rows.document_ids)
    first = head.config.first_slot
    return accumulate_block_gradients(
        head,
        states[:, :, first : first + K],
        blocks,
        rows.input_ids,
        last.flatten(0, 1),
        lm_head=lm_head,
        objective=objective,
        num_labels=num_labels or blocks.num_labels,
        chunk_tokens=chunk_tokens,
        with_hits=True,
    )


def gradients(head):
    return {name: one.grad.clone() for name, one in head.named_parameters() if one.requires_grad}


EDGE, DRAFTED = {"edge_rank": 4}, {"draft_vocab_size": 12}
SELECTOR = {"selector_rank": 4, "selector_top_k": 9}
DFLASH2 = SELECTOR | {"conv_kernel_size": 2, "conv_group_size": 4}
SCALES = {"output_multiplier": 0.6, "final_logit_softcapping": 1.5, "input_embedding_scale": 2.5}
CASES = {
    "hard": (Loss("hard"), {}, {}),
    "kl": (Loss("kl"), {}, {}),
    "lk": (Loss("lk", eta=2.0), {}, {}),
    "lk-log": (Loss("lk-log"), {"is_causal": True}, {}),
    "tv": (Loss("tv"), {}, {}),
    "kl, sliding": (Loss("kl"), {"sliding_layers": (0,), "sliding_window": 4}, {}),
    "kl, sliding, of the block": (
        Loss("kl"),
        {"sliding_layers": (0, 1), "sliding_window": 5, "sliding_is_causal": True, "window_of_block": True},
        {},
    ),
    "dpace": (Loss("hard"), {}, {"dynamic": True}),
    "hard, draft vocabulary": (Loss("hard"), EDGE | DRAFTED, {}),
    "kl, draft vocabulary": (Loss("kl"), EDGE | DRAFTED, {}),
    "hard, edge": (Loss("hard"), EDGE, {}),
    "kl, edge, anchor": (Loss("kl"), EDGE | {"sample_from_anchor": True}, {}),
    "dpace, edge, confidence": (
        Loss("hard"),
        EDGE | {"confidence": True},
        {"dynamic": False, "confidence_weight": 0.8},
    ),
    "DSpark's": (Loss("hard-l1"), EDGE | {"confidence": True}, {"confidence_weight": 1.0}),
    "hard-l1, draft vocabulary": (Loss("hard-l1"), EDGE | DRAFTED, {}),
    "kl, dflash2": (Loss("kl"), DFLASH2 | {"is_causal": True}, {"selector_weight": 0.7}),
    "kl, a selector that does not count": (Loss("kl"), SELECTOR, {"selector_weight": 0.0}),
    "hard, selector": (Loss("hard"), SELECTOR, {"selector_weight": 1.0}),
    "dpace, dflash2": (Loss("hard"), DFLASH2, {"dynamic": True, "selector_weight": 2.0}),
    "hard, dflash2, scaled": (Loss("hard"), DFLASH2 | SCALES, {"selector_weight": 1.0}),
    "kl, edge, scaled": (Loss("kl"), EDGE | {"output_multiplier": 0.6}, {}),
    "dpace, draft vocabulary, capped": (Loss("hard"), DRAFTED | {"final_logit_softcapping": 1.5}, {"dynamic": True}),
    "tv, convolutions": (Loss("tv"), {"conv_kernel_size": 3, "conv_group_size": 6}, {}),
    "tv, edge, confidence": (Loss("tv"), EDGE | {"confidence": True}, {"confidence_weight": 1.0}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients_are_those_of_single_blocks_in_single_documents(case):
    """Whatever the chunks."""
    loss, changes, keys = case
    head, *given = make_head(**changes)
    objective = BlockObjective(loss, WEIGHTS, rates=RATES, **keys)
    blocks = draw_blocks(given[1], 6, K, seed=0, step=0)
    expected, of_depth, num_labels = loss_by_loops(head, *given, blocks, objective)
    assert num_labels == blocks.num_labels
    expected.backward()
    wanted = gradients(head)
    for chunk_tokens in (1, 7, 1000):
        totals = ours(head, *given, blocks, objective, chunk_tokens)
        for name, one in gradients(head).items():
            torch.testing.assert_close(one, wanted[name], rtol=1e-9, atol=1e-12, msg=name)
            counts = objective.selector_weight or "selector" not in name
            assert not counts or wanted[name].abs().max() > 1e-6, name
        line = summarize_blocks(totals, objective, num_labels)
        assert line["loss"] == pytest.approx(expected.item(), rel=1e-9)
        assert totals[:, 0].tolist() == pytest.approx(of_depth, rel=1e-9)
    assert ("head0_alpha" in line) == (loss.name != "hard")
    assert ("head0_confidence_loss" in line) == bool(keys.get("confidence_weight"))
    assert ("head0_selector_loss" in line) == bool(keys.get("selector_weight"))


# ---- what would be wrong ----


def change_mask(change):
    """A mutant of BlockHead._mask: `change(mask, rows, size)` of its result [B, 1, R S, T + R S]."""
    right = BlockHead._mask
    return lambda head, rows, documents, reach: change(
        right(head, rows, documents, reach), rows, head.config.block_size
    )


def see_the_anchors_feature(mask, rows, size):
    at = (rows + 1).repeat_interleave(size, 1)[:, None, :, None]
    return mask.scatter(3, at, True)


def see_the_neighbour(mask, rows, size):
    mask = mask.clone()
    mask[:, :, size : 2 * size, -rows.shape[1] * size :][..., :size] = True
    return mask


def see_other_documents(mask, rows, size):
    mask = mask.clone()
    mask[..., 0] = True
    return mask


MUTANTS = {
    "a feature past the anchor": (BlockHead, "_mask", change_mask(see_the_anchors_feature)),
    "the neighbour's block": (BlockHead, "_mask", change_mask(see_the_neighbour)),
    "another document": (BlockHead, "_mask", change_mask(see_other_documents)),
    "labels one late": (
        blocks_module,
        "_chunks",
        lambda *given, right=blocks_module._chunks: ((a, b + 1, c) for a, b, c in right(*given)),
    ),
    "context one late": (Blocks, "seen", lambda blocks, ids: (ids.gather(1, blocks.anchors), blocks.anchors)),
    "anchor one early": (Blocks, "seen", lambda blocks, ids: (ids.gather(1, blocks.anchors - 1), blocks.anchors - 1)),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_anything_else_that_blocks_see_or_predict_changes_the_loss(monkeypatch, mutant):
    head, *given = make_head(**EDGE)
    objective, blocks = BlockObjective(Loss("kl"), WEIGHTS), draw_blocks(given[1], 6, K, seed=0, step=0)
    right = ours(head, *given, blocks, objective)[:, 5].sum()
    monkeypatch.setattr(*mutant)
    wrong = ours(head, *given, blocks, objective)[:, 5].sum()
    assert abs(wrong / right - 1) > 1e-3


def test_edge_is_given_the_texts_token_before_the_label(monkeypatch):
    head, *given = make_head(**EDGE)
    objective, blocks = BlockObjective(Loss("kl"), WEIGHTS), draw_blocks(given[1], 6, K, seed=0, step=0)
    right, logits = ours(head, *given, blocks, objective)[:, 5].sum(), BlockHead.logits
    monkeypatch.setattr(
        BlockHead, "logits", lambda head, states, previous, w: logits(head, states, previous.roll(1), w)
    )
    assert abs(ours(head, *given, blocks, objective)[:, 5].sum() / right - 1) > 1e-3


def convolve_across_blocks(convolution, x, *kernel, right=Convolution.convolve):
    mutant = copy(convolution)
    mutant.block_size = x.shape[-2]
    return right(mutant, x, *kernel)


DFLASH2_MUTANTS = {
    "another token before": (Selector, "before", lambda one, tokens, right=Selector.before: right(one, tokens.roll(1))),
    "candidates one too few": (Selector, "candidates", lambda one, logits: logits.topk(one.top_k - 1).indices),
    "the block before": (Convolution, "convolve", convolve_across_blocks),
    "no gradient by the slots' scores": (blocks_module.Choice, "add_gradient", lambda choice, gradient: None),
    "labels without a choice": (blocks_module.F, "cross_entropy", lambda scores, *rest, **named: scores[:, 0] * 0),
}


@pytest.mark.parametrize("mutant", DFLASH2_MUTANTS.values(), ids=DFLASH2_MUTANTS)
def test_anything_else_that_parts_of_dflash2_read_changes_the_gradient(monkeypatch, mutant):
    head, *given = make_head(**DFLASH2)
    objective = BlockObjective(Loss("kl"), WEIGHTS, selector_weight=1.0)
    blocks = draw_blocks(given[1], 6, K, seed=0, step=0)
    ours(head, *given, blocks, objective)
    right = torch.cat([one.flatten() for one in gradients(head).values()])
    monkeypatch.setattr(*mutant)
    ours(head, *given, blocks, objective)
    wrong = torch.cat([one.flatten() for one in gradients(head).values()])
    assert (wrong - right).norm() / right.norm() > 1e-2


def test_figures_of_a_selector_are_shares_of_the_labels():
    head, lm_head, rows, last, streams = make_head(**SELECTOR)
    objective, blocks = (
        BlockObjective(Loss("kl"), WEIGHTS, selector_weight=1.0),
        draw_blocks(rows, 6, K, seed=0, step=0),
    )
    line = summarize_blocks(ours(head, lm_head, rows, last, streams, blocks, objective), objective, blocks.num_labels)
    predicted = head.predict(streams, rows.input_ids, rows.position_ids, rows.document_ids, lm_head.weight)
    for k in range(K):
        first, among, count = 0, 0, 0
        for row, a in drawn(blocks):
            if k in labels_of(rows, row, a):
                place = row * rows.row_length + a - 1
                scores, label = predicted.logits(predicted.states[k][[place]], k)[0], rows.input_ids[row, a + 1 + k]
                count += 1
                first += int(scores.argmax() == label)
                among += int(scores[label] > -torch.inf)
        assert line[f"head{k}_selector_top1"] == pytest.approx(first / count)
        assert line[f"head{k}_selector_recall"] == pytest.approx(among / count)
        assert 0 < among < count


# ---- anchors ----


def drawn(blocks):
    """[(row, place)] of the anchors with a label."""
    return [(row, a) for row, own in enumerate(blocks.anchors) for a in own[blocks.valid[row, :, 0]].tolist()]


def test_anchors_are_all_that_may_be_where_there_is_room():
    rows = make_rows()
    blocks = draw_blocks(rows, 99, K, seed=0, step=0)
    assert drawn(blocks) == anchors_by_loops(rows)
    assert blocks.num_labels == sum(len(labels_of(rows, *one)) for one in drawn(blocks))
    for (row, a), valid in zip(drawn(blocks), blocks.valid[blocks.valid[..., 0]]):
        assert valid.nonzero()[:, 0].tolist() == labels_of(rows, row, a)


def test_anchors_hang_on_seed_step_and_place_alone():
    rows, draw = make_rows(8), {"num_anchors": 4, "num_depths": K}
    first = draw_blocks(rows, **draw, seed=3, step=5)
    assert {sum(row == one for row, _ in drawn(first)) for one in range(8)} == {4}
    assert {*drawn(first)} < {*anchors_by_loops(rows)}
    assert drawn(first) == sorted(drawn(first))
    assert drawn(draw_blocks(rows, **draw, seed=3, step=5)) == drawn(first)
    for other in ({"seed": 4, "step": 5}, {"seed": 3, "step": 6}):
        assert drawn(draw_blocks(rows, **draw, **other)) != drawn(first)
    part = first.of_rows(2, 3)
    assert [(row + 2, a) for row, a in drawn(part)] == [(row, a) for row, a in drawn(first) if 2 <= row < 5]
    seen = {one for step in range(40) for one in drawn(draw_blocks(rows, **draw, seed=0, step=step))}
    assert seen == {*anchors_by_loops(rows)}


def test_rows_without_an_anchor_teach_nothing():
    head, lm_head, rows, *streams = make_head()
    nothing = replace(rows, supervised=torch.zeros_like(rows.supervised))
    blocks = draw_blocks(nothing, 6, K, seed=0, step=0)
    totals = ours(head, lm_head, nothing, *streams, blocks, BlockObjective(Loss("kl"), WEIGHTS), num_labels=1)
    assert not totals.any()
    assert not any(one.any() for one in gradients(head).values())


def test_labels_outside_a_draft_vocabulary_have_no_hard_loss():
    head, *given = make_head(**DRAFTED)
    rows, blocks = given[1], draw_blocks(given[1], 6, K, seed=0, step=0)
    labels = [int(rows.input_ids[row, a + 1 + k]) for row, a in drawn(blocks) for k in labels_of(rows, row, a)]
    inside = sum(label % 2 == 0 for label in labels)
    for loss, count in ((Loss("hard"), inside), (Loss("kl"), len(labels))):
        assert ours(head, *given, blocks, BlockObjective(loss, WEIGHTS))[:, 1].sum() == count
    assert 0 < inside < len(labels) == blocks.num_labels
