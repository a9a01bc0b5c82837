import itertools
import json
import random

import pytest

from headstart.inference.speculation.tree import (
    Tree,
    build_static_tree,
    chain,
    expected_acceptance_length,
    load_tree,
    save_tree,
)

RATES = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.05], [0.4, 0.1, 0.05]]


def test_a_chain_is_a_tree_with_one_child_per_node():
    tree = chain(4)
    assert tree.parents == (-1, 0, 1, 2, 3)
    assert tree.depths == (0, 1, 2, 3, 4)
    assert tree.widths == (1, 1, 1, 1)
    assert tree.is_chain
    assert tree.ancestors[3] == (0, 1, 2, 3, 3)


def all_trees(rates, num_nodes):
    """Every tree of num_nodes nodes, as sets of rank paths: brute force."""
    paths = [path for d in range(1, len(rates) + 1) for path in itertools.product(*[range(len(r)) for r in rates[:d]])]
    for chosen in itertools.combinations(paths, num_nodes - 1):
        chosen = {(), *chosen}
        if all(path[:-1] in chosen for path in chosen if path):
            yield chosen


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_the_static_tree_is_the_best_of_all_trees_of_its_size(num_nodes):
    def worth(paths):
        return sum(_product(RATES[d][rank] for d, rank in enumerate(path)) for path in paths)

    best = max(worth(paths) for paths in all_trees(RATES, num_nodes))
    tree = build_static_tree(RATES, num_nodes)
    assert tree.num_nodes == num_nodes
    assert expected_acceptance_length(tree, RATES) == pytest.approx(best, abs=1e-12)


def _product(values):
    result = 1.0
    for value in values:
        result *= value
    return result


def test_expected_acceptance_length_is_what_a_simulation_finds():
    tree = build_static_tree(RATES, 9)
    generator = random.Random(0)
    total, trials = 0, 40_000
    for _ in range(trials):
        node = 0
        while node is not None:
            total += 1
            draw, children = generator.random(), [n for n in range(tree.num_nodes) if tree.parents[n] == node]
            node_next = None
            for rank, rate in enumerate(RATES[tree.depths[node]] if tree.depths[node] < 3 else []):
                draw -= rate
                if draw < 0:
                    node_next = next((n for n in children if tree.ranks[n] == rank), None)
                    break
            node = node_next
    assert total / trials == pytest.approx(expected_acceptance_length(tree, RATES), abs=0.02)


def test_nodes_without_a_chance_are_left_out():
    assert build_static_tree([[0.5, 0.0]], 10).num_nodes == 2


def test_truncating_keeps_the_shallow_nodes():
    tree = build_static_tree(RATES, 12).truncated(2)
    assert tree.max_depth == 2
    assert tree.parents[0] == -1
    assert build_static_tree(RATES, 12).truncated(9) == build_static_tree(RATES, 12)


def test_without_gaps_ranks_are_places_among_the_siblings():
    tree = Tree((-1, 0, 0, 1, 0, 1), (0, 2, 0, 5, 7, 6))
    assert tree.without_gaps() == Tree(tree.parents, (0, 1, 0, 0, 2, 1))
    assert tree.without_gaps().without_gaps() == tree.without_gaps()
    assert tree.without_gaps().width == 3


def test_a_saved_tree_is_read_back(tmp_path):
    tree = build_static_tree(RATES, 7)
    save_tree(tree, tmp_path / "tree.json", RATES)
    assert load_tree(tmp_path / "tree.json") == tree
    assert json.loads((tmp_path / "tree.json").read_text())["rates"] == RATES


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((0, 0), (0, 0), "node 0 being the root"),
        ((-1, 2, 1), (0, 0, 0), "parents come before"),
        ((-1, 0, 0), (0, 1, 1), "siblings' ranks differ"),
        ((-1,) + (0,) * 64, tuple(range(65)), "at most 64 nodes"),
    ],
)
def test_what_is_no_tree_is_refused(parents, ranks, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents, ranks)


def test_a_broken_tree_file_is_named(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text('{"parents": [-1, 0]')
    with pytest.raises(ValueError, match=r"tree\.json is not a tree file"):
        load_tree(path)
    with pytest.raises(ValueError, match="no tree file"):
        load_tree(tmp_path / "missing.json")
