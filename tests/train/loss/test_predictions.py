"""Gradients through predictions of every other kind against autograd on one graph: states that hang on each other, states that are
features, draft vocabularies."""

import pytest
import torch
import torch.nn.functional as F

from headstart.heads.head import Predictions
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.tests.train.loss.test_distillation import HARD, KL, H, K, V, make_batch, make_head
from headstart.train.loss.distillation import Objective, accumulate_gradients, find_labels, summarize


def test_recurrent_states_get_the_gradient_of_one_graph():
    """States that hang on each other, as a recurrent head's do: chunk by chunk, and one pass at the end, is autograd's own sum."""
    torch.manual_seed(3)
    (_, lm_head), (input_ids, document_ids, supervised, features) = make_head(), make_batch()
    body, tail = (torch.nn.Linear(H, H, bias=False).double() for _ in range(2))
    out = torch.nn.Linear(H, V, bias=False).double()
    flat, labels = features.flatten(0, 1), find_labels(input_ids, document_ids, supervised, K)
    modules = (body, tail, out)

    def states():
        found = [torch.tanh(body(flat))]
        for _ in range(K - 1):
            found.append(torch.tanh(tail(found[-1])))
        return found

    total, count = 0.0, len(labels.positions)
    for k, state in enumerate(states()):
        for position, token, valid in zip(labels.positions.tolist(), labels.tokens, labels.valid[k]):
            if valid:
                total = total + 0.5**k * F.cross_entropy(out(state[position - 2 - k]), token)
    (total / count).backward()
    expected = [module.weight.grad.clone() for module in modules]
    for module in modules:
        module.zero_grad()
    predictions = Predictions(states(), lambda rows, k: out(rows))
    objective = Objective(HARD, [0.5**k for k in range(K)])
    given = {"lm_head": lm_head, "objective": objective, "num_labels": count}
    totals = accumulate_gradients(predictions, flat, labels, chunk_tokens=7, **given)
    assert summarize(totals, objective, count)["loss"] == pytest.approx((total / count).item(), rel=1e-12)
    for module, gradient in zip(modules, expected):
        torch.testing.assert_close(module.weight.grad, gradient, rtol=1e-10, atol=1e-13)
        assert gradient.abs().max() > 1e-4


def test_token_and_feature_losses_are_weighed_and_both_reach_the_states():
    """Of a head whose states are features: against autograd on one graph, each part with a weight of its own."""
    torch.manual_seed(5)
    (_, lm_head), (input_ids, document_ids, supervised, features) = make_head(), make_batch()
    body, flat = torch.nn.Linear(H, H).double(), features.flatten(0, 1)
    labels = find_labels(input_ids, document_ids, supervised, 1)
    state, positions = body(flat), labels.positions
    distribution = lm_head(flat[positions - 1]).softmax(-1)
    token_loss = F.kl_div(lm_head(state[positions - 2]).log_softmax(-1), distribution, reduction="sum")
    feature_loss = F.smooth_l1_loss(state[positions - 2], flat[positions - 1], reduction="none").mean(-1).sum()
    loss = 0.5 * (0.1 * token_loss + 0.7 * feature_loss) / len(positions)
    loss.backward()
    expected = body.weight.grad.clone()
    body.zero_grad()
    predictions = Predictions([body(flat)], lambda rows, k: lm_head(rows))
    objective = Objective(KL, [0.5], token_weight=0.1, feature_weight=0.7)
    given = {"lm_head": lm_head, "objective": objective, "num_labels": len(positions)}
    totals = accumulate_gradients(predictions, flat, labels, chunk_tokens=7, **given)
    assert totals[0].tolist() == pytest.approx(
        [token_loss.item(), len(positions), 0, 0, 0, feature_loss.item()], rel=1e-12
    )
    assert summarize(totals, objective, len(positions))["loss"] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(body.weight.grad, expected, rtol=1e-10, atol=1e-13)
    for part in (token_loss, feature_loss):
        assert part.item() > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculators_gradient_goes_back_through_all_steps(tied):
    """Against one graph over single positions: every weight, also where later steps' losses reach earlier steps' states."""
    torch.manual_seed(6)
    (_, lm_head), (input_ids, document_ids, supervised, features) = make_head(), make_batch()
    head = MLPSpeculator(MLPSpeculatorConfig(H, V, 10, K, tie_weights=tied)).double()
    total, count = 0.0, 0
    for row in range(len(input_ids)):
        for t in range(input_ids.shape[1] - 2):
            for k in range(K):
                y = t + 2 + k
                same = y < input_ids.shape[1] and document_ids[row, t] == document_ids[row, y] != -1
                if same and supervised[row, y]:
                    tokens = F.pad(input_ids[row], (0, K))[t + 1 : t + 1 + K]
                    q = head(features[row, t], tokens)[0][k].log_softmax(-1)
                    p = lm_head(features[row, y - 1]).softmax(-1)
                    total = total + 0.9**k * (p * (p.log() - q)).sum()
                    count += k == 0
    (total / count).backward()
    expected = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    labels = find_labels(input_ids, document_ids, supervised, K)
    predictions = head.predict(features, input_ids, None, document_ids)
    objective = Objective(KL, [0.9**k for k in range(K)])
    given = {"lm_head": lm_head, "objective": objective, "num_labels": count}
    totals = accumulate_gradients(predictions, features.flatten(0, 1), labels, chunk_tokens=7, **given)
    assert summarize(totals, objective, count)["loss"] == pytest.approx((total / count).item(), rel=1e-12)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
        assert parameter.grad.abs().max() > 1e-6, f"{name} gets no gradient"


@pytest.mark.parametrize(("same_logits", "products"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("loss", [HARD, KL], ids=str)
def test_draft_vocabulary_reads_distributions_and_labels_by_the_targets_ids(loss, same_logits, products):
    """products: per chunk, where 8 of 23 tokens leave room for two of the three depths together."""
    torch.manual_seed(4)
    (_, lm_head), (input_ids, document_ids, supervised, features) = make_head(), make_batch()
    draft_ids = torch.tensor([1, 2, 5, 6, 9, 13, 14, 20])
    out = torch.nn.Linear(H, len(draft_ids), bias=False).double()
    flat, labels = features.flatten(0, 1), find_labels(input_ids, document_ids, supervised, K)
    states = [(flat * (1 + k)).requires_grad_() for k in range(K)]
    total, counts, hits = 0.0, [0] * K, [0] * K
    for k in range(K):
        for position, token, valid in zip(labels.positions.tolist(), labels.tokens.tolist(), labels.valid[k]):
            inside = token in draft_ids.tolist()
            if not valid or (loss is HARD and not inside):
                continue
            logits = out(states[k][position - 2 - k])
            distribution = lm_head(flat[position - 1]).softmax(-1)[draft_ids]
            if loss is HARD:
                total = total - logits.log_softmax(-1)[draft_ids.tolist().index(token)]
            else:
                total = total + (distribution * (distribution.log() - logits.log_softmax(-1))).sum()
            counts[k] += 1
            hits[k] += int(draft_ids[logits.argmax()]) == token
    total.backward()
    expected = [one.grad.clone() for one in (out.weight, *states)]
    for one in (out.weight, *states):
        one.grad = None
    made = []

    def logits_of(rows, k):
        made.append(k)
        return out(rows)

    predictions = Predictions([1 * one for one in states], logits_of, draft_ids, same_logits)
    given = {"lm_head": lm_head, "objective": Objective(loss, [1.0] * K), "num_labels": 1}
    totals = accumulate_gradients(predictions, flat, labels, chunk_tokens=5, with_hits=True, **given)
    for one, gradient in zip((out.weight, *states), expected):
        torch.testing.assert_close(one.grad, gradient, rtol=1e-10, atol=1e-12)
    assert len(made) == products * -(-len(labels.positions) // 5)
    assert totals[:, 1].tolist() == counts
    assert totals[:, 2].tolist() == hits
    assert totals[:, 0].sum().item() == pytest.approx(total.item(), rel=1e-12)
    assert (loss is HARD) == (counts[0] < len(labels.positions))
