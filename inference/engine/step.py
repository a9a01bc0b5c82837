"""One engine step as tensor operations of fixed shape: draft -> verify -> commit, all on the device.

Nothing here waits for the device, so on a GPU the whole step is captured as one CUDA graph (graphs.py); on the CPU it is simply
called. Plain decoding is a tree of one node.

Letters: B requests, N nodes per request, M = B N rows, D the tree's depth, H hidden, V vocabulary, L committed length.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.attention.kv_commit import kv_commit
from ...kernels.attention.tree_attention import build_tree_index
from ...kernels.jit import on_triton
from ...kernels.sampling.keep_top import keep_top, kept_scores, scale
from ...kernels.sampling.process_logits import NodeRows, process_logits
from ...kernels.sampling.sample import sample_tokens
from ...kernels.sampling.sample_kept import sample_kept
from ..models.decoder import ForwardPass
from ..speculation.verify import Ratio
from .sampling import CUT, NO_FILTERS

# What a row's filters leave behind takes up to 8 bytes per token: so many rows are drawn from at once.
FILTERED_ROWS = 1024


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves behind for the host."""

    emitted: torch.Tensor  # [B, D + 2] how many tokens were emitted, they, zeros
    path: torch.Tensor  # [B, D + 1] the accepted node at each depth
    logits: torch.Tensor  # [B, N, V] of the target
    scores: torch.Tensor | None  # fp32 [B, D + 1, V] that the path's tokens were drawn from, where they are kept


class Step:
    """draft -> verify -> commit for the requests of some slots.

    decoder: Decoder; cache: PagedCache; slots: SlotTable; tree: TreeTensors; verifier: a rule of verify.py; drafter: None if the
    tree is the root alone. keep_scores: also give back the scores that tokens were drawn from (4 bytes per row and token).
    """

    def __init__(self, decoder, cache, slots, tree, verifier, drafter=None, keep_scores=False):
        self.decoder, self.cache, self.slots = decoder, cache, slots
        self.tree, self.verifier, self.drafter, self.keep_scores = tree, verifier, drafter, keep_scores

    @torch.no_grad()
    def __call__(self, rows, filters=NO_FILTERS):
        """Advance the requests in slots `rows` [B]; filters: the most that one of them needs (sampling.py).  -> StepOutput"""
        tree, drafter, by_ratio = self.tree, self.drafter, isinstance(self.verifier, Ratio)
        batch = self.slots.gather(rows, tree.depths)
        if tree.max_depth:
            draft = drafter.propose(batch, tree, self._shape_drafts(batch, filters))
            if draft.topology is not None:
                tree = draft.topology
                batch = batch.at_depths(tree.depths)
            # An empty slot is computed as any token would be, and accepted only where that token is right.
            tokens = draft.tokens.clamp(min=0)  # [B, N]
        else:
            tokens = batch.root[:, None]
        hidden, feature = self.forward(batch, tokens, tree)  # [M, H], [M, F]
        logits = self.decoder.logits(hidden)  # [M, V]
        scores = torch.empty_like(logits, dtype=torch.float32) if self.keep_scores else None
        drafted = path_tokens(tokens, tree) if filters and self.slots.logit_state.num_tables else None
        if by_ratio:
            laws = target_scores(batch, logits, filters, self.slots, drafted, scores)
            path, num_accepted, bonus = self.verifier(tree, draft, batch, *laws)
        else:
            target_tokens = draw(batch, logits, filters, self.slots, drafted, scores).view(tokens.shape)
            path, num_accepted, bonus = self.verifier(tree, tokens, target_tokens, batch)
        # Commit: accepted nodes move to the positions behind the committed ones; the bonus token is the next root.
        if not tree.tree.is_chain:
            hk = self.cache.num_kv_heads
            kv_commit(self.cache.kv, batch.block_table, batch.committed, path, num_accepted, hk)
        own_state = drafter is not None and drafter.state_shape is not None
        emitted = self.slots.advance(rows, None if own_state else feature, tokens, path, num_accepted, bonus)
        if own_state:
            self.slots.feature[rows] = drafter.advance(batch, feature, emitted, path, num_accepted)
        if filters:
            self.slots.logit_state.record(rows, emitted)
        if scores is not None:
            scores = scores.view(*tokens.shape, -1)[torch.arange(len(path), device=path.device)[:, None], path]
        return StepOutput(emitted, path, logits.view(*tokens.shape, -1), scores)

    def _shape_drafts(self, batch, filters):
        """What a drafter passes its logits through: draft_scores of this batch, None where a temperature is all there is."""
        return partial(draft_scores, batch, filters, self.slots, self.tree.max_depth) if filters else None

    def forward(self, batch, tokens, tree):
        """The target over all nodes.  tokens [B, N] -> hidden [M, H], feature [M, F]; writes the nodes' KV at places L + n"""
        hk = self.cache.num_kv_heads
        index = build_tree_index(
            batch.block_table, batch.committed, tree.depths, tree.ancestors, hk, self.decoder.dtype
        )
        forward_pass = ForwardPass(tokens.flatten(), batch.positions, batch.cache_slots, index)
        return self.decoder.forward(forward_pass, self.cache.kv, self.drafter.streams if self.drafter else ())


def path_tokens(tokens, tree):
    """The drafted tokens on every node's path, its own included, -1 behind it.  tokens [B, N] -> [B N, D]"""
    depth = torch.arange(1, tree.max_depth + 1, device=tokens.device)
    on_path = depth <= tree.depths[..., None]  # [N, D] or [B, N, D]
    nodes = tree.ancestors[..., 1:].expand(len(tokens), -1, -1)
    found = tokens.gather(1, nodes.flatten(1)).view(nodes.shape)
    return torch.where(on_path, found, -1).flatten(0, 1)


def draft_scores(batch, filters, slots, max_depth, logits, depths):
    """Scores of drafts whose softmax is the law they are drawn from (temperature 0: whose best token is drawn).

    Of K nodes at depths [K], all below max_depth: logits [K, B, V] -> fp32 [K, B, V], temperature to draw with [B], the Kept [K B]
    on a GPU.

    The output counts up to the root: what the draft itself says on its way is not looked at.
    """
    (count, requests), device = logits.shape[:2], logits.device
    request = torch.arange(requests, device=device).repeat(count)
    position = (batch.committed + 1 + depths[:, None]).flatten()
    unknown = torch.full((len(request), max_depth), -1, device=device)
    changed = _changed(batch, logits.flatten(0, 1), filters, slots, request, position, unknown)
    heat = batch.temperature.repeat(count)
    kept = keep_top(changed, heat, *_filters(batch, request)) if filters >= CUT else None
    scores = scale(changed, heat) if kept is None else kept_scores(kept)
    # The scores are divided already; 1 and 0 only say where noise is wanted.
    noisy = (batch.temperature > 0).to(batch.temperature.dtype)
    return scores.view(logits.shape), noisy, kept if on_triton(logits) else None


def _of_nodes(batch, logits, filters, slots, path, part):
    """What nodes `part` (a slice) of the M are drawn from: scores as the request changes them, their temperature, what is kept of
    them if they are cut.  logits [M, V] -> [R, V], [R], Kept or None"""
    position, temperature = batch.draws[2][part], batch.node_temperature[part]
    request = torch.arange(len(batch.slots), device=logits.device)
    request = request[:, None].expand(-1, len(logits) // len(request)).flatten()[part]
    path = request.new_empty(len(request), 0) if path is None else path[part]
    scores = _changed(batch, logits[part], filters, slots, request, position, path)
    if filters < CUT:
        return scores, temperature, None
    return scores, temperature, keep_top(scores, temperature, *_filters(batch, request))


def _filters(batch, request):
    """Top-k, top-p and min-p of rows that belong to these requests."""
    return batch.top_k[request], batch.top_p[request], batch.min_p[request]


def _changed(batch, logits, filters, slots, request, position, path):
    """Scores of rows [R, V] that belong to these requests, stand at these positions [R] and have these tokens behind the root."""
    if not filters or not slots.logit_state.num_tables:
        return logits
    nodes = NodeRows(
        slot=batch.slots[request],
        root=batch.committed[request],
        position=position,
        min_position=batch.min_position[request],
        repetition=batch.repetition_penalty[request],
        presence=batch.presence_penalty[request],
        frequency=batch.frequency_penalty[request],
        path=path,
    )
    return process_logits(logits, nodes, slots.logit_state.tables)


def draw(batch, logits, filters, slots, path=None, processed=None):
    """The target's own token behind every node: at L + depth + 1 for a node of that depth.  logits [M, V] -> [M]

    path [M, D]: path_tokens, where the rows are nodes of a tree; processed: None, or fp32 [M, V] to be filled with the scores
    the tokens are drawn from, before the noise.
    """
    keys = batch.draws
    if not filters and processed is None:
        return sample_tokens(logits, batch.node_temperature, *keys)
    tokens = []
    for start in range(0, len(logits), FILTERED_ROWS):
        part = slice(start, start + FILTERED_ROWS)
        scores, temperature, kept = _of_nodes(batch, logits, filters, slots, path, part)
        noise = [x[part] for x in keys]
        drawn = sample_tokens(scores, temperature, *noise) if kept is None else sample_kept(kept, *noise)
        if processed is not None:
            processed[part] = scale(scores, temperature) if kept is None else kept_scores(kept)
        tokens.append(drawn)
    return torch.cat(tokens)


def target_scores(batch, logits, filters, slots, path=None, processed=None):
    """Scores and temperature whose law (kernels/speculation/row_laws.py) is the target's behind every node.  [M, V] -> [M, V],
    [M], Kept

    path and processed: as for draw. On a GPU, where laws are cut, the law is that of what is kept; else that is None.
    """
    scores, temperature, kept = _of_nodes(batch, logits, filters, slots, path, slice(0, len(logits)))
    if processed is not None:
        processed.copy_(scale(scores, temperature) if kept is None else kept_scores(kept))
    if kept is None or on_triton(logits):
        return scores, temperature, kept
    return kept_scores(kept), (temperature > 0).to(temperature.dtype), None
