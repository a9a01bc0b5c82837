"""`headstart bench kernel rules`: time every verifier from the target's logits to the verdict, filters included.

    trees of 64 nodes (fewer rows: one smaller tree)     strict, recursive, traversal
    chains of 5 nodes                                    strict, token, block

Two lines each: with only a temperature, and *cut*, with temperature, top-k and top-p. Drawing the drafts is not included. The
floor is reading the logits once.
"""

import torch

from ...inference.engine.seats import FLOATS, INTEGERS, SeatTable
from ...inference.engine.target_scores import CUT, NO_FILTERS, TargetScores, draft_scores
from ...inference.speculation.draw_nodes import NodeDraws
from ...inference.speculation.tree import MAX_NODES, chain
from ...inference.speculation.tree_on_device import TreeOnDevice
from ...inference.speculation.verifiers import Ratio, Strict
from ..shape import best_tree

TREE_RULES, CHAIN_RULES = ("strict", "recursive", "traversal"), ("strict", "token", "block")
CHAIN = 5  # nodes
SAMPLED = {"committed": 10, "remaining": 1 << 20, "top_k": 50, "seed": 1}
LAW = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.0}


def bench_rules(bench):
    """All rules at every number of rows from CHAIN on; bench: kernel.KernelBench."""
    for rows in bench.settings.rows:
        if not CHAIN <= rows <= 1024:
            continue
        nodes = min(rows, MAX_NODES)
        for topology, batch, names in (
            (best_tree(nodes), rows // nodes, TREE_RULES),
            (chain(CHAIN - 1), rows // CHAIN, CHAIN_RULES),
        ):
            for name in names:
                for filters in (NO_FILTERS, CUT):
                    _line(bench, name, topology, batch, filters)


def _line(bench, name, topology, batch, filters):
    device, vocab, tree = bench.device, bench.sizes.vocab, TreeOnDevice.of(topology, bench.device)
    seats = SeatTable(batch, 2, 16, vocab, bench.dtype, device)
    seats.integers[:batch] = torch.tensor([SAMPLED.get(column, 0) for column in INTEGERS], device=device)
    seats.floats[:batch] = torch.tensor([LAW.get(column, 0.0) for column in FLOATS], device=device)
    requests = seats.gather(torch.arange(batch, device=device), tree.depths)
    logits = bench.random(batch * tree.num_nodes, vocab, scale=3)
    distributions = bench.random(tree.max_depth, batch, vocab, scale=3), requests.temperature, None
    if filters:
        distributions = draft_scores(
            requests, filters, seats, tree.max_depth, distributions[0], torch.arange(tree.max_depth, device=device)
        )
    draft = NodeDraws(tree, "sampled")(requests, *distributions)
    tokens, verifier = draft.tokens.clamp(min=0), Strict() if name == "strict" else Ratio(name)

    def ours():
        return verifier(tree, draft, TargetScores(requests, logits, filters, seats, drafted=tokens))

    what = f"{name}, {batch} x {tree.num_nodes}{', cut' if filters else ''}"
    bench.line("rules", what, len(logits), ours, None, logits.nbytes)
