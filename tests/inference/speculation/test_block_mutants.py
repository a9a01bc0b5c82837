"""Mutants of the block drafter are caught: a wrong draft changes no output, so drafts are compared with the head's predictions."""

import pytest

from headstart.heads.block import BlockHead
from headstart.inference.llm import LLM
from headstart.inference.speculation.drafters import block_pass
from headstart.inference.speculation.drafters.block import EdgeDrafter
from headstart.inference.speculation.tree import Tree, save_tree
from headstart.tests.inference.speculation.draft_matrix import build, draft, make_head, make_prompts, make_target
from headstart.tests.inference.speculation.test_draft_matrix import BLOCK, check_drafts


def reads_another_parent(monkeypatch):
    right = EdgeDrafter._after
    monkeypatch.setattr(EdgeDrafter, "_after", lambda self, tokens, depth: right(self, tokens.roll(1, 1), depth))


def reads_the_root_alone(monkeypatch):
    right, of = EdgeDrafter._after, {}

    def after(self, tokens, depth):
        of["root"] = tokens if depth == 0 else of["root"]
        return right(self, of["root"].expand_as(tokens), depth)

    monkeypatch.setattr(EdgeDrafter, "_after", after)


def takes_the_next_depth(monkeypatch):
    right = EdgeDrafter._after
    monkeypatch.setattr(EdgeDrafter, "_after", lambda self, tokens, depth: right(self, tokens, min(depth + 1, 2)))


def puts_context_one_late(monkeypatch):
    right = EdgeDrafter._project
    late = lambda self, feature, positions, cache_rows: right(self, feature, positions + 1, cache_rows)  # noqa: E731
    monkeypatch.setattr(EdgeDrafter, "_project", late)


def sees_the_neighbour_s_block(monkeypatch):
    right = block_pass.build_tree_index
    monkeypatch.setattr(
        block_pass, "build_tree_index", lambda table, *rest, **named: right(table.roll(1, 0), *rest, **named)
    )


MUTANTS = (
    reads_another_parent,
    reads_the_root_alone,
    takes_the_next_depth,
    puts_context_one_late,
    sees_the_neighbour_s_block,
)


@pytest.mark.parametrize("mutate", [None, *MUTANTS])
def test_mutants_draft_something_else_than_the_head_predicts(monkeypatch, tmp_path, mutate):
    target = make_target("cpu", 2)
    head = make_head(BlockHead, target, edge_rank=8, embedding="target's", **BLOCK)
    if mutate is not None:
        mutate(monkeypatch)
    save_tree(Tree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0)), tmp_path / "tree.json")
    llm = build(LLM(target.model, max_num_seqs=2), head, str(tmp_path / "tree.json"))
    found = draft(llm, make_prompts((1, 9)))
    if mutate is None:
        check_drafts(target, head, llm.tree, *found)
        return
    with pytest.raises(AssertionError):
        check_drafts(target, head, llm.tree, *found)
