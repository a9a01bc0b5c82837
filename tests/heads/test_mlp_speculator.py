"""The MLP speculator against an implementation from its definition; shared tensors; initialisation."""

import math

import pytest
import torch

from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig

H, V, S = 12, 23, 20


def make(steps=3, tied=False, scaled=False, seed=0):
    """A head with random tensors only, so that no two can be mistaken for each other."""
    head = MLPSpeculator(MLPSpeculatorConfig(H, V, S, steps, tied, scaled)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head


def by_hand(head, feature, tokens):
    """One position, number by number. Tensors have the names of untied files; a tied tensor serves all steps."""
    weights, n = head.state_dict(), head.config.num_steps

    def tensor(kind, i, what="weight"):
        if head.config.tie_weights:
            i = min(i, 1) if kind == "proj" else 0
        return weights[f"{kind}.{i}.{what}"].tolist()

    def product(matrix, x):
        return [sum(a * b for a, b in zip(row, x)) for row in matrix]

    def normed(x):
        mean = sum(a * a for a in x) / len(x)
        return [a / math.sqrt(mean + 1e-6) for a in x]

    state = feature.tolist()
    if head.config.scale_input:
        state = [a / math.sqrt(2) for a in normed(state)]
    sw = 0.5 ** (0.5 / n)
    ew = ((1 - sw**2) * (S / 2)) ** 0.5
    found = []
    for i in range(n):
        embedded = tensor("emb", i)[tokens[i]]
        state = [a + ew / sw * b for a, b in zip(product(tensor("proj", i), state), embedded)]
        state = [a * w + b for a, w, b in zip(normed(state), tensor("ln", i), tensor("ln", i, "bias"))]
        state = [a * 0.5 * (1 + math.erf(a / math.sqrt(2))) for a in state]
        found.append(product(tensor("head", i), state))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_logits_are_those_of_the_definition(steps, tied, scaled):
    head = make(steps, tied, scaled)
    features = torch.randn(2, 3, H, dtype=torch.float64)
    tokens = torch.randint(V, (2, 3, steps))
    found, offsets = head(features, tokens)
    assert offsets == tuple(range(2, 2 + steps))
    for place in ((0, 0), (1, 2)):
        expected = by_hand(head, features[place], tokens[place].tolist())
        assert torch.allclose(torch.stack([x[place] for x in found]), expected, rtol=1e-10, atol=1e-10)


def test_a_step_at_a_time_is_the_whole():
    head = make(steps=3, scaled=True)
    features, tokens = torch.randn(5, H, dtype=torch.float64), torch.randint(V, (5, 3))
    state = head.start(features)
    for depth, expected in enumerate(head(features, tokens)[0]):
        state = head.step(state, tokens[:, depth], depth)
        assert torch.equal(head.logits(state, depth), expected)


def test_a_step_knows_its_own_tokens_and_no_later_ones():
    head, features = make(), torch.randn(1, H, dtype=torch.float64)
    tokens = torch.tensor([[3, 5, 7]])
    before = head(features, tokens)[0]
    for changed in range(3):
        other = tokens.clone()
        other[0, changed] = 11
        same = [torch.equal(x, y) for x, y in zip(before, head(features, other)[0])]
        assert same == [depth < changed for depth in range(3)]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_tied_steps_hold_one_copy_of_what_they_share(steps):
    names = set(make(steps, tied=True).state_dict())
    projections = {"proj.0.weight", "proj.1.weight"} if steps > 1 else {"proj.0.weight"}
    assert names == {"emb.0.weight", "ln.0.weight", "ln.0.bias", "head.0.weight"} | projections
    assert len(make(steps).state_dict()) == 5 * steps


def test_every_parameter_is_trained_by_every_step():
    for tied in (False, True):
        head = make(tied=tied)
        logits, _ = head(torch.randn(4, H, dtype=torch.float64), torch.arange(12).view(4, 3))
        logits[-1].logsumexp(-1).sum().backward()
        without = {name for name, parameter in head.named_parameters() if parameter.grad is None}
        assert without == (set() if tied else {"head.0.weight", "head.1.weight"})


def test_it_starts_as_published():
    torch.manual_seed(0)
    head = MLPSpeculator(MLPSpeculatorConfig(64, 500, 256, 3, tie_weights=False))
    for name, parameter in head.named_parameters():
        if name.startswith("ln"):
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        else:
            assert parameter.std().item() == pytest.approx(1 / 16, rel=0.02)
    # Tokens have as much weight as the feature, which is the purpose of sw and ew.
    state = head.start(torch.randn(1000, 64))
    embedded = head.emb[0](torch.randint(500, (1000,))) * head.token_weight / head.state_weight
    assert (head.proj[0](state).std() / embedded.std()).item() == pytest.approx(0.98, rel=0.05)


@pytest.mark.parametrize(
    ("name", "value"), [("num_steps", 0), ("inner_size", 0), ("vocab_size", 1), ("hidden_size", 2.5)]
)
def test_bad_shapes_are_refused(name, value):
    with pytest.raises(
        ValueError, match=f"MLPSpeculatorConfig.{name} must be a whole number of at least .*, got {value}"
    ):
        MLPSpeculatorConfig(**({"hidden_size": H, "vocab_size": V, "inner_size": S} | {name: value}))
