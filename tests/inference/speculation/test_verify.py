"""The verifier `strict` against a walk over the tree, written independently."""

import random
from types import SimpleNamespace

import pytest
import torch

from headstart.inference.speculation.draft import Draft
from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.inference.speculation.verifiers import Strict, Synthetic, rates_for_length
from headstart.tests.inference.speculation.given_target import GivenTarget


def strict(tree, tokens, target_tokens, batch):
    return Strict()(tree, Draft(tokens, tree), GivenTarget(batch, tokens, target_tokens))


def limited(limits):
    """Batch rows whose requests may still emit one token more than their limit of depth."""
    return SimpleNamespace(remaining=torch.tensor(limits) + 1)


def walk(tree, tokens, targets, limit):
    node, path = 0, [0]
    while len(path) <= limit:
        children = [n for n in range(tree.num_nodes) if tree.parents[n] == node and tokens[n] == targets[node]]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path, targets[node]


@pytest.mark.parametrize("seed", range(20))
def test_strict_follows_the_targets_own_tokens(seed):
    generator = random.Random(seed)
    size = generator.choice([1, 2, 5, 20, 64])
    parents = (-1, *(generator.randrange(max(0, n - 4), n) for n in range(1, size)))
    ranks, counts = [0], {}
    for parent in parents[1:]:
        ranks.append(counts.setdefault(parent, 0))
        counts[parent] += 1
    tree = Tree(parents, tuple(ranks))
    batch = 50
    # Siblings carry different tokens, as drafters propose them; few tokens, so that long paths are accepted.
    tokens = [[generator.randrange(4)] + [(ranks[n] + b) % 7 for n in range(1, size)] for b in range(batch)]
    targets = [[generator.randrange(3) for _ in range(size)] for _ in range(batch)]
    targets = [[(t + b) % 7 for t in row] for b, row in enumerate(targets)]
    limits = [generator.choice([0, 1, 2, 99]) for _ in range(batch)]
    path, accepted, bonus = strict(
        TreeOnDevice.of(tree, "cpu"), torch.tensor(tokens), torch.tensor(targets), limited(limits)
    )
    lengths = set()
    for b in range(batch):
        expected_path, expected_bonus = walk(tree, tokens[b], targets[b], limits[b])
        assert path[b, : accepted[b] + 1].tolist() == expected_path
        assert bonus[b].item() == expected_bonus
        lengths.add(len(expected_path))
    assert size == 1 or len(lengths) > 1


def test_of_two_equal_siblings_one_is_taken():
    tree = TreeOnDevice.of(Tree((-1, 0, 0, 2), (0, 0, 1, 0)), "cpu")
    path, accepted, _ = strict(tree, torch.tensor([[9, 5, 5, 6]]), torch.tensor([[5, 7, 6, 8]]), limited([9]))
    assert accepted.item() == 2
    assert path[0].tolist() == [0, 2, 3]


def test_a_limit_of_zero_accepts_nothing():
    tokens = torch.tensor([[1, 2, 3]])
    path, accepted, bonus = strict(TreeOnDevice.of(chain(2), "cpu"), tokens, torch.tensor([[2, 3, 4]]), limited([0]))
    assert (accepted.item(), bonus.item(), path[0, 0].item()) == (0, 2, 0)


def test_synthetic_accepts_at_the_given_rates():
    tree, count = TreeOnDevice.of(Tree((-1, 0, 0, 1, 3), (0, 0, 1, 0, 0)), "cpu"), 4000
    rates = [0.8, 0.5, 0.1]
    batch = SimpleNamespace(
        seed=torch.arange(count), committed=torch.full((count,), 17), remaining=torch.full((count,), 100)
    )
    tokens = torch.arange(5).expand(count, -1)
    path, accepted, bonus = Synthetic(rates, "cpu")(tree, Draft(tokens, tree), GivenTarget(batch, tokens, tokens + 10))
    assert path[0].tolist() == [0, 1, 3, 4]
    for depth, rate in enumerate(rates, 1):
        # 4.5 standard deviations
        assert abs((accepted >= depth).double().mean() - rate) < 4.5 * (rate * (1 - rate) / count) ** 0.5
    assert torch.equal(bonus, path.gather(1, accepted[:, None]).squeeze(1) + 10)
    batch.remaining = torch.full((count,), 2)
    assert Synthetic(rates, "cpu")(tree, Draft(tokens, tree), GivenTarget(batch, tokens, tokens))[1].max() == 1


def test_rates_for_a_length_sum_to_it():
    assert sum(rates_for_length(2.53, 4)) == pytest.approx(1.53)
    assert rates_for_length(5, 4) == pytest.approx([1.0] * 4)
    with pytest.raises(ValueError, match="from 1 to 5"):
        rates_for_length(5.1, 4)
    with pytest.raises(ValueError, match="falling"):
        Synthetic([0.2, 0.4], "cpu")
