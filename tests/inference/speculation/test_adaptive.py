"""The depth of drafts follows what is measured, and changes no output."""

import re

import pytest

from headstart.inference.engine import engine
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.adaptive import (
    FIRST,
    MEMORY,
    PROBE_EVERY,
    STEADY,
    Adaptive,
    OneDepth,
    PerBatchSize,
    depths_to_try,
)
from headstart.tests.inference.speculation.small_drafters import DEVICES, llama, make, outputs

DEPTHS = [5, 3, 2, 1, 0]


def run(plan, num_requests, steps, cost, reach):
    """`steps` steps that cost cost(depth, requests) seconds, whose paths reach depth d for the share reach[d - 1] of all.

    Returns how often each depth was chosen in the last three quarters.
    """
    chosen = []
    for i in range(steps):
        place = plan.choose(num_requests)
        depth = plan.depths[place]
        accepted = sum(i * 0.618 % 1 < share for share in reach[:depth])
        plan.record(num_requests, place, cost(depth, num_requests), [accepted] * num_requests)
        chosen.append(depth)
    return {depth: chosen[steps // 4 :].count(depth) for depth in plan.depths}


def test_depths_that_are_tried():
    assert depths_to_try(5) == DEPTHS
    assert depths_to_try(4) == [4, 2, 1, 0]
    assert depths_to_try(3) == [3, 2, 1, 0]
    assert depths_to_try(2) == [2, 1, 0]
    assert depths_to_try(1) == [1, 0]


@pytest.mark.parametrize(
    ("cost", "reach", "best"),
    [
        (lambda depth, _: 4 + 0.1 * depth, [0.9, 0.8, 0.7, 0.6, 0.5], 5),
        (lambda depth, _: 4 + 0.1 * depth, [0.6, 0.02, 0.0, 0.0, 0.0], 1),
        (lambda depth, _: 4 + 4 * depth, [0.9, 0.8, 0.7, 0.6, 0.5], 0),
        (lambda depth, _: 4 + 1.2 * depth, [0.9, 0.85, 0.8, 0.1, 0.05], 3),
    ],
)
def test_the_best_depth_is_taken_but_for_a_few_tries(cost, reach, best):
    chosen = run(Adaptive(DEPTHS, [1, 2, 4]), 1, 1200, cost, reach)
    assert chosen[best] > 0.95 * sum(chosen.values()), chosen
    assert all(count > 0 for count in chosen.values()), "every depth is tried again at times"


def test_each_bucket_has_a_best_depth_of_its_own():
    plan, reach = Adaptive(DEPTHS, [1, 2, 4, 8]), [0.8, 0.6, 0.5, 0.4, 0.3]

    def cost(depth, num_requests):  # one request leaves the device room, eight do not
        return 4 + depth * (0.1 if num_requests == 1 else 4.0)

    assert run(plan, 1, 600, cost, reach)[5] > 400
    assert run(plan, 7, 600, cost, reach)[0] > 400
    assert {size for size, _ in plan.seconds if plan.seconds[size, 0].count} == {1, 8}


def test_the_depth_changes_when_the_text_does():
    plan, cost = Adaptive(DEPTHS, [1]), lambda depth, _: 4 + 0.5 * depth
    assert run(plan, 1, 600, cost, [0.9, 0.8, 0.7, 0.6, 0.5])[5] > 400
    assert run(plan, 1, 4000, cost, [0.05, 0.0, 0.0, 0.0, 0.0])[0] > 2800
    assert run(plan, 1, 8000, cost, [0.9, 0.8, 0.7, 0.6, 0.5])[5] > 3000, "from no drafts it finds back"


def test_what_every_step_shows_follows_chance_less():
    plan = Adaptive([3, 1], [1])
    for _ in range(400):
        plan.record(1, 0, 1.0, [3])
    for _ in range(10):
        plan.record(1, 0, 1.0, [0])
    shown = (1 - STEADY) ** 10
    assert [average.value for average in plan.reached] == pytest.approx([shown] * 3)
    plan.record(1, 1, 1.0, [0])
    plan.record(1, 0, 1.0, [0])  # after a step of depth 1: the levels below are news
    deeper = shown * (1 - MEMORY)
    assert [average.value for average in plan.reached] == pytest.approx([shown * (1 - STEADY) ** 2, deeper, deeper])


def test_a_step_beside_prompts_tells_what_is_accepted_and_no_time():
    plan = Adaptive([3, 1], [1])
    assert plan.best(1) == 0, "nothing is measured"
    for place, seconds in ((0, 4.0), (1, 1.0)):
        for _ in range(FIRST):
            plan.record(1, place, seconds, [1])
    assert plan.best(1) == 1
    plan.record(1, 0, None, [3])
    assert plan.seconds[1, 3].count == FIRST
    assert plan.reached[2].value > 0


def test_every_depth_is_measured_first():
    plan = Adaptive(DEPTHS, [1])
    first = []
    for _ in range(FIRST * len(DEPTHS)):
        first.append(plan.choose(1))
        plan.record(1, first[-1], 1.0, [0])
    assert first == [place for place in range(len(DEPTHS)) for _ in range(FIRST)]
    assert PROBE_EVERY > FIRST


def test_depths_that_are_told():
    plan = PerBatchSize({1: 5, 8: 2, 32: 0}, 5)
    assert plan.depths == [5, 2, 0]
    assert [plan.depths[plan.choose(n)] for n in (1, 7, 8, 31, 32, 100)] == [5, 5, 2, 2, 0, 0]
    assert OneDepth(4).depths[OneDepth(4).choose(9)] == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["medusa", "eagle3", "model"])
@pytest.mark.parametrize("told", [dict(adaptive=True), dict(num_speculative_tokens_per_batch_size={1: 4, 2: 1, 3: 0})])
def test_outputs_are_those_of_plain_decoding(name, told, device):
    target = llama().to(device)
    head = make(name, target).to(device)
    speculative = {"model": head, "num_speculative_tokens": 4} | told
    plain, llm = LLM(target, max_num_seqs=1), LLM(target, max_num_seqs=3, speculative_config=speculative)
    steps = llm.engine.graphs.steps
    assert [step.tree.max_depth for step in steps] == ([4, 2, 1, 0] if "adaptive" in told else [4, 1, 0])
    used, run_graph = set(), llm.engine.graphs.run

    def watched(seats, filters, which=0, known=None):
        used.add(steps[which].tree.max_depth)
        return run_graph(seats, filters, which, known)

    llm.engine.graphs.run = watched
    for temperature in (0.0, 0.8):
        expected = outputs(plain, temperature, count=5)  # by three: at the end two are left
        for _ in range(2):
            assert outputs(llm, temperature, count=5) == expected
    assert len(used) > 1
    llm.engine.check()


def test_under_a_ratio_rule_steps_without_drafts_emit_the_targets_own_tokens():
    target = llama()
    told = {"num_speculative_tokens_per_batch_size": {1: 0, 9: 3}, "verifier": "token"}
    llm = LLM(target, speculative_config={"model": make("medusa", target), **told})
    assert outputs(llm, 0.8) == outputs(LLM(target), 0.8)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (dict(adaptive=1), "speculative_config['adaptive'] must be True or False, got 1"),
        (dict(num_speculative_tokens_per_batch_size={2: 1}), "1 among the batch sizes"),
        (dict(num_speculative_tokens_per_batch_size={1: 9}), "tokens from 0 to the tree's 4, got {1: 9}"),
        (dict(num_speculative_tokens_per_batch_size=[1]), "must be a dict"),
        (dict(num_speculative_tokens_per_batch_size={1: 2}, adaptive=True), "give one of them"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(told, message):
    target = llama()
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(target, speculative_config={"model": make("medusa", target)} | told)


class Recording(OneDepth):
    """Keeps what it is told of steps: their cost, and how many drafted tokens each request could use."""

    measures = True

    def __init__(self, depth):
        super().__init__(depth)
        self.seconds, self.accepted = [], []

    def record(self, num_requests, place, seconds, accepted, confidence):
        self.seconds += [] if seconds is None else [seconds]
        self.accepted.append(accepted)


def test_a_plan_is_told_how_many_drafted_tokens_each_request_could_use():
    target = llama()
    for name, told in (("target", [[3, 3], [2, 2]]), ("mlp", [[0, 0]] * 7)):  # all that fit are right, and none
        speculative = {"model": make(name, target), "num_speculative_tokens": 3}
        llm = LLM(target, max_num_seqs=2, speculative_config=speculative)
        llm.engine.plan = Recording(3)
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=8))  # one of them the prompt's
        assert llm.engine.plan.accepted == told
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, speculate=False))
        assert llm.engine.plan.accepted[len(told) :] == [[]] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_what_capturing_a_graph_takes_is_no_cost_of_a_step(late):
    target, recorded = llama(), []
    for capturing in ((), (3, 6)):
        llm = LLM(target, speculative_config={"model": make("mlp", target)})
        graphs, llm.engine.plan, llm.engine.steps_late, calls = llm.engine.graphs, Recording(4), late, []

        def run_graph(*given, run=graphs.run, graphs=graphs, calls=calls, capturing=capturing):
            calls.append(given)
            graphs.num_captures += len(calls) in capturing
            return run(*given)

        graphs.run = run_graph
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=12))
        recorded.append(len(llm.engine.plan.seconds))
    assert recorded[1] == recorded[0] - 2 > 0


def test_what_a_reader_takes_between_two_tokens_is_no_cost_of_a_step(monkeypatch):
    target, clock = llama(), iter(range(10**6))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(clock))
    llm = LLM(target, speculative_config={"model": make("mlp", target)})
    llm.engine.plan = Recording(4)
    for _ in llm.stream([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12)):
        for _ in range(1000):
            next(clock)
    assert len(llm.engine.plan.seconds) > 3
    assert max(llm.engine.plan.seconds) < 100


def test_beside_prompts_the_depth_is_taken_that_costs_least_a_token():
    plan = Adaptive(DEPTHS, [1, 64])
    dear, cheap = {2: 5.0, 4: 2.0}, {2: 2.5, 4: 2.0}  # places of the depths 2 and 0: seconds
    assert plan.best_beside(64, dear) == 2, "nothing is known of the acceptance"
    for _ in range(2):
        plan.record(64, 2, None, [0, 0, 1, 2] * 16)  # half of the paths get to depth 1, a quarter to depth 2
    assert plan.best_beside(64, dear) == 4, "2.5 times the seconds for 1.75 times the tokens"
    assert plan.best_beside(64, cheap) == 2
    assert [plan.choose_beside(64, dear) for _ in range(2 * PROBE_EVERY)].count(2) == 2, "the greatest is tried again"
    assert all(average.count == 0 for average in plan.seconds.values()), "no step without prompts was needed"
