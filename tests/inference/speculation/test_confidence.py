"""A head's confidence and the depth of drafts: what a step tells of it, what a plan makes of it; no output depends on it."""

import random

import pytest
import torch

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.inference.llm import LLM
from headstart.inference.ranks.lockstep import FollowedPlan, LedPlan
from headstart.inference.speculation.adaptive import FIRST, LATELY, STEADY, Adaptive
from headstart.inference.speculation.tree import GrowingTree, build_static_tree, save_tree
from headstart.tests.inference.speculation.small_drafters import DEPTH, DEVICES, llama, outputs

CASES = {
    "states alone, no edge": dict(edge_rank=0, confidence_sees_token=False),
    "the token before": dict(edge_rank=5),
    "states alone": dict(edge_rank=5, confidence_sees_token=False, sample_from_anchor=True),
}


def make(target, **changes):
    torch.manual_seed(7)
    shape = dict(
        num_hidden_layers=1, mask_token_id=5, aux_layer_ids=(1, 3), num_speculative_tokens=DEPTH, confidence=True
    )
    head = BlockHead(BlockConfig.for_target(target.config, **shape | changes)).to(target.device)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and len(parameter) > 1), std=0.3)
    head.take_embedding(target.model.embed_tokens.weight)
    return head.requires_grad_(False)


@pytest.fixture(scope="module", params=DEVICES)
def target(request):
    return llama().to(request.param)


@pytest.mark.parametrize("tree", ["chain", "static", "grown"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_tells_the_confidence_of_the_first_path(target, tmp_path, case, tree):
    """Of the drafts as they are: the head's own, of the slots' states and of the tokens before on the path of first choices."""
    head = make(target, **CASES[case])
    shapes = {
        "static": build_static_tree([[0.6, 0.3], [0.5, 0.3], [0.5], [0.4]], 9),
        "grown": GrowingTree(max_depth=DEPTH, width=2, num_nodes=7),
    }
    if tree in shapes:
        save_tree(shapes[tree], tmp_path / "tree.json")
    told = {"model": head, "tree": str(tmp_path / "tree.json") if tree in shapes else tree}
    llm = LLM(target, max_num_seqs=3, enforce_eager=True, speculative_config=told)
    drafter, seen = llm.engine.drafter, []
    drafter.tells_confidence = True
    propose, marginals = drafter.propose, drafter.marginals

    def pass_once(batch, num_depths):
        found = marginals(batch, num_depths)
        seen.append([drafter.kept.clone(), None])
        return found

    def keep(batch, tree, processor=None):
        draft = propose(batch, tree, processor)
        seen[-1][1] = draft
        return draft

    drafter.marginals, drafter.propose = pass_once, keep
    outputs(llm, 0.0, count=3)
    for states, draft in seen:
        tokens = draft.tokens
        parents = draft.tree.parents.expand(tokens.shape)
        path, found = [torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)], []
        for depth in range(len(states)):
            before = tokens.gather(1, path[-1][:, None])[:, 0]
            found.append(head.confidence_logits(states[depth], before).sigmoid())
            children = (parents == path[-1][:, None]) & (torch.arange(parents.shape[1], device=tokens.device) > 0)
            path.append(children.int().argmax(1))
        expected = torch.stack(found, 1).cumprod(1)
        assert draft.confidence.dtype == torch.float32
        if tree == "grown":  # a first choice may be left out of it
            torch.testing.assert_close(draft.confidence[:, 0], expected[:, 0])
        else:
            torch.testing.assert_close(draft.confidence, expected)
        assert draft.confidence.std() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_outputs_do_not_depend_on_it(target, case):
    head, plain = make(target, **CASES[case]), LLM(target, max_num_seqs=1)
    llm = LLM(target, max_num_seqs=3, speculative_config={"model": head, "adaptive": True})
    told, record = [], llm.engine.plan.record

    def kept(*given):
        told.append(given)
        record(*given)

    llm.engine.plan.record = kept
    for temperature in (0.0, 0.8):
        assert outputs(llm, temperature, count=5, logprobs=1) == outputs(plain, temperature, count=5, logprobs=1)
    depths = llm.engine.plan.depths
    assert {len(row) for _, place, _, _, rows in told for row in rows} == {depth for depth in depths if depth}
    assert all(len(rows) == (len(accepted) if depths[place] else 0) for _, place, _, accepted, rows in told)


def test_only_a_plan_that_measures_asks_for_it(target):
    head = make(target, edge_rank=5)
    for told, tells in ((dict(adaptive=True), True), ({}, False)):
        drafter = LLM(target, speculative_config={"model": head} | told).engine.drafter
        assert drafter.is_sure == tells


# ---- what a plan makes of it ----


def settled(sure, least=1):
    """A plan of depths 3 and `least`, after long text of which half is accepted with this confidence."""
    plan = Adaptive([3, least], [1])
    for place, seconds in ((1, 5.0), (0, 9.0)):
        for _ in range(FIRST):
            plan.record(1, place, seconds, [1], [sure])
    for i in range(600):
        plan.record(1, 0, 9.0, [3 * (i % 2)], [sure])
    return plan


@pytest.mark.parametrize("sure", [[0.5, 0.5, 0.5], [0.9, 0.8, 0.7], [0.02, 0.01, 0.01]])
def test_what_counts_is_the_quotient_and_not_the_confidence_itself(sure):
    plan = settled(sure)
    assert [plan._chance(level) for level in range(3)] == pytest.approx([0.5] * 3, abs=0.01)
    rate = plan.rate(1, 3)
    for _ in range(3):
        plan.record(1, 0, 9.0, [0], [[one / 2 for one in sure]])
    assert plan.lately[0].value < 0.8 * sure[0] < plan.claimed[0].value
    shown = (1 - LATELY) ** 3 + (1 - (1 - LATELY) ** 3) / 2  # of the confidence before
    claimed = (1 - STEADY) ** 3 + (1 - (1 - STEADY) ** 3) / 2
    assert plan._chance(0) == pytest.approx(0.5 * (1 - STEADY) ** 3 * shown / claimed, rel=0.02)
    assert plan.rate(1, 3) < 0.9 * rate


def test_easy_text_makes_drafts_deeper_at_once_also_below_the_last_draft():
    plan = settled([0.5, 0.4, 0.3])
    plan.record(1, 1, 5.0, [0], [[0.5]])
    assert plan.depths[plan.best(1)] == 1
    for _ in range(4):
        plan.record(1, 1, 5.0, [1], [[0.95]])
    assert plan.depths[plan.best(1)] == 3
    without = settled([0.5, 0.4, 0.3])
    for _ in range(4):
        without.record(1, 1, 5.0, [1])
    assert without.depths[without.best(1)] == 1


def test_a_chance_is_at_most_one():
    plan = settled([0.1, 0.1, 0.1])
    for _ in range(20):
        plan.record(1, 0, 9.0, [3], [[1.0, 1.0, 1.0]])
    assert plan._chance(0) == 1.0


def test_without_drafts_the_text_is_taken_for_average_again():
    plan = settled([0.5, 0.4, 0.3], least=0)
    for _ in range(3):
        plan.record(1, 0, 9.0, [0], [[0.1, 0.1, 0.1]])
    before = plan._chance(0)
    for _ in range(30):
        plan.record(1, 1, 4.0, [0], [])
    assert plan._chance(0) == pytest.approx(plan.reached[0].value, rel=0.01)
    assert before < 0.7 * plan._chance(0)


def tokens_per_second(is_told):
    """Of one request through 20 texts, easy and hard ones in turn. A level costs a tenth of a step; is_told: of the confidence."""
    rng, plan, tokens, seconds = random.Random(1), Adaptive([4, 2, 1, 0], [1]), 0, 0.0
    for text in range(20):
        rate = 0.85 if text % 2 else 0.12
        for _ in range(100):
            place = plan.choose(1)
            drafted, accepted = plan.depths[place], 0
            while accepted < drafted and rng.random() < rate:
                accepted += 1
            sure = min(max(rate + rng.gauss(0, 0.2), 0.01), 0.99)
            cost = 1 + 0.1 * drafted
            tokens, seconds = tokens + 1 + accepted, seconds + cost
            told = [[sure ** (level + 1) for level in range(drafted)]] if is_told and drafted else []
            plan.record(1, place, cost, [accepted], told)
    return tokens / seconds


def test_where_texts_differ_it_makes_more_tokens_per_second():
    assert tokens_per_second(True) > 1.05 * tokens_per_second(False)


def test_steps_before_the_first_draft_say_nothing_of_the_text():
    """As those of requests that are not drafted for."""
    plan = Adaptive([3, 0], [1])
    for _ in range(5):
        plan.record(1, 1, 0.1, [0])
    assert not any(one.count for one in plan.lately)


def test_ranks_that_measure_otherwise_choose_alike():
    """Rank 0's seconds and its drafts' confidence are sent: unlike cards may round that differently."""
    rng, depths = random.Random(2), [4, 2, 1, 0]
    led, followed = LedPlan(Adaptive(depths, [1])), FollowedPlan(Adaptive(depths, [1]))
    chosen = []
    for step in range(400):
        followed.settle(led.take_measured())
        place = led.choose(1)
        assert followed.choose(1) == place
        drafted, rate = depths[place], 0.9 if step // 50 % 2 else 0.1
        accepted = sum(rng.random() < rate for _ in range(drafted))
        sure, other = (
            [[one ** (level + 1) for level in range(drafted)]] if drafted else [] for one in (rate, rng.random())
        )
        led.record(1, place, 1 + 0.1 * drafted, [accepted], sure)
        followed.record(1, place, rng.random(), [accepted], other)
        chosen.append(place)
    assert {*chosen[50:]} == {0, 1, 2, 3}
