"""Mutants of the block drafter are caught: a wrong draft changes no output, so drafts are compared with the head's predictions."""

from copy import deepcopy

import pytest

from headstart.heads.block import BlockHead
from headstart.heads.block_parts import Convolution
from headstart.inference.llm import LLM
from headstart.inference.speculation.drafters import block as block_module, block_pass
from headstart.inference.speculation.drafters.block import CorrectedDrafter
from headstart.inference.speculation.drafters.block_pass import BlockPass
from headstart.inference.speculation.tree import Tree, save_tree
from headstart.tests.inference.speculation.draft_cases import BLOCK, SCALES
from headstart.tests.inference.speculation.draft_matrix import build, draft, make_head, make_prompts, make_target
from headstart.tests.inference.speculation.test_draft_matrix import check_drafts


def reads_another_parent(monkeypatch):
    right = CorrectedDrafter._after
    monkeypatch.setattr(CorrectedDrafter, "_after", lambda self, tokens, depth: right(self, tokens.roll(1, 1), depth))


def reads_the_root_alone(monkeypatch):
    right, of = CorrectedDrafter._after, {}

    def after(self, tokens, depth):
        of["root"] = tokens if depth == 0 else of["root"]
        return right(self, of["root"].expand_as(tokens), depth)

    monkeypatch.setattr(CorrectedDrafter, "_after", after)


def takes_the_next_depth(monkeypatch):
    right = CorrectedDrafter._after
    monkeypatch.setattr(CorrectedDrafter, "_after", lambda self, tokens, depth: right(self, tokens, min(depth + 1, 2)))


def puts_context_one_late(monkeypatch):
    right = BlockPass._project
    late = lambda self, feature, positions, cache_rows: right(self, feature, positions + 1, cache_rows)  # noqa: E731
    monkeypatch.setattr(BlockPass, "_project", late)


def sees_the_neighbour_s_block(monkeypatch):
    right = block_pass.build_tree_index
    monkeypatch.setattr(
        block_pass, "build_tree_index", lambda table, *rest, **named: right(table.roll(1, 0), *rest, **named)
    )


def chooses_among_one_too_few(monkeypatch):
    right = block_module.top_tokens
    fewer = lambda logits, width, *keys, **named: right(logits, width - 1, *keys, **named)  # noqa: E731
    monkeypatch.setattr(block_module, "top_tokens", fewer)


def convolves_across_requests(monkeypatch):
    right = block_pass.block_convolution
    monkeypatch.setattr(block_pass, "block_convolution", lambda x, *kernel: right(x, *kernel[:2], x.shape[-2]))


def convolves_with_one_side_s_corrections(monkeypatch):
    right = Convolution.corrections
    monkeypatch.setattr(Convolution, "corrections", lambda self, projected: 2 * right(self, projected)[:1])


def forgets_the_scales(monkeypatch):
    monkeypatch.setattr(BlockHead, "scaled", lambda self, logits: logits)


MUTANTS = (
    reads_another_parent,
    reads_the_root_alone,
    takes_the_next_depth,
    puts_context_one_late,
    sees_the_neighbour_s_block,
)
OF_DFLASH2 = (chooses_among_one_too_few, convolves_across_requests, convolves_with_one_side_s_corrections)
EDGE, DFLASH2 = dict(edge_rank=8), dict(selector_rank=8, selector_top_k=5, conv_kernel_size=2)


@pytest.mark.parametrize(
    ("parts", "mutate"),
    [
        *((EDGE, one) for one in (None, *MUTANTS)),
        *((DFLASH2, one) for one in (None, *MUTANTS[:3], *OF_DFLASH2)),
        *((parts | SCALES, one) for parts in (EDGE, DFLASH2) for one in (None, forgets_the_scales)),
    ],
)
def test_mutants_draft_something_else_than_the_head_predicts(monkeypatch, tmp_path, parts, mutate):
    target = make_target("cpu", 2)
    head = make_head(BlockHead, target, embedding="target's", **parts, **BLOCK)
    taught = deepcopy(head)  # training's forward is not mutated
    tree = Tree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 1, 0, 0))
    save_tree(tree, tmp_path / "tree.json")
    with monkeypatch.context() as patch:
        if mutate is not None:
            mutate(patch)
        llm = build(LLM(target.model, max_num_seqs=2), head, str(tmp_path / "tree.json"))
        found = draft(llm, make_prompts((1, 9)))
    if mutate is None:
        check_drafts(target, taught, llm.tree, *found)
        return
    with pytest.raises(AssertionError):
        check_drafts(target, taught, llm.tree, *found)
