"""The verifier `strict` against a walk over the tree, written independently."""

import random

import pytest
import torch

from headstart.inference.tree import Tree, chain
from headstart.inference.verify import TreeTensors, strict


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
        TreeTensors(tree, "cpu"), torch.tensor(tokens), torch.tensor(targets), torch.tensor(limits)
    )
    lengths = set()
    for b in range(batch):
        expected_path, expected_bonus = walk(tree, tokens[b], targets[b], limits[b])
        assert path[b, : accepted[b] + 1].tolist() == expected_path
        assert bonus[b].item() == expected_bonus
        lengths.add(len(expected_path))
    assert size == 1 or len(lengths) > 1


def test_of_two_equal_siblings_one_is_taken():
    tree = TreeTensors(Tree((-1, 0, 0, 2), (0, 0, 1, 0)), "cpu")
    path, accepted, _ = strict(tree, torch.tensor([[9, 5, 5, 6]]), torch.tensor([[5, 7, 6, 8]]), torch.tensor([9]))
    assert accepted.item() == 2
    assert path[0].tolist() == [0, 2, 3]


def test_a_limit_of_zero_accepts_nothing():
    tokens = torch.tensor([[1, 2, 3]])
    path, accepted, bonus = strict(TreeTensors(chain(2), "cpu"), tokens, torch.tensor([[2, 3, 4]]), torch.tensor([0]))
    assert (accepted.item(), bonus.item(), path[0, 0].item()) == (0, 2, 0)
