"""Choosing a tree: from rates and costs, against trying all trees and against numpy's least squares; and the command."""

import itertools
import json
import math
import random
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from headstart.cli import main
from headstart.evaluation import tree_choice, tree_measurement
from headstart.evaluation.acceptance import rank_hits
from headstart.evaluation.compare import candidate_trees
from headstart.evaluation.tree_choice import (
    StepCosts,
    Timing,
    best_static_trees,
    choose_promise,
    dynamic_candidates,
    other_sizes,
    promises,
)
from headstart.evaluation.tree_text import choice_sentence
from headstart.heads.checkpoint import save_head
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.inference.llm import LLM
from headstart.inference.speculation.tree import GrowingTree, Tree, load_tree
from headstart.train.report.report import write_report

RATES = [[0.6, 0.25], [0.3, 0.5], [0.55, 0.05]]  # at the second depth the second candidate is better


def all_trees(rates, depth=0):
    """Every tree below a node at this depth: a set of rank paths each."""
    if depth == len(rates):
        yield frozenset()
        return
    below = [None, *all_trees(rates, depth + 1)]
    for children in itertools.product(below, repeat=len(rates[depth])):
        yield frozenset(
            path
            for rank, child in enumerate(children)
            if child is not None
            for path in [(rank,), *((rank, *rest) for rest in child)]
        )


def test_the_choice_is_the_fastest_of_all_trees_there_are():
    trees = [paths for paths in all_trees(RATES) if paths]
    assert len(trees) == 675
    dice, sizes, shapes = random.Random(0), range(2, 16), set()
    for _ in range(100):
        seconds = list(itertools.accumulate(dice.expovariate(8) for _ in sizes))
        batch, costs = dice.randrange(1, 9), StepCosts(dice.expovariate(3), tuple(sizes), tuple(1 + s for s in seconds))

        def rate(paths):
            length = 1 + sum(math.prod(RATES[d][rank] for d, rank in enumerate(path)) for path in paths)
            step = costs.seconds_per_level * max(map(len, paths)) + 1 + seconds[len(paths) - 1]  # noqa: B023
            return batch * length / step  # noqa: B023

        best = choose_promise(promises(best_static_trees(RATES), RATES, costs, batch))
        assert best.tokens_per_second == pytest.approx(max(map(rate, trees)), rel=1e-12)
        shapes.add((best.depth, best.num_nodes))
    assert len({depth for depth, _ in shapes}) == 3, "the costs must matter"
    assert len(shapes) >= 10


def test_costs_are_the_least_squares_of_a_level_and_a_size():
    dice, sizes = random.Random(1), (2, 5, 9, 16)
    timings = [
        Timing(depth, size, 0.3 * depth + size + dice.gauss(0, 0.05))
        for size in sizes
        for depth in (1, 2, 4)
        if depth < size
    ]
    costs = StepCosts.fit(timings)
    columns = [[t.depth, *(float(t.num_nodes == size) for size in sizes)] for t in timings]
    expected = np.linalg.lstsq(np.array(columns), np.array([t.seconds for t in timings]), rcond=None)[0]
    assert [costs.seconds_per_level, *costs.seconds] == pytest.approx(expected, rel=1e-9)
    assert costs.of(3, 9) == pytest.approx(3 * expected[0] + expected[3])
    assert costs.of(0, 6) == pytest.approx(0.75 * expected[2] + 0.25 * expected[3])
    assert costs.of(0, 64) == pytest.approx(expected[4])
    assert costs.of(0, 1) == pytest.approx(expected[1])


def test_no_node_and_no_level_costs_less_than_nothing():
    costs = StepCosts.fit([Timing(3, 8, 1.0), Timing(1, 8, 2.0), Timing(2, 4, 3.0), Timing(2, 16, 1.8)])
    assert costs.seconds_per_level == 0
    assert costs.sizes == (4, 8, 16)
    # 3, 1.5 (twice), 1.8: all fall, so all are their mean.
    assert costs.seconds == pytest.approx([(3.0 + 2 * 1.5 + 1.8) / 4] * 3)
    assert StepCosts.fit([Timing(2, 4, 1.0), Timing(2, 16, 3.0)]).seconds == (1.0, 3.0)
    with pytest.raises(ValueError, match="no step was timed"):
        StepCosts.fit([])


def test_a_draft_that_is_never_right_is_refused():
    with pytest.raises(ValueError, match="there is no tree to build"):
        best_static_trees([[0.0, 0.0], [0.5]])


def test_dynamic_trees_to_try_can_leave_nodes_out():
    assert {tree.width for tree in dynamic_candidates(2, 8, 5, most=5)} == {2, 4}
    assert [(t.max_depth, t.width, t.num_nodes) for t in dynamic_candidates(2, 8, 5)] == [
        (2, 4, 8),
        (2, 8, 8),
        (5, 2, 8),
        (5, 4, 8),
        (5, 8, 8),
    ]
    for depth, nodes, most in itertools.product((1, 2, 6), (2, 9, 64), (1, 6, 8)):
        for tree in dynamic_candidates(depth, nodes, most):
            assert tree.max_depth > 1  # every confidence decides something
            assert (
                tree.num_nodes <= tree.num_candidates
            )  # at least one candidate is left out (the root is not a candidate)
            for other in other_sizes(tree):
                assert (other.max_depth, other.width) == (tree.max_depth, tree.width)
                assert tree.num_nodes != other.num_nodes <= other.num_candidates
    assert [tree.num_nodes for tree in other_sizes(GrowingTree(4, 4, 16))] == [8, 32]
    assert [tree.num_nodes for tree in other_sizes(GrowingTree(2, 2, 2))] == [4]
    assert [tree.num_nodes for tree in other_sizes(GrowingTree(6, 8, 64))] == [32]


def test_rates_behind_a_second_choice_count_where_candidates_do_not_depend_on_it():
    request = SimpleNamespace(output_token_ids=[0, 1, 2, 3])
    recorded = [(request, 0, [[1, 9], [8, 2], [3, 7]])]
    hits, places = rank_hits(recorded, 3)
    assert [row[:2] for row in hits] == [[1, 0], [0, 1], [1, 0]]
    assert places == [1, 1, 1]
    hits, places = rank_hits(recorded, 3, first_choices_only=True)
    assert [row[:2] for row in hits] == [[1, 0], [0, 1], [0, 0]]
    assert places == [1, 1, 0]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tree_measurement, "SIZES", (2, 6))
    monkeypatch.setattr(tree_measurement, "LEVEL_SIZES", (6,))
    monkeypatch.setattr(tree_measurement, "CPU_ROUNDS", 1)
    monkeypatch.setattr(tree_measurement, "NUM_PROMPTS", 2)
    monkeypatch.setattr(tree_measurement, "MAX_TOKENS", 12)
    monkeypatch.setattr(tree_measurement, "TIMED_STEPS", 10)
    # So wide that nodes can be left out of any static tree that the timing may choose.
    monkeypatch.setattr(tree_choice, "DYNAMIC_WIDTHS", (8,))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"tell me {i}"}) + "\n" for i in range(4)))
    return ["--prompts", str(path), "--num-prompts", "4"]


@pytest.fixture(scope="module")
def eagle_folder(target_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle") / "run" / "head"
    config = EagleConfig.for_target(LlamaConfig.from_pretrained(target_folder), num_speculative_tokens=3)
    head = Eagle(config)
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_head(head, folder)
    (folder.parent / "config.yaml").write_text(f"target: {target_folder}\n")
    return folder


def check_file(path, batch, methods):
    """Check that the file is consistent.  -> (tree, content)"""
    tree, content = load_tree(path), json.loads(path.read_text())
    choice, chosen = content["choice"], content["choice"]["chosen"]
    assert choice["batch_size"] == batch
    assert (chosen["num_nodes"], chosen["depth"]) == (tree.num_nodes, tree.max_depth)
    assert chosen["draft"] == ("dynamic" if isinstance(tree, GrowingTree) else "static")
    drafts = Counter(trial["draft"] for trial in choice["trials"])
    assert set(drafts) == methods
    assert drafts["none"] == drafts["static"] == 1
    assert chosen["tokens_per_second"] == max(t["tokens_per_second"] for t in choice["trials"][1:])
    timed = {(step["depth"], step["num_nodes"]) for step in choice["timed_steps"]}
    assert (choice["best_static"]["depth"], choice["best_static"]["num_nodes"]) in timed
    assert max(point["tokens_per_second"] for point in choice["curve"]) == choice["best_static"]["tokens_per_second"]
    assert [point["num_nodes"] for point in choice["curve"]] == list(range(2, len(choice["curve"]) + 2))
    assert choice["plain_step_seconds"] > 0
    return tree, content


def test_command_chooses_a_tree_for_medusa_heads(target_folder, head_folder, prompts, quick, tmp_path, capsys):
    output = tmp_path / "tree.json"
    assert main(["tree", str(head_folder), "--model", str(target_folder), *prompts, "--output", str(output)]) == 0
    _, content = check_file(output, 1, {"none", "static", "dynamic"})
    assert len(content["rates"]) == 3
    printed = capsys.readouterr()
    assert choice_sentence(content["choice"]) in printed.out
    for step in ("measuring acceptance", "timing steps", "trying the choice"):
        assert step in printed.err


def test_command_tries_dynamic_trees_for_an_eagle_head_and_the_report_explains(
    target_folder, eagle_folder, prompts, quick, capsys
):
    run = eagle_folder.parent
    arguments = ["tree", str(run), *prompts, "--num-speculative-tokens", "2", "--budget", "auto", "--batch-size", "3"]
    assert main(arguments) == 0
    tree, content = check_file(run / "tree.json", 3, {"none", "static", "dynamic"})
    assert len(content["rates"]) == 2
    assert max(point["depth"] for point in content["choice"]["curve"]) <= 2
    llm = LLM(str(target_folder), speculative_config={"model": str(run), "tree": "static"})
    assert llm.tree == tree
    plain = LLM(str(target_folder))
    outputs = [x.generate(["tell me more"])[0].outputs[0].token_ids for x in (llm, plain)]
    assert outputs[0] == outputs[1]
    page = write_report(run).read_text()
    assert "Expected speed of the best static tree" in page
    assert 'class="marked"' in page
    if isinstance(tree, Tree):  # static or dynamic depends on speed
        other = 2 if tree.num_nodes == 3 else 3
        assert candidate_trees(3, run / "tree.json", [other], run)[2][0] == f"tree of {other}"


def test_command_measures_on_the_named_sets_of_a_run_in_turn(target_folder, head_folder, tmp_path, monkeypatch, capsys):
    run, taken = tmp_path / "run", []
    shutil.copytree(head_folder, run / "head")
    words = [("code", "a"), ("code", "b"), ("code", "c"), ("math", "d"), ("math", "e"), ("talk", "f")]
    lines = [json.dumps({"messages": [{"role": "user", "content": word}], "set": name}) for name, word in words]
    (run / "heldout.jsonl").write_text("\n".join(lines))

    def measure(llm, prompts, **_):
        taken.extend(prompt["prompt"] for prompt in prompts)
        raise ValueError("enough")

    monkeypatch.setattr("headstart.evaluation.acceptance.measure_acceptance", measure)
    monkeypatch.setattr(
        "headstart.inference.prompt_files.render_chat", lambda _, messages, tools: messages[0]["content"]
    )
    assert main(["tree", str(run), "--model", str(target_folder), "--num-prompts", "5"]) == 2
    assert "enough" in capsys.readouterr().err
    assert taken == ["a", "d", "f", "b", "e"]


def test_command_takes_a_model_that_drafts(target_folder, prompts, quick, tmp_path):
    output, depth = tmp_path / "tree.json", 2
    arguments = ["tree", str(target_folder), "--model", str(target_folder), *prompts, "--output", str(output)]
    assert main([*arguments, "--num-speculative-tokens", str(depth)]) == 0
    _, content = check_file(output, 1, {"none", "static", "dynamic"})
    # The target drafts for itself, so first choices are right, and no others are.
    assert [[rate for rate in ranks if rate] for ranks in content["rates"]] == [[1.0], [1.0]]
    assert content["choice"]["curve"][-1]["tokens_per_step"] == 3
    assert content["choice"]["chosen"]["acceptance_length"] > 1.5
