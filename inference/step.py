"""One engine step as tensor operations of fixed shape: draft -> verify -> commit, all on the device.

Nothing here waits for the device, so on a GPU the whole step is captured as one CUDA graph (graphs.py); on the CPU it is simply
called. Plain decoding is a tree of one node.

Letters: B requests, N nodes per request, M = B N rows, D the tree's depth, H hidden, V vocabulary, L committed length.
"""

from dataclasses import dataclass

import torch

from ..kernels.keep_top import keep_top
from ..kernels.kv_commit import kv_commit
from ..kernels.sample import sample_tokens
from ..kernels.tree_attention import build_tree_index
from .decoder import ForwardPass
from .verify import Ratio

# Sorting the vocabulary takes some 30 bytes per row and token: so many rows are filtered at once.
FILTERED_ROWS = 256


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves behind for the host."""

    emitted: torch.Tensor  # [B, D + 2] how many tokens were emitted, they, zeros
    path: torch.Tensor  # [B, D + 1] the accepted node at each depth
    logits: torch.Tensor  # [B, N, V] of the target


class Step:
    """draft -> verify -> commit for the requests of some slots.

    decoder: Decoder; cache: PagedCache; slots: SlotTable; tree: TreeTensors; verifier: a rule of verify.py; drafter: None if the
    tree is the root alone.
    """

    def __init__(self, decoder, cache, slots, tree, verifier, drafter=None):
        self.decoder, self.cache, self.slots = decoder, cache, slots
        self.tree, self.verifier, self.drafter = tree, verifier, drafter

    @torch.no_grad()
    def __call__(self, rows, filtered=False):
        """Advance the requests in slots `rows` [B]; filtered: some of them use top_k, top_p or min_tokens.  -> StepOutput"""
        tree, by_ratio = self.tree, isinstance(self.verifier, Ratio)
        batch = self.slots.gather(rows, tree.depths)
        if by_ratio:
            draft = self.drafter.draft(batch, tree, filtered)
            tokens = draft.tokens.clamp(min=0)  # an empty slot is computed as any token would be, and never accepted
        else:
            tokens = self.drafter.propose(batch, tree) if tree.max_depth else batch.root[:, None]  # [B, N]
        hidden = self.forward(batch, tokens)  # [M, H]
        logits = self.decoder.logits(hidden)  # [M, V]
        if by_ratio:
            laws = target_scores(batch, logits, filtered, self.slots)
            path, num_accepted, bonus = self.verifier(tree, draft, *laws, batch)
        else:
            target_tokens = draw(batch, logits, filtered, self.slots).view(tokens.shape)
            path, num_accepted, bonus = self.verifier(tree, tokens, target_tokens, batch)
        # Commit: accepted nodes move to the positions behind the committed ones; the bonus token is the next root.
        if not tree.tree.is_chain:
            hk = self.cache.num_kv_heads
            kv_commit(self.cache.kv, batch.block_table, batch.committed, path, num_accepted, hk)
        emitted = self.slots.advance(rows, hidden, tokens, path, num_accepted, bonus)
        return StepOutput(emitted, path, logits.view(*tokens.shape, -1))

    def forward(self, batch, tokens):
        """The target over all nodes.  tokens [B, N] -> hidden [M, H]; writes the nodes' KV at places L + n"""
        tree, hk = self.tree, self.cache.num_kv_heads
        index = build_tree_index(
            batch.block_table, batch.committed, tree.depths, tree.ancestors, hk, self.decoder.dtype
        )
        forward_pass = ForwardPass(tokens.flatten(), batch.positions, batch.cache_slots, index)
        return self.decoder.forward(forward_pass, self.cache.kv)


def draw(batch, logits, filtered, slots):
    """The target's own token behind every node: at L + depth + 1 for a node of that depth.  logits [M, V] -> [M]"""
    temperature, (seed, sample, position) = batch.node_temperature, batch.draws
    if not filtered:
        return sample_tokens(logits, temperature, seed, sample, position)
    return torch.cat(
        [
            sample_tokens(scores, noisy, seed[block], sample[block], position[block])
            for block, scores, noisy in filtered_scores(batch, logits, slots)
        ]
    )


def target_scores(batch, logits, filtered, slots):
    """Scores and temperature whose law (kernels/row_laws.py) is the target's behind every node.  [M, V] -> [M, V], [M]"""
    if not filtered:
        return logits, batch.node_temperature
    _, scores, noisy = zip(*filtered_scores(batch, logits, slots))
    return torch.cat(scores), torch.cat(noisy)


def filtered_scores(batch, logits, slots):
    """Some rows at a time: which, their scores after min_tokens, temperature, top-k and top-p, and 1 where they are drawn from."""
    temperature, position = batch.node_temperature, batch.draws[2]
    of_nodes = (len(batch.slots), position.shape[0] // len(batch.slots))

    def per_node(x):
        return x[:, None].expand(of_nodes).flatten()

    early = position < per_node(batch.min_position)  # [M]
    slot, top_k, top_p = per_node(batch.slots), per_node(batch.top_k), per_node(batch.top_p)
    for block in torch.arange(len(position), device=position.device).split(FILTERED_ROWS):
        forbidden = early[block, None] & slots.stop_mask[slot[block]]
        scores = logits[block].masked_fill(forbidden, -torch.inf)
        scores = keep_top(scores, temperature[block], top_k[block], top_p[block])
        # The scores are divided already; 1 and 0 only say where noise is wanted.
        yield block, scores, (temperature[block] > 0).to(temperature.dtype)
