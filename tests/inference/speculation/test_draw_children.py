"""Drawing children: their order, their distribution, their empty slots; and which verifier may follow which way of drawing."""

import ast
import re
from dataclasses import fields
from itertools import permutations
from pathlib import Path

import pytest
import torch

from headstart.inference.speculation import draft_sampling
from headstart.inference.speculation.draft_sampling import (
    DRAFT_SAMPLING,
    RATIO_VERIFIERS,
    VERIFIERS,
    check_sampling,
    sampled_nodes,
)
from headstart.inference.speculation.options import DRAFT_SAMPLE_METHODS, METHODS, SpeculativeOptions
from headstart.inference.speculation.tree import Tree, chain
from headstart.kernels.sampling.philox import DRAFT_NOISE, gumbel, salted
from headstart.kernels.speculation.ratio_rules import RATIO_RULES
from headstart.tests.inference.speculation.draw_children import draw_children

LAW = torch.tensor([0.1, 0.4, 0.3, 0.0, 0.2], dtype=torch.float64)
PAIR = Tree((-1, 0, 0), (0, 0, 1))


def noise(count, size, purpose=DRAFT_NOISE):
    return gumbel(torch.full((count,), 5), torch.zeros(count, dtype=torch.int64), torch.arange(count), size, purpose)


def surprise(counts, expected):
    """-log10 of the p-value of a G-test."""
    statistic = 2 * torch.special.xlogy(counts, counts / expected).sum()
    tail = torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2)
    return -tail.clamp(min=1e-300).log10().item()


def count_ordered(children, choices):
    return torch.stack([(children == torch.tensor(choice)).all(-1).sum() for choice in choices]).double()


def test_children_chosen_without_chance_are_the_likeliest_first():
    assert draw_children(LAW.log(), 3, "greedy").tolist() == [1, 2, 4]
    tied = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0]])
    assert draw_children(tied, 4, "greedy").tolist() == [[1, 2, 0, 3]]


@pytest.mark.parametrize("drawing", DRAFT_SAMPLING)
def test_slots_beyond_the_support_are_empty(drawing):
    given = None if drawing == "greedy" else noise(50, 5)
    children = draw_children(LAW.log().expand(50, 5), 7, drawing, given)
    assert children.shape == (50, 7)
    assert (children.sort(1).values == torch.tensor([-1, -1, -1, 0, 1, 2, 4])).all()
    assert (children[:, 4:] == -1).all()


@pytest.mark.parametrize("drawing", DRAFT_SAMPLING)
def test_without_noise_every_way_gives_the_likeliest(drawing):
    """So a request at temperature 0 needs no way of its own."""
    given = None if drawing == "greedy" else torch.zeros(5)
    assert draw_children(LAW.log(), 3, drawing, given).tolist() == [1, 2, 4]


@pytest.mark.parametrize("drawing", ["sampled", "shared_noise"])
def test_gumbel_top_k_draws_without_replacement_in_order(drawing):
    count = 200_000
    children = draw_children(LAW.log().expand(count, 5), 2, drawing, noise(count, 5))
    choices = [c for c in permutations(range(5), 2) if 3 not in c]
    expected = torch.stack([LAW[a] * LAW[b] / (1 - LAW[a]) for a, b in choices])
    counts = count_ordered(children, choices)
    assert counts.sum() == count
    assert surprise(counts, count * expected) < 6
    assert surprise(counts, count * expected.flip(0)) > 100


def test_top_and_one_draws_the_last_child_from_the_rest():
    count = 200_000
    children = draw_children(LAW.log().expand(count, 5), 3, "top_and_one", noise(count, 5))
    assert (children[:, :2] == torch.tensor([1, 2])).all()
    counts = count_ordered(children[:, 2:], [(0,), (4,)])
    assert counts.sum() == count
    assert surprise(counts, count * torch.tensor([1 / 3, 2 / 3])) < 6


def test_nodes_have_noise_of_their_own():
    rows = [noise(8, 5, salted(DRAFT_NOISE, node)) for node in range(3)]
    together = gumbel(
        torch.tensor(5), torch.tensor(0), torch.tensor(7), 5, salted(DRAFT_NOISE, torch.arange(3))
    )  # one row per node
    assert torch.equal(together, torch.stack([row[7] for row in rows]))
    assert not torch.isclose(rows[0], rows[1]).any()


def test_noise_that_is_missing_or_not_wanted_is_an_error():
    with pytest.raises(ValueError, match="takes noise"):
        draw_children(LAW.log(), 2, "sampled")
    with pytest.raises(ValueError, match="takes no noise"):
        draw_children(LAW.log(), 2, "greedy", torch.zeros(5))
    with pytest.raises(ValueError, match="'top_k'"):
        draw_children(LAW.log(), 2, "top_k")


def test_sampled_nodes_are_those_whose_distribution_is_not_one_hot():
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 2])
    assert sampled_nodes("greedy", parents)[1:].any().item() is False
    assert sampled_nodes("sampled", parents)[1:].all()
    expected = [False, False, True, False, True, True]
    assert sampled_nodes("top_and_one", parents)[1:].tolist() == expected
    assert sampled_nodes("top_and_one", parents.expand(2, -1))[1, 1:].tolist() == expected
    assert sampled_nodes("top_and_one", parents.clamp(min=0))[1:].tolist() == expected  # the root as its own parent
    with pytest.raises(ValueError, match="shared_noise"):
        sampled_nodes("shared_noise", parents)


def allowed(verifier, drawing, tree):
    try:
        check_sampling(verifier, drawing, tree)
    except ValueError:
        return False
    return True


def test_only_lossless_pairs_of_verifier_and_drawing_pass():
    assert set(RATIO_VERIFIERS) == set(RATIO_RULES)
    for drawing in DRAFT_SAMPLING:
        own = drawing != "shared_noise"
        for verifier in ("strict", "synthetic"):
            assert allowed(verifier, drawing, PAIR)
            assert allowed(verifier, drawing, chain(3))
        for verifier in RATIO_VERIFIERS:
            assert allowed(verifier, drawing, chain(3)) == own
            assert allowed(verifier, drawing, PAIR) == (own and verifier in ("recursive", "traversal"))


@pytest.mark.parametrize(
    ("verifier", "drawing", "tree", "reason"),
    [
        ("token", "sampled", PAIR, "use verifier='recursive'"),
        ("block", "greedy", PAIR, "use verifier='traversal'"),
        ("traversal", "shared_noise", PAIR, "again in the next step"),
        ("recursive", "sampled", Tree((-1, 0, 0), (0, 0, 2)), "node 0 are listed with the ranks [0, 2]"),
        ("recursive", "top_and_one", Tree((-1, 0, 0), (0, 1, 0)), "node 0 are listed with the ranks [1, 0]"),
        ("typical", "sampled", PAIR, "got 'typical'"),
        ("block", "drawn", PAIR, "got 'drawn'"),
    ],
)
def test_a_pair_that_is_not_lossless_is_an_error_that_says_why(verifier, drawing, tree, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        check_sampling(verifier, drawing, tree)


def test_errors_of_speculation_name_keys_that_exist():
    """Whatever stands as key=value in an error is a key of speculative_config, and a value in quotes is one that it takes."""
    keys, named = {field.name for field in fields(SpeculativeOptions)}, set()
    values = {"verifier": VERIFIERS, "draft_sample_method": DRAFT_SAMPLE_METHODS, "method": METHODS}
    values["tree"] = ("chain", "static", "dynamic")
    for path in (Path(draft_sampling.__file__).parent).rglob("*.py"):
        for error in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)):
            parts = [node for node in ast.walk(error) if isinstance(node, ast.JoinedStr)]
            texts = [
                "".join(getattr(x, "value", "") if isinstance(x, ast.Constant) else "{}" for x in t.values)
                for t in parts
            ]
            texts += [
                node.value for node in ast.walk(error) if isinstance(node, ast.Constant) and type(node.value) is str
            ]
            for key, value in re.findall(r"(\w+)=('\w*'|\{)", " ".join(texts)):
                assert key in keys, f"{path.name} names {key}="
                assert value == "{" or value.strip("'") in values[key], f"{path.name} says {key}={value}"
                named.add(key)
    assert named >= {"verifier", "draft_sample_method"}


def test_left_out_ranks_are_fine_where_children_are_chosen():
    assert allowed("recursive", "greedy", Tree((-1, 0, 0), (0, 0, 2)))


def test_vllms_names_stand_for_the_rule_of_the_topology():
    names = ("strict", "probabilistic", "standard", "block", "synthetic")
    assert [SpeculativeOptions(model="x", rejection_sample_method=name).verifier_on(chain(2)) for name in names] == [
        "strict",
        "token",
        "token",
        "block",
        "synthetic",
    ]
    assert [SpeculativeOptions(model="x", rejection_sample_method=name).verifier_on(PAIR) for name in names] == [
        "strict",
        "recursive",
        "recursive",
        "traversal",
        "synthetic",
    ]
    with pytest.raises(ValueError, match=r"rejection_sample_method must be one of .* got 'fast'"):
        SpeculativeOptions(model="x", rejection_sample_method="fast")
