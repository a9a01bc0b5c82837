"""Reading and advancing seats: the kernels against the plain operations, and those against a loop."""

import pytest
import torch

from headstart.inference.speculation.tree import build_static_tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.speculation.seat_rows import (
    advance_seats,
    advance_seats_reference,
    gather_seats,
    gather_seats_reference,
)

TREE = build_static_tree([[0.6, 0.3, 0.2], [0.5, 0.3], [0.5, 0.2], [0.4]], 13)


def make_seats(device, num_seats=6, num_pages=5, hidden_size=1500):
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 2**40, (num_seats + 1, 7), generator=generator)
    integers[:, 0] = torch.randint(0, 60 * num_pages - 64, (num_seats + 1,), generator=generator)
    integers[:, 1:3] = torch.randint(1, 90, (num_seats + 1, 2), generator=generator)
    floats = torch.rand(num_seats + 1, 2, generator=generator)
    table = torch.randint(0, 2**25, (num_seats + 1, num_pages), generator=generator, dtype=torch.int32)
    feature = torch.randn(num_seats + 1, hidden_size, generator=generator)
    return [x.to(device) for x in (integers, floats, table, feature)]


@pytest.mark.parametrize("tree", [chain(0), chain(4), TREE])
def test_seats_are_read_as_by_plain_operations(kernel_device, tree):
    table = make_seats(kernel_device)
    depths = TreeOnDevice.of(tree, kernel_device).depths
    seats = torch.tensor([4, 0, 2], device=kernel_device)
    for found, expected in zip(gather_seats(seats, *table, depths), gather_seats_reference(seats, *table, depths)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tree", [chain(0), chain(4), TREE])
def test_seats_advance_as_by_plain_operations(kernel_device, tree):
    num_places = 240
    integers, _, _, feature = make_seats(kernel_device)
    depth, nodes = tree.max_depth, tree.num_nodes
    generator = torch.Generator().manual_seed(1)
    seats = torch.tensor([1, 5, 6, 6, 3])
    path = torch.tensor(tree.ancestors)[torch.tensor([nodes - 1, 0, 0, nodes // 2, nodes // 3])]
    counts = torch.tensor([depth, 0, 0, min(1, depth), min(2, depth)])
    tokens = torch.randint(0, 90, (5, nodes), generator=generator)
    hidden = torch.randn(5 * nodes, feature.shape[1], generator=generator)
    bonus = torch.tensor([7, 8, 9, 10, 11])
    given = [x.to(kernel_device) for x in (hidden, tokens, path, counts, bonus)]
    seats = seats.to(kernel_device)
    integers[5, 0] = num_places - 1  # its history is full
    history = torch.randint(0, 90, (7, num_places), generator=generator, dtype=torch.int32).to(kernel_device)
    history[6] = 0
    others = [x.clone() for x in (integers, feature, history)]
    found = advance_seats(seats, integers, feature, *given, padding_seat=6, history=history)
    expected = advance_seats_reference(seats, *others[:2], *given, padding_seat=6, history=others[2])
    other_integers, other_feature, other_history = others
    assert torch.equal(found, expected)
    assert torch.equal(integers, other_integers)
    assert torch.equal(feature[:6], other_feature[:6])
    assert torch.equal(history, other_history)
    assert not history[6].any()


def test_advancing_emits_the_path_and_then_the_bonus_token():
    tree = TreeOnDevice.of(TREE, "cpu")
    integers, _, _, feature = make_seats("cpu")
    before = integers.clone()
    tokens = torch.arange(100, 113)[None]
    hidden = torch.randn(13, feature.shape[1])
    node = next(n for n in range(13) if TREE.depths[n] == 2)
    path = tree.ancestors[node][None]
    history = torch.full((7, 300), 9, dtype=torch.int32)
    given = torch.tensor([2]), integers, feature, hidden, tokens, path, torch.tensor([2]), torch.tensor([55])
    history[6] = 0
    emitted = advance_seats(*given, padding_seat=6, history=history)
    assert emitted[0].tolist() == [3, 100 + path[0, 1].item(), 100 + node, 55, *[0] * (TREE.max_depth - 2)]
    assert integers[2, :3].tolist() == [before[2, 0] + 3, 55, before[2, 2] - 3]
    assert torch.equal(feature[2], hidden[node])
    root = before[2, 0].item()
    assert history[2].tolist() == [9] * (root + 1) + [100 + path[0, 1].item(), 100 + node, 55] + [9] * (296 - root)
    assert (history[[0, 1, 3, 4, 5]] == 9).all()
    assert not history[6].any()
    before[2, :3] = integers[2, :3]
    assert torch.equal(integers, before)
