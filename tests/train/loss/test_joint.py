"""The loss of stage joint, its gradients, the adapter that they reach, and the held-out loss that is measured beside."""

import pytest
import torch
import torch.nn.functional as F

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.loss.distillation import Objective, find_labels
from headstart.train.loss.joint import AdaptedMeter, accumulate_joint_gradients, held_out_loss, summarize_joint
from headstart.train.loss.losses import Loss
from headstart.train.teacher.features import FrozenTarget, load_target
from headstart.train.teacher.target_adapter import TargetAdapter

CPU = torch.device("cpu")


def build(word_target, dtype="float32", seed=3, shared=False, **lora):
    """A target with an adapter that is no longer the identity, heads, and two packed rows."""
    model, _ = load_target(word_target, CPU, dtype)
    target = FrozenTarget(model)
    adapter = TargetAdapter(target, **({"rank": 3, "alpha": 5} | lora))
    generator = torch.Generator().manual_seed(seed)
    head = Medusa(MedusaConfig(32, 48, 3, shared_lm_head=shared))
    for parameter in (*adapter.weights, *head.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    input_ids = torch.randint(0, 48, (2, 17), generator=generator)
    document_ids = torch.tensor([[0] * 9 + [1] * 8, [0] * 14 + [-1] * 3])
    position_ids = torch.tensor([[*range(9), *range(8)], [*range(14), 0, 0, 0]])
    supervised = (torch.rand(2, 17, generator=generator) < 0.6) & (document_ids >= 0)
    return target, adapter, head, (input_ids, position_ids, document_ids), supervised


def accumulate(target, adapter, head, batch, supervised, objective, target_loss, num_labels=29, chunk=4):
    labels = find_labels(batch[0], batch[2], supervised, len(objective.weights))
    sizes = {"num_labels": num_labels, "chunk_tokens": chunk}
    losses = {"labels": labels, "objective": objective, "target_loss": target_loss}
    autocast = torch.autocast("cpu", enabled=False)
    return accumulate_joint_gradients(head, target, adapter, inputs=batch, autocast=autocast, **losses, **sizes)


def formula(target, adapter, head, batch, supervised, weights, target_loss, num_labels):
    """The loss of train/loss/joint.py's first lines, written out position by position on whole logits."""
    with torch.no_grad(), adapter.disabled():
        frozen = target.lm_head(target.forward(*batch)).log_softmax(-1)  # [B, T, V]
    features = target.forward(*batch)
    adapted = target.lm_head(features).log_softmax(-1)
    distribution = adapted.detach().exp()
    total, (ids, _, documents) = 0, batch
    for b in range(ids.shape[0]):
        for y in range(2, ids.shape[1]):
            if not supervised[b, y] or documents[b, y] < 0 or documents[b, y - 2] != documents[b, y]:
                continue
            if target_loss == "kl":
                total += F.kl_div(adapted[b, y - 1], frozen[b, y - 1], reduction="sum", log_target=True)
            else:
                total -= adapted[b, y - 1, ids[b, y]]
            for k, weight in enumerate(weights):
                if y - 2 - k >= 0 and documents[b, y - 2 - k] == documents[b, y]:
                    log_q = head.logits(features[b, y - 2 - k], k, target.lm_head.weight).log_softmax(-1)
                    total += weight * F.kl_div(log_q, distribution[b, y - 1], reduction="sum")
    return total / num_labels


@pytest.mark.parametrize(("target_loss", "shared"), [("kl", False), ("hard", True)])
def test_loss_and_every_gradient_are_those_of_the_formula(word_target, target_loss, shared):
    target, adapter, head, batch, supervised = build(word_target, shared=shared)
    weights = [0.2 * 0.7**k for k in range(3)]
    objective = Objective(Loss("kl"), weights)
    totals = accumulate(target, adapter, head, batch, supervised, objective, target_loss)
    parameters = [*adapter.weights, *head.parameters()]
    found = [parameter.grad.clone() for parameter in parameters]
    loss = formula(target, adapter, head, batch, supervised, weights, target_loss, 29)
    for one, expected in zip(found, torch.autograd.grad(loss, parameters)):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
    assert summarize_joint(totals, objective, 29)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_gradients_reach_the_adapter_through_the_features_and_nothing_that_is_frozen(word_target):
    target, adapter, head, batch, supervised = build(word_target)
    with adapter.disabled():
        frozen_before = target.features(*batch)
    distribution = Objective(Loss("kl"), [1.0, 1.0, 1.0])
    accumulate(target, adapter, head, batch, supervised, distribution, "kl")
    both = [weight.grad.clone() for weight in adapter.weights]
    for weight in adapter.weights:
        weight.grad = None
    accumulate(target, adapter, head, batch, supervised, Objective(Loss("kl"), [0.0] * 3), "kl")
    assert all(not torch.equal(one, weight.grad) for one, weight in zip(both, adapter.weights))
    learning = {id(weight) for weight in (*adapter.weights, *head.parameters())}
    others = [p for p in target.model.parameters() if id(p) not in learning]
    assert len(others) > 20
    assert not any(p.requires_grad or p.grad is not None for p in others)
    with adapter.disabled():
        assert torch.equal(target.features(*batch), frozen_before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_starts_as_the_identity_and_disabled_is_the_frozen_target_bit_by_bit(word_target, dtype):
    model, _ = load_target(word_target, CPU, dtype)
    target = FrozenTarget(model)
    *_, batch, _ = build(word_target)
    frozen = target.features(*batch)
    adapter = TargetAdapter(target, rank=3, alpha=5)
    assert torch.equal(target.features(*batch), frozen)
    for weight in adapter.weights:
        torch.nn.init.normal_(weight, std=0.3)
    assert not torch.equal(target.features(*batch), frozen)
    with adapter.disabled():
        assert torch.equal(target.features(*batch), frozen)
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in adapter.weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_for_a_measurement_leaves_every_bit_of_the_target(word_target, dtype):
    target, adapter, _, batch, _ = build(word_target, dtype)
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    adapted = target.features(*batch)
    merged = []

    def measure_and_fail():
        with adapter.merged():
            merged.append(target.features(*batch))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        measure_and_fail()
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(merged[0], adapted, **close)
    assert all(torch.equal(p, before[name]) for name, p in target.model.named_parameters())
    assert torch.equal(target.features(*batch), adapted)


def test_dropout_is_of_the_training_alone(word_target):
    target, adapter, _, batch, _ = build(word_target, dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(target.features(*batch), target.features(*batch))
    with adapter.merged():
        assert torch.equal(target.features(*batch), target.features(*batch))


def test_layers_that_are_not_there_or_stay_frozen_are_refused(word_target):
    for names, said in (("c_attn", "'c_attn' fit no layer"), ("q_proj,lm_head", "lm_head or the embedding")):
        target = FrozenTarget(load_target(word_target, CPU)[0])
        with pytest.raises(ValueError, match=said):
            TargetAdapter(target, 3, 5, modules=names)
    target = FrozenTarget(load_target(word_target, CPU)[0])
    assert len(TargetAdapter(target, 3, 5, modules="q_proj, v_proj").layers) == 4


def test_held_out_loss_is_the_mean_over_supervised_tokens(word_target):
    target = build(word_target)[0]
    generator = torch.Generator().manual_seed(1)
    encoded = [
        (torch.randint(0, 48, (n,), generator=generator).tolist(), (torch.rand(n, generator=generator) < 0.5).tolist())
        for n in (9, 14)
    ]
    found, count = held_out_loss(target, encoded, max_length=11, chunk_tokens=3)
    terms = []
    for ids, supervised in encoded:
        log_p = target.model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        terms += [-log_p[t - 1, ids[t]].item() for t in range(1, min(len(ids), 11)) if supervised[t]]
    assert count == len(terms)
    assert found == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_meter_measures_the_adapted_target_beside_the_frozen_one(word_target):
    target, adapter, *_ = build(word_target)
    sizes = {"max_length": 20, "chunk_tokens": 4}

    class Meter:
        max_length, chunk_tokens, encoded = 20, 4, [(list(range(12)), [False] * 4 + [True] * 8)]
        source, measured_on = "engine", ""

        def measure(self, stop):
            return {"acceptance_length": held_out_loss(self.target, self.encoded, **sizes)[0]}

    Meter.target = target
    found = AdaptedMeter(Meter(), adapter).measure()
    assert found["heldout_loss"] == found["acceptance_length"]  # inside, the target is the adapted one
    with adapter.disabled():
        assert found["frozen_heldout_loss"] == held_out_loss(target, Meter.encoded, **sizes)[0]
    assert found["frozen_heldout_loss"] != found["heldout_loss"]
    assert found["heldout_tokens"] == 8
