"""One engine step as tensor operations of fixed shape: draft -> verify -> commit, all on the device.

Nothing here waits for the device, so on a GPU the whole step is captured as one CUDA graph (graphs.py); on the CPU it is simply
called. Plain decoding drafts nothing: its tree is the root alone.

Letters: B requests, N nodes per request, M = B N rows, D the tree's depth, H hidden, V vocabulary, L committed length.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.attention.kv_commit import kv_commit
from ...kernels.attention.mixed_attention import MixedIndex
from ...kernels.attention.tree_attention import build_tree_index
from ..models.decoder import ForwardPass
from ..speculation.drafters.drafter import no_draft, rows_of
from .prompt_passes import KnownOutput
from .target_scores import NO_FILTERS, TargetScores, draft_scores, path_tokens

# So many known tokens stop before the last layer's MLP. Fewer cost little beside its weights, which a step reads for its own rows.
EARLY_FROM = 128


@dataclass(frozen=True)
class StepOutput:
    """Results of a step for the host."""

    emitted: torch.Tensor  # [B, D + 2] the number of emitted tokens, the tokens, zeros
    path: torch.Tensor  # [B, D + 1] the accepted node at each depth
    logits: torch.Tensor  # [B, N, V] of the target
    scores: torch.Tensor | None  # fp32 [B, D + 1, V] scores that the path's tokens were drawn from, where they are kept
    known: KnownOutput | None = None  # of the known tokens that were computed beside
    confidence: torch.Tensor | None = None  # see Draft


class Step:
    """draft -> verify -> commit for the requests of some seats.

    decoder: Decoder; cache: PagedCache; seats: SeatTable; tree: TreeOnDevice; verifier: one of verifiers.py; drafter: Drafter.
    keep_scores: also give back the scores that tokens were drawn from (4 bytes per row and token); logits: a buffer [rows, V] for
    the target's logits, shared by all graphs of an engine, or None. unfinished: Decoder.new_unfinished for known tokens, shared
    as well; None: all known tokens go through the whole last layer.
    """

    unfinished = None

    def __init__(self, decoder, cache, seats, *, tree, verifier, drafter, keep_scores=False, logits=None):
        self.decoder, self.cache, self.seats, self.logits = decoder, cache, seats, logits
        self.tree, self.drafter, self.keep_scores = tree, drafter, keep_scores
        self.verifier = verifier if tree.max_depth else verifier.undrafted

    @torch.no_grad()
    def __call__(self, rows, filters=NO_FILTERS, known=None):
        """Advance the requests in seats `rows` [B], and compute known tokens of others beside.  -> StepOutput

        filters: the most that any request needs (target_scores.py); known: KnownRows or None
        """
        batch = self.seats.gather(rows, self.tree.depths)
        # A step without drafts may belong to a drafter that drafts in other steps: its state is still kept up to date.
        propose = self.drafter.propose if self.tree.max_depth else no_draft
        draft = propose(batch, self.tree, self._processor(batch, filters))
        if self.tree.max_depth and self.decoder.ranks.size > 1:
            draft = draft.of_first(self.decoder.ranks)
        confidence = draft.confidence
        grammars = bool(filters) and self.seats.logit_state.host_drafts is not None
        if grammars:
            batch, draft = self.seats.logit_state.constrain(batch, draft)
        tree, tokens = draft.tree, draft.tokens  # [B, N]
        if tree is not self.tree:  # the tree was grown in this step
            batch = batch.at_depths(tree.depths)
        if tree.max_depth:
            # An empty node is computed as if it held token 0, and accepted only where that token is right.
            tokens = tokens.clamp(min=0)
        passed, beside = self.forward(batch, tokens, tree, known), None
        if known is not None:
            beside = self._known_output(known, passed, tokens.numel())
        hidden, feature = (x[: tokens.numel()] for x in passed[:2])  # [M, H], [M, F]
        logits = self.decoder.logits(hidden, None if self.logits is None else self.logits[: len(hidden)])  # [M, V]
        scores = torch.empty_like(logits, dtype=torch.float32) if self.keep_scores else None
        on_path = path_tokens(tokens, tree) if filters and self.seats.logit_state.num_tables else None
        drafted = draft.tokens if grammars else tokens  # nodes without a mask are never accepted
        target = TargetScores(batch, logits, filters, self.seats, drafted=drafted, path=on_path, processed=scores)
        path, num_accepted, next_token = self.verifier(tree, draft, target)
        # Commit: accepted nodes move to the positions after the committed ones; the next token is the next root.
        if not tree.tree.is_chain:
            hk = self.cache.num_kv_heads
            kv_commit(self.cache.kv, batch.block_table, batch.committed, path, num_accepted, hk)
        keeps_keys = self.drafter.keeps_keys
        emitted = self.seats.advance(rows, None if keeps_keys else feature, tokens, path, num_accepted, next_token)
        if keeps_keys:
            feature = feature.view(*tokens.shape, -1)
            feature = feature if tree.tree.is_chain else rows_of(feature, path)  # of the path's nodes
            state = self.drafter.advance(batch, feature, emitted, num_accepted)
            if state is not None:
                self.seats.feature[rows] = state
        if filters:
            self.seats.logit_state.record(rows, emitted)
        if scores is not None:
            scores = scores.view(*tokens.shape, -1)[torch.arange(len(path), device=path.device)[:, None], path]
        return StepOutput(emitted, path, logits.view(*tokens.shape, -1), scores, beside, confidence)

    @torch.no_grad()
    def compute(self, known):
        """Compute KnownRows alone.  -> KnownOutput"""
        forward_pass, target = known.forward_pass(self.cache.num_kv_heads), (self.cache.kv, self.drafter.streams)
        if self._ends_early(known):
            passed = self.decoder.forward_some(forward_pass, *target, known.ends)
        else:
            passed = self.decoder.forward(forward_pass, *target)
        return self._known_output(known, passed, 0)

    def _ends_early(self, known):
        return known is not None and self.unfinished is not None and known.size >= EARLY_FROM

    def _known_output(self, known, passed, nodes):
        """What a pass gave of the known tokens behind its nodes; computes the drafter's keys of them.  -> KnownOutput"""
        hidden, feature, *unfinished = passed
        if not unfinished:
            output = KnownOutput(hidden[nodes:], feature[nodes:])
        else:
            kept = self.unfinished.of(slice(known.size))
            for room, rows in zip(kept, unfinished[0].of(slice(nodes, None))):
                room.copy_(rows)
            output = KnownOutput(hidden[nodes:], feature[nodes:] if self.drafter.streams else None, kept)
        known.fill(output.feature)
        return output

    def _processor(self, batch, filters):
        """The logits processor of this batch's drafts; None if its requests set only a temperature."""
        return partial(draft_scores, batch, filters, self.seats, self.tree.max_depth) if filters else None

    def forward(self, batch, tokens, tree, known=None):
        """Run the target over all nodes, then over known tokens.  tokens [B, N] -> hidden [M, H], feature [M, F]

        Writes the nodes' keys and values at places L + n; known: KnownRows, whose T rows follow the nodes', or None. Where there is
        room for unfinished rows, of known tokens only the last of each chunk is finished, and Unfinished is the third result.
        """
        hk = self.cache.num_kv_heads
        index = build_tree_index(
            batch.block_table,
            batch.committed,
            tree.depths,
            tree.ancestors,
            hk,
            self.decoder.dtype,
            is_chain=tree.tree.is_chain,
        )
        rows = tokens.flatten(), batch.positions, batch.cache_rows
        if known is not None:
            prompts = known.forward_pass(hk)
            beside = prompts.tokens, prompts.positions, prompts.cache_rows
            rows, index = [torch.cat(pair) for pair in zip(rows, beside)], MixedIndex(index, prompts.attention)
        target = ForwardPass(*rows, index), self.cache.kv, self.drafter.streams
        if not self._ends_early(known):
            return self.decoder.forward(*target)
        nodes = tokens.numel()
        return self.decoder.forward_some(
            *target, torch.cat((torch.arange(nodes, device=tokens.device), nodes + known.ends))
        )
