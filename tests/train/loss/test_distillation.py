"""Labels, loss, gradients and figures of Medusa's heads over whole rows against plain loops over documents and torch's autograd.

Heads whose states hang on each other, or are features: test_predictions.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.loss.distillation import (
    Objective,
    accumulate_gradients,
    count_teacher_forced_runs,
    find_labels,
    summarize,
)
from headstart.train.loss.losses import Loss

H, V, K = 12, 23, 3
HARD, KL, LK = Loss("hard"), Loss("kl"), Loss("lk", eta=2.0)
RATES = [0.5, 0.3, 0.2]  # of acceptance, which the weights of kl in LK hang on


def medusa_predictions(head, features, lm_head_weight):
    """Medusa heads read no tokens."""
    return head.predict(features, None, None, None, lm_head_weight)


def make_batch(seed=0, num_rows=3, length=29):
    """Rows of documents of odd lengths with padding at the end; about half of the tokens supervised; fp64 features."""
    g = torch.Generator().manual_seed(seed)
    document_ids = torch.full((num_rows, length), -1)
    for row in range(num_rows):
        start, document = 0, 10 * row
        while start < length - 4:
            end = start + int(torch.randint(2, 9, (1,), generator=g))
            document_ids[row, start : min(end, length - 3)] = document
            start, document = end, document + 1
    input_ids = torch.randint(0, V, (num_rows, length), generator=g)
    supervised = (torch.rand(num_rows, length, generator=g) < 0.6) & (document_ids >= 0)
    features = torch.randn(num_rows, length, H, generator=g, dtype=torch.float64)
    return input_ids, document_ids, supervised, features


def make_head(num_layers=2, shared=False, seed=1):
    torch.manual_seed(seed)
    head = Medusa(MedusaConfig(H, V, num_heads=K, num_layers=num_layers, shared_lm_head=shared)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    lm_head = torch.nn.Linear(H, V, bias=False).double().requires_grad_(False)
    torch.nn.init.normal_(lm_head.weight, std=0.5)
    return head, lm_head


def loss_by_loops(head, lm_head, batch, objective):
    """The definition, one document and one position at a time, through torch's own losses. -> (loss, labels)"""
    input_ids, document_ids, supervised, features = batch
    total, num_labels = 0.0, 0
    for row in range(len(input_ids)):
        for document in set(document_ids[row].tolist()) - {-1}:
            places = [i for i in range(document_ids.shape[1]) if document_ids[row, i] == document]
            x, f = input_ids[row, places], features[row, places]
            marks = supervised[row, places]
            for t in range(len(places)):
                for k in range(K):
                    if t + 2 + k >= len(places) or not marks[t + 2 + k]:
                        continue
                    num_labels += k == 0
                    logits = F.linear(head.hidden(f[t], k), lm_head.weight)
                    if head.heads[k].lm_head is not None:
                        logits = head.heads[k].lm_head(head.hidden(f[t], k))
                    distribution = F.softmax(lm_head(f[t + 1 + k]), -1)
                    kl = F.kl_div(F.log_softmax(logits, -1), distribution, reduction="sum")
                    alpha = torch.minimum(distribution, F.softmax(logits, -1)).sum()
                    w = math.exp(-2.0 * RATES[k])
                    values = {"hard": F.cross_entropy(logits[None], x[t + 2 + k][None]), "kl": kl}
                    values["lk"] = w * kl + (1 - w) * (1 - alpha)
                    total = total + objective.weights[k] * values[objective.loss.name]
    return total / num_labels, num_labels


def ours(head, lm_head, batch, objective, chunk_tokens=7, with_hits=False):
    input_ids, document_ids, supervised, features = batch
    labels = find_labels(input_ids, document_ids, supervised, K)
    head.zero_grad()
    predictions = medusa_predictions(head, features, lm_head.weight)
    totals = accumulate_gradients(
        predictions,
        features.flatten(0, 1),
        labels,
        lm_head=lm_head,
        objective=objective,
        num_labels=len(labels.positions),
        chunk_tokens=chunk_tokens,
        with_hits=with_hits,
    )
    return totals, summarize(totals, objective, len(labels.positions))


@pytest.mark.parametrize("loss", [HARD, KL, LK], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_loss_and_every_gradient_are_those_of_the_definition(loss, shared):
    (head, lm_head), batch = make_head(shared=shared), make_batch()
    objective = Objective(loss, [0.8**k for k in range(K)]).at(RATES)
    expected, num_labels = loss_by_loops(head, lm_head, batch, objective)
    head.zero_grad()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters()}
    totals, line = ours(head, lm_head, batch, objective)
    assert int(totals[0, 1]) == num_labels
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
        assert parameter.grad.abs().max() > 1e-6, f"{name} gets no gradient"


def test_the_last_head_and_every_block_get_their_own_gradient():
    (head, lm_head), batch = make_head(), make_batch()
    ours(head, lm_head, batch, Objective(LK, [1.0] * K).at(RATES))
    blocks = [block.linear.weight for one in head.heads for block in one.blocks]
    assert len({block.data_ptr() for block in blocks}) == K * 2
    for i, block in enumerate(blocks):
        assert block.grad.abs().max() > 1e-4
        assert all(not torch.equal(block.grad, other.grad) for other in blocks[:i])


def test_padding_and_unsupervised_tokens_change_nothing():
    (head, lm_head), batch = make_head(), make_batch()
    objective = Objective(LK, [1.0] * K).at(RATES)
    before, line = ours(head, lm_head, batch, objective)
    input_ids, document_ids, supervised, features = batch
    padding = document_ids < 0
    wide = [
        F.pad(part, (0, 11), value=value) for part, value in ((input_ids, 3), (document_ids, -1), (supervised, False))
    ]
    other = features.masked_fill(padding[..., None], 1e3)
    after, wide_line = ours(head, lm_head, (*wide, F.pad(other, (0, 0, 0, 11), value=1e3)), objective)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)
    assert wide_line["loss"] == pytest.approx(line["loss"], rel=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 10_000])
def test_chunks_do_not_change_the_gradient(chunk_tokens):
    (head, lm_head), batch = make_head(), make_batch()
    objective = Objective(LK, [1.0, 0.7, 0.1]).at(RATES)
    ours(head, lm_head, batch, objective, chunk_tokens=7)
    gradients = [p.grad.clone() for p in head.parameters()]
    ours(head, lm_head, batch, objective, chunk_tokens=chunk_tokens)
    for parameter, expected in zip(head.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-13)


def test_lk_follows_each_depths_rate_of_acceptance_a_step_behind():
    """Of all micro-batches together, whatever was asked to be measured; the other losses follow nothing."""
    (head, lm_head), first, second = make_head(), make_batch(), make_batch(seed=2)
    objective = Objective(LK, [1.0] * K)
    assert [objective.kl_weight(k) for k in range(K)] == [1.0] * K  # nothing known: kl alone
    totals = sum(ours(head, lm_head, batch, objective)[0] for batch in (first, second))
    rates, counts = torch.zeros(K), torch.zeros(K)
    for input_ids, document_ids, supervised, features in (first, second):
        labels = find_labels(input_ids, document_ids, supervised, K)
        for k in range(K):
            roots = features.flatten(0, 1)[labels.positions[labels.valid[k]] - 2 - k]
            before = features.flatten(0, 1)[labels.positions[labels.valid[k]] - 1]
            q = head.heads[k].lm_head(head.hidden(roots, k)).softmax(-1)
            rates[k] += torch.minimum(q, lm_head(before).softmax(-1)).sum().item()
            counts[k] += len(roots)
    following = objective.after(totals)
    expected = [math.exp(-2.0 * rate) for rate in (rates / counts).tolist()]
    assert [following.kl_weight(k) for k in range(K)] == pytest.approx(expected, rel=1e-6)
    assert max(expected) < 0.95
    assert len({round(weight, 4) for weight in expected}) == K
    totals[1] = 0  # a depth without labels keeps its rate
    assert following.after(totals).rates == following.rates
    plain = Objective(KL, [1.0] * K)
    assert plain.after(totals) is plain


def test_head_weights_scale_each_heads_gradient_alone():
    (head, lm_head), batch = make_head(), make_batch()
    ours(head, lm_head, batch, Objective(HARD, [1.0] * K))
    full = [p.grad.clone() for p in head.heads[2].parameters()]
    totals, line = ours(head, lm_head, batch, Objective(HARD, [1.0, 0.5, 0.25]))
    for parameter, expected in zip(head.heads[2].parameters(), full):
        torch.testing.assert_close(parameter.grad, expected * 0.25, rtol=1e-12, atol=0)
    weighed = sum(w * float(t) for w, t in zip((1, 0.5, 0.25), totals[:, 0])) / float(totals[0, 1])
    assert line["loss"] == pytest.approx(weighed, rel=1e-12)


def test_labels_are_supervised_tokens_with_a_feature_in_their_own_document():
    input_ids, document_ids, supervised, _ = make_batch(seed=5)
    labels = find_labels(input_ids, document_ids, supervised, K)
    length = input_ids.shape[1]
    found = {(int(p), k) for k in range(K) for p, ok in zip(labels.positions, labels.valid[k]) if ok}
    expected = set()
    for row in range(len(input_ids)):
        for y in range(length):
            for k in range(K):
                t = y - 2 - k
                inside = t >= 0 and document_ids[row, t] == document_ids[row, y] != -1
                if inside and supervised[row, y]:
                    expected.add((row * length + y, k))
    assert found == expected
    assert len(found) > 20
    assert torch.equal(labels.tokens, input_ids.flatten()[labels.positions])


class _Conversions(TorchDispatchMode):
    """How often weights [V, H] are converted to bfloat16."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.count += found.dtype == torch.bfloat16 and found.shape == (V, H)
        return found


@pytest.mark.parametrize("shared", [False, True])
def test_autocast_converts_weights_once_and_not_per_chunk(shared):
    (head, lm_head), (*batch, features) = make_head(shared=shared), make_batch()
    head, own = head.float(), lm_head.weight.float()
    lm_head, features = lm_head.bfloat16(), features.bfloat16()
    labels = find_labels(*batch, K)
    given = {"lm_head": lm_head, "objective": Objective(KL, [1.0] * K), "num_labels": len(labels.positions)}
    with torch.autocast("cpu", torch.bfloat16), _Conversions() as seen:
        predictions = medusa_predictions(head, features, own)
        accumulate_gradients(predictions, features.flatten(0, 1), labels, chunk_tokens=5, **given)
    assert seen.count == (1 if shared else K)
    assert len(labels.positions) > 20
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())


@pytest.mark.parametrize("loss", [HARD, KL, LK, Loss("hard", top_k_weight=1.0)], ids=str)
def test_alpha_is_the_mean_chance_that_a_draft_is_accepted(loss):
    (head, lm_head), batch = make_head(), make_batch()
    _, line = ours(head, lm_head, batch, Objective(loss, [1.0, 0.5, 0.0]), with_hits=True)
    if not loss.needs_target:
        assert not any("alpha" in name for name in line)
        return
    input_ids, document_ids, supervised, features = batch
    labels, flat = find_labels(input_ids, document_ids, supervised, K), features.flatten(0, 1)
    for k in range(K):
        positions = labels.positions[labels.valid[k]]
        q = head.logits(flat[positions - 2 - k], k).softmax(-1)
        p = lm_head(flat[positions - 1]).softmax(-1)
        assert line[f"head{k}_alpha"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-12)
        assert 0 < line[f"head{k}_alpha"] < 1


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [HARD, KL, LK], ids=str)
def test_a_chunk_holds_the_targets_logits_and_one_heads(loss):
    """At most two tensors [C, V] in bfloat16 however many heads and tokens there are, and little else."""
    width, vocab_size, num_heads, chunk = 64, 128256, 4, 1024
    lm_head = torch.nn.Linear(width, vocab_size, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    head = Medusa(MedusaConfig(width, vocab_size, num_heads=num_heads, shared_lm_head=True)).cuda()
    features = torch.randn(1, 4 * chunk, width, device="cuda", dtype=torch.bfloat16)
    input_ids = torch.randint(0, vocab_size, (1, 4 * chunk), device="cuda")
    labels = find_labels(
        input_ids, torch.zeros_like(input_ids), torch.ones_like(input_ids, dtype=torch.bool), num_heads
    )
    objective = Objective(loss, [1.0] * num_heads)

    def step(rows):
        with torch.autocast("cuda", torch.bfloat16):
            predictions = medusa_predictions(head, features, lm_head.weight)
            sizes = {"num_labels": len(labels.positions), "chunk_tokens": rows, "with_hits": True}
            given = {"lm_head": lm_head, "objective": objective}
            accumulate_gradients(predictions, features.flatten(0, 1), labels, **given, **sizes)
        head.zero_grad()

    step(16)  # the library's workspaces, which stay: one for this thread, one for autograd's
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(chunk)
    logits = chunk * vocab_size * 2
    assert torch.cuda.max_memory_allocated() - before < (1 if loss is HARD else 2) * logits + logits / 4


def test_hits_are_counted_against_the_text():
    (head, lm_head), batch = make_head(), make_batch(seed=3)
    totals, line = ours(head, lm_head, batch, Objective(HARD, [1.0] * K), with_hits=True)
    input_ids, document_ids, supervised, features = batch
    labels = find_labels(input_ids, document_ids, supervised, K)
    for k in range(K):
        top1 = top5 = 0
        for position, token, valid in zip(labels.positions, labels.tokens, labels.valid[k]):
            if valid:
                order = head.logits(features.flatten(0, 1)[position - 2 - k], k).argsort(descending=True)
                top1 += int(order[0] == token)
                top5 += int(token in order[:5])
        assert totals[k, 2:4].tolist() == [top1, top5]
        assert top5 > top1
        assert line[f"head{k}_top5"] == pytest.approx(top5 / int(labels.valid[k].sum()))


def test_teacher_forced_runs_are_those_of_a_walk_over_the_text():
    # A head that copies: the features say what the text holds, rightly in most places.
    input_ids, document_ids, supervised, _ = make_batch(seed=7, num_rows=4, length=60)
    supervised = document_ids >= 0
    head = Medusa(MedusaConfig(V * K, V, num_heads=K)).double()
    for k in range(K):
        torch.nn.init.zeros_(head.heads[k].lm_head.weight)
        head.heads[k].lm_head.weight.data[:, V * k : V * (k + 1)] = torch.eye(V, dtype=torch.float64)
    says = torch.stack([input_ids.roll(-(2 + k), 1) for k in range(K)], -1)  # [B, T, K]
    wrong = torch.rand(says.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    says = torch.where(wrong, (says + 1) % V, says)
    features = F.one_hot(says, V).flatten(2).double()
    labels = find_labels(input_ids, document_ids, supervised, K)
    predictions = medusa_predictions(head, features, None)
    reached, roots = count_teacher_forced_runs(predictions, labels, chunk_tokens=13)
    expected, count = [0] * K, 0
    for row in range(4):
        for t in range(60 - 1 - K):
            if document_ids[row, t] == -1 or document_ids[row, t] != document_ids[row, t + 1 + K]:
                continue
            count += 1
            for k in range(K):
                if wrong[row, t, k]:
                    break
                expected[k] += 1
    assert roots == count > 20
    assert reached == expected
    assert reached[0] > reached[1] > reached[2] > 0
