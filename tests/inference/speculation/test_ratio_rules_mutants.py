"""Faults that break losslessness are caught: with each fault, the emitted distribution is wrong by at least its known size.

The sizes are total variation on the joint distribution of a step's tokens, the worst of a few random distributions; see
enumeration.py.
"""

from functools import partial
from unittest import mock

import pytest
import torch

from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.kernels.sampling.philox import ACCEPT_UNIFORM, DRAFT_NOISE, RESIDUAL_NOISE, gumbel, salted, uniform
from headstart.kernels.speculation import ratio_rules
from headstart.kernels.speculation.ratio_rules import (
    RATIO_RULES,
    DraftProbabilities,
    block,
    draw,
    recursive,
    token,
    traversal,
)
from headstart.tests.inference.speculation.draw_children import draw_children
from headstart.tests.inference.speculation.enumeration import (
    Case,
    all_drafts,
    at_nodes,
    children_of,
    emitted_distribution,
    look_up,
    make_draft,
    random_case,
    run,
    total_variation,
)

PAIR = Tree((-1, 0, 0), (0, 0, 1))
TRIPLE = Tree((-1, 0, 0, 0), (0, 0, 1, 2))
BALANCED = Tree((-1, 0, 0, 1, 1, 2, 2), (0, 0, 1, 0, 1, 0, 1))
ON_TREES, ON_CHAINS = (recursive, traversal), tuple(RATIO_RULES.values())


def worst(mutant, rules, tree, size, drawing="sampled", medusa=False):
    """The least over rules of the greatest total variation over random distributions: how surely the fault is seen."""
    cases = [random_case(tree, size, drawing, "random", seed, medusa) for seed in range(6)]
    return min(max(total_variation(mutant(rule, case), case) for case in cases) for rule in rules)


def told(rule, case, tokens=None, **wrong):
    """The distribution where the rule is handed other tokens, distributions or ways of drawing than were drawn."""
    true, weights = all_drafts(case)
    tokens = true if tokens is None else tokens(true, case)
    draft = make_draft(case, true, **wrong)._replace(tokens=tokens)
    return emitted_distribution(rule, case, drafts=(tokens, weights), draft=draft)[0]


def likeliest_first(tokens, case):
    children = tokens[:, 1:]
    return torch.cat([tokens[:, :1], children.gather(1, case.q[0][children].argsort(1, descending=True))], 1)


def cut_where_unlikely(tokens, case):
    """A draft ends before its first token of which q is below a quarter."""
    tokens = tokens.clone()
    for node in range(1, case.tree.num_nodes):
        q = look_up(case.q[node - 1], tokens, range(1, node))
        tokens[q.gather(1, tokens[:, node, None].clamp(min=0)).squeeze(1) < 0.25, node] = -1
        tokens[tokens[:, node - 1] < 0, node] = -1
    return tokens


def dropped(rule, case):
    """Three children are drawn, the two likeliest are kept."""
    tokens, weights = all_drafts(case)
    kept = likeliest_first(tokens, case)[:, :3]
    return emitted_distribution(rule, Case(PAIR, case.p, case.q, "sampled"), drafts=(kept, weights))[0]


def patched(name, replacement, rule, case):
    with mock.patch.object(ratio_rules, name, replacement):
        return emitted_distribution(rule, case)[0]


def test_a_draft_distribution_of_another_temperature_is_caught():
    def mutant(rule, case):
        return told(rule, case, q=[(table.log() / 0.7).softmax(-1) for table in case.q])

    assert worst(mutant, ON_CHAINS, chain(2), 4) > 0.04


def test_a_draft_distribution_of_another_top_p_is_caught():
    def mutant(rule, case):
        """Drawn from all of q, judged as if its least likely token had been cut off."""
        cut = [table * (table > table.amin(-1, keepdim=True)) for table in case.q]
        return told(rule, case, q=[table / table.sum(-1, keepdim=True) for table in cut])

    assert worst(mutant, ON_CHAINS, chain(2), 4) > 0.04


def test_the_soft_distribution_of_a_chosen_child_is_caught():
    assert worst(partial(told, drawing="sampled"), ON_CHAINS, chain(2), 4, "greedy") > 0.45
    assert worst(partial(told, drawing="sampled"), ON_TREES, TRIPLE, 4, "greedy") > 0.1


def test_one_hot_distributions_for_drawn_children_are_lossless_but_accept_less():
    """Not a fault of the distribution: a drawn token may be judged as if chosen, since no u depends on it."""
    assert worst(partial(told, drawing="greedy"), ON_CHAINS, chain(2), 4) < 1e-12


def test_siblings_in_another_order_than_drawn_are_caught():
    def reversed_order(tokens, case):
        return torch.cat([tokens[:, :1], tokens[:, 1:].flip(1)], 1)

    assert worst(partial(told, tokens=reversed_order), ON_TREES, TRIPLE, 4) > 0.19
    assert worst(partial(told, tokens=likeliest_first), ON_TREES, TRIPLE, 4) > 0.19


def test_drawn_children_dropped_and_ranked_anew_are_caught():
    assert worst(dropped, ON_TREES, TRIPLE, 5) > 0.17


def test_slots_not_renormalised_without_the_earlier_siblings_are_caught():
    def no_renormalising(q, x):
        return q.scatter(-1, x.clamp(min=0)[..., None], 0.0)

    assert worst(partial(patched, "without", no_renormalising), ON_TREES, TRIPLE, 4) > 0.007
    assert worst(partial(patched, "without", lambda q, x: q), ON_TREES, TRIPLE, 4) > 0.007
    assert worst(partial(patched, "without", no_renormalising), ON_TREES, TRIPLE, 4, "top_and_one") > 0.007


def test_a_draft_cut_short_for_its_own_tokens_q_is_caught():
    assert worst(partial(told, tokens=cut_where_unlikely), ON_CHAINS, chain(2), 4) > 0.09


def test_stopping_block_at_the_first_failure_is_caught():
    def mutant(rule, case):
        def stopping(tree, draft, p, u, limit):
            failed = u % 2  # in enumeration.run
            later = torch.cat([failed[:, :1], failed[:, 1:].cummax(1).values], 1)
            return rule(tree, draft, p, u - failed + later, limit)

        return emitted_distribution(stopping, case, drafts=all_drafts(case))[0]

    assert worst(mutant, [block], chain(3), 3) > 0.21


def test_the_residual_of_token_in_block_is_caught():
    def mutant(rule, case):
        def simple(tree, draft, p, u, limit):
            found = rule(tree, draft, p, u, limit)
            node = found.num_accepted
            q = ratio_rules.pick(draft.q, node.clamp(max=draft.q.shape[1] - 1))
            rest, _ = ratio_rules.residual(ratio_rules.pick(p, node), q)
            return found._replace(distribution=torch.where((node < tree.max_depth)[:, None], rest, found.distribution))

        return emitted_distribution(simple, case, drafts=all_drafts(case))[0]

    assert worst(mutant, [token], chain(3), 3) < 1e-12  # there it is the right one
    assert worst(mutant, [block], chain(3), 3) > 3e-4


def test_a_bonus_token_drawn_at_another_temperature_is_caught():
    def mutant(rule, case):
        def bonus(*arguments):
            found = rule(*arguments)
            last = found.num_accepted == case.tree.max_depth
            return found._replace(
                distribution=torch.where(
                    last[:, None], (found.distribution.log() / 0.7).softmax(-1), found.distribution
                )
            )

        return emitted_distribution(bonus, case, drafts=all_drafts(case))[0]

    assert worst(mutant, ON_CHAINS, chain(2), 4) > 0.01


def test_children_shared_by_the_parents_of_a_depth_break_traversal_only():
    """A head that does not see the drafted tokens could draw once per depth. Traversal comes to the second parent knowing that the
    first one's children failed; recursive never looks at the children of a node that it has not accepted."""

    def shared(rule, case):
        return emitted_distribution(rule, case, drafts=all_drafts(case, shared=True))[0]

    assert worst(shared, [recursive], BALANCED, 3, medusa=True) < 1e-12
    assert worst(shared, [traversal], BALANCED, 3, medusa=True) > 0.02
    assert worst(shared, ON_TREES, BALANCED, 3, "greedy", medusa=True) < 1e-12


def two_steps(rule, case, reused):
    """The distribution of two tokens by a step of a chain of two and, where it accepts nothing, one more step of a chain of one,
    whose draft
    comes from the same distribution as the first step's second token; reused: and from the same noise, so it is the same token."""
    result, size = run(rule, case), case.p[0].shape[0]
    none = result.found.num_accepted == 0
    distribution = emitted_distribution(rule, case)[0].sum(
        2
    )  # by one step: where it accepts nothing, the second token is p's
    q = case.q[1][0]  # at any prefix: medusa
    weights = result.weights[none, None] * result.found.distribution[none]  # [R, V] of the first token
    second = result.draft.tokens[none, 2]
    for first in range(size):
        p = case.p[1][first]
        rest, _ = ratio_rules.residual(p, q)
        accepted = (p / q).clamp(max=1)  # [V] of the draft's token
        by_draft = torch.diag(accepted) + (1 - accepted)[:, None] * rest  # [V, V]: draft -> second token
        mixed = weights[:, first] @ by_draft[second] if reused else weights[:, first].sum() * (q @ by_draft)
        distribution[first] += mixed - weights[:, first].sum() * p  # the second step's instead
    return distribution


def test_draft_noise_used_again_in_the_next_step_breaks_block_only():
    """Noise keyed by the position drafted for, not by the step: block has looked at the later token before it is drawn again."""
    cases = [random_case(chain(2), 4, "sampled", "random", seed, medusa=True) for seed in range(6)]

    def off(rule, reused):
        return max(float((two_steps(rule, case, reused) - case.joint.sum(2)).abs().sum() / 2) for case in cases)

    assert max(off(token, False), off(block, False), off(token, True)) < 1e-12
    assert off(block, True) > 0.02


@pytest.mark.parametrize("rule", RATIO_RULES.values())
def test_u_of_zero_does_not_accept_what_the_target_never_emits(rule):
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = DraftProbabilities(
        torch.tensor([[0, 0]]), torch.tensor([[[0.5, 0.5]]]), torch.tensor([0, 0]), torch.tensor([True, True])
    )
    arguments = (TreeOnDevice.of(chain(1), "cpu"), draft, p, torch.zeros(1, 2), torch.tensor([1]))
    assert rule(*arguments).num_accepted.item() == 0
    with mock.patch.object(ratio_rules, "accepts", lambda u, numerator, denominator: u * denominator <= numerator):
        assert rule(*arguments).num_accepted.item() == 1


def surprise(rule, case, count, drafting=DRAFT_NOISE, accepting=ACCEPT_UNIFORM, emitting=RESIDUAL_NOISE):
    """-log10 of the p-value of a G-test on the distribution of a step's tokens, with the real generator's noise."""
    tree, size = case.tree, case.p[0].shape[0]
    key = (torch.full((count,), 11), torch.zeros(count, dtype=torch.int64), torch.arange(count))
    tokens = torch.zeros(count, tree.num_nodes, dtype=torch.int64)
    for node in range(tree.num_nodes):
        children = children_of(tree, node)
        if children:
            q = look_up(case.q[tree.depths[node]], tokens, tree.ancestors[node][1 : tree.depths[node] + 1])
            noise = gumbel(*key, size, salted(drafting, node))
            tokens[:, children] = draw_children(q.log(), len(children), case.drawing, noise)
    p = at_nodes(tree, case.p, tokens, range(tree.num_nodes))
    u = uniform(*key, tree.num_nodes, accepting)
    path, num_accepted, distribution = rule(
        TreeOnDevice.of(tree, "cpu"), make_draft(case, tokens), p, u, torch.full((count,), tree.max_depth)
    )
    bonus = draw(distribution, gumbel(*key, size, emitting))
    emitted = tokens.gather(1, path)[:, 1:]
    emitted = torch.cat(
        [torch.where(torch.arange(tree.max_depth) < num_accepted[:, None], emitted, bonus[:, None]), bonus[:, None]], 1
    )
    generator = torch.Generator().manual_seed(0)
    for depth in range(1, tree.max_depth + 1):  # after the step's tokens, any that p draws
        rest = torch.multinomial(look_up(case.p[depth], emitted, range(depth)), 1, generator=generator).squeeze(1)
        emitted[:, depth] = torch.where(num_accepted < depth, rest, emitted[:, depth])
    cell = (emitted * size ** torch.arange(tree.max_depth, -1, -1)).sum(1)
    seen, expected = torch.bincount(cell, minlength=size ** (tree.max_depth + 1)).double(), count * case.joint.flatten()
    statistic = 2 * torch.special.xlogy(seen, seen / expected).sum()
    tail = torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2)
    return -tail.clamp(min=1e-300).log10().item()


@pytest.mark.parametrize(
    ("rule", "tree"), [(token, chain(2)), (block, chain(2)), (recursive, BALANCED), (traversal, BALANCED)]
)
def test_with_the_real_generator_only_noise_per_purpose_keeps_the_distribution(rule, tree):
    case, count = random_case(tree, 3, "sampled", "random", seed=3), 100_000
    assert surprise(rule, case, count) < 6
    assert surprise(rule, case, count, emitting=DRAFT_NOISE) > 100  # the noise of the root's children
    if rule is not traversal:  # which on two of three tokens hardly ever leaves a decision to an inner node's u
        assert surprise(rule, case, count, accepting=RESIDUAL_NOISE) > 100
