"""The verifier on the device against a walk over the tree, written independently."""

import random

import pytest
import torch

from headstart.kernels.speculation.verify_strict import verify_strict, verify_strict_reference


def random_tree(generator, size):
    parents = [-1] + [generator.randrange(max(0, n - generator.choice([1, 4, 64])), n) for n in range(1, size)]
    depths = [0]
    for n in range(1, size):
        depths.append(depths[parents[n]] + 1)
    return parents, depths


def walk(parents, tokens, targets, limit):
    node, path = 0, [0]
    while len(path) <= limit:
        children = [n for n in range(len(parents)) if parents[n] == node and tokens[n] == targets[node]]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path


@pytest.mark.parametrize("seed", range(12))
def test_the_accepted_path_is_that_of_a_walk(device, seed):
    generator = random.Random(seed)
    size = [1, 2, 5, 20, 63, 64][seed % 6]
    parents, depths = random_tree(generator, size)
    if seed == 11:
        parents, depths = list(range(-1, size - 1)), list(range(size))  # a chain
    batch, max_depth = 8, max(depths)
    index = torch.int32 if seed % 2 else torch.int64
    rank = [parents[:n].count(parents[n]) for n in range(size)]  # siblings carry different tokens
    tokens = [[(rank[n] + b) % 70 for n in range(size)] for b in range(batch)]
    targets = [[(generator.choice([0, 0, 0, 1, 2]) + b) % 70 for _ in range(size)] for b in range(batch)]
    limits = [generator.choice([0, 1, 3, 99, 99]) for _ in range(batch)]
    arguments = [torch.tensor(x, dtype=index, device=device) for x in (parents, depths, tokens, targets, limits)]
    found = verify_strict(*arguments, max_depth)
    assert all(x.dtype == torch.int64 for x in found)
    path, accepted, bonus = (x.tolist() for x in found)
    for b in range(batch):
        expected = walk(parents, tokens[b], targets[b], limits[b])
        assert path[b] == expected + [expected[-1]] * (max_depth + 1 - len(expected))
        assert accepted[b] == len(expected) - 1
        assert bonus[b] == targets[b][expected[-1]]
    for ours, reference in zip(found, verify_strict_reference(*arguments, max_depth)):
        assert torch.equal(ours, reference)
    per_request = [x.expand(batch, -1).contiguous() for x in arguments[:2]]
    for ours, again in zip(found, verify_strict(*per_request, *arguments[2:], max_depth)):
        assert torch.equal(ours, again)


def test_trees_may_differ_between_requests(device):
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0]], device=device)
    depths = torch.tensor([[0, 1, 2], [0, 1, 1]], device=device)
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7]], device=device)
    targets = torch.tensor([[6, 7, 9], [7, 8, 4]], device=device)
    path, accepted, bonus = verify_strict(parents, depths, tokens, targets, torch.tensor([9, 9], device=device), 2)
    assert path.tolist() == [[0, 1, 2], [0, 2, 2]]
    assert (accepted.tolist(), bonus.tolist()) == ([2, 1], [9, 4])


@pytest.mark.parametrize("seed", range(4))
def test_equal_siblings_are_resolved_like_the_reference(device, seed):
    generator = random.Random(seed)
    parents, depths = random_tree(generator, 40)
    tokens, targets = ([[generator.randrange(2) for _ in range(40)] for _ in range(20)] for _ in range(2))
    limits = [generator.choice([0, 2, 99]) for _ in range(20)]
    arguments = [torch.tensor(x, device=device) for x in (parents, depths, tokens, targets, limits)]
    reference = verify_strict_reference(*arguments, max(depths))
    for ours, expected in zip(verify_strict(*arguments, max(depths)), reference):
        assert torch.equal(ours, expected)


def test_shapes_that_do_not_fit_are_refused():
    tokens, row = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="parents and depths"):
        verify_strict(torch.zeros(4), torch.zeros(4), tokens, tokens, row, 1)
    with pytest.raises(ValueError, match="depth_limit"):
        verify_strict(tokens[0], tokens[0], tokens, tokens, row[:1], 1)
