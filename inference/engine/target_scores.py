"""The target's scores at the nodes of a batch, changed as each request asks; tokens and drafts are drawn from them.

The target's token at a node is argmax(logits' + G). logits' are the logits after, in vLLM's order, allowed_token_ids, bad_words,
structured_outputs, min_tokens, logit_bias, the penalties (kernels/sampling/process_logits.py), temperature, min_p, top_k and top_p
(kernels/sampling/keep_top.py). G is Gumbel noise keyed by (seed, sample index, position, token), so the token is a draw from
softmax(logits') that depends on the request and the position alone (Gumbel-max). At temperature 0 there is no G. Ties go to the
lowest token id.

Letters: B requests, N nodes per request, M = B N rows, D the tree's greatest depth, K nodes of a draft, V vocabulary, L committed
length.
"""

from dataclasses import dataclass

import torch

from ...kernels.jit import on_triton
from ...kernels.sampling.keep_top import keep_top, kept_scores, scale
from ...kernels.sampling.process_logits import NodeRows, process_logits
from ...kernels.sampling.sample import sample_tokens
from ...kernels.sampling.sample_kept import sample_kept
from .seats import BatchRows, SeatTable

# Filters: what the logits of a request need beside a temperature. Each value includes the previous one.
NO_FILTERS = 0
CHANGED = 1  # process_logits: bias, penalties, forbidden tokens
CUT = 2  # keep_top: min_p, top_k, top_p
# Rows drawn from at once: the results of a row's filters take up to 8 bytes per token.
FILTERED_ROWS = 1024


def next_filters(request):
    """The filters that the next logits of a Request need."""
    early = len(request.output_token_ids) < request.params.min_tokens
    return max(request.params.filters, CHANGED if early else NO_FILTERS)


@dataclass(frozen=True, eq=False)
class TargetScores:
    """The target's logits at every node of a batch.

    filters: the most that any request needs; drafted [B, N]: the tokens at the nodes of a draft; path [M, D]: path_tokens, where a
    token's logit depends on the tokens before it; processed: None, or fp32 [M, V] to be filled with the scores before the noise,
    from which tokens are drawn.
    """

    batch: BatchRows
    logits: torch.Tensor  # [M, V]
    filters: int
    seats: SeatTable
    drafted: torch.Tensor | None = None
    path: torch.Tensor | None = None
    processed: torch.Tensor | None = None

    def sample(self):
        """The target's own token after every node: at L + depth + 1 for a node of that depth.  -> [B, N]"""
        return self._draw().view(len(self.batch.seats), -1)

    def distributions(self):
        """Scores whose softmax is the target's distribution after every node (kernels/speculation/row_distributions.py).

        Returns scores [M, V], temperature [M], Kept. On a GPU, where distributions are cut, they are distributions over the Kept;
        else Kept is None.
        """
        scores, temperature, kept = self._of_nodes(slice(0, len(self.logits)))
        if self.processed is not None:
            self.processed.copy_(scale(scores, temperature) if kept is None else kept_scores(kept))
        if kept is None or on_triton(self.logits):
            return scores, temperature, kept
        return kept_scores(kept), (temperature > 0).to(temperature.dtype), None

    def _draw(self):
        """The target's own tokens [M]."""
        keys = self.batch.draws
        if not self.filters and self.processed is None:
            return sample_tokens(self.logits, self.batch.node_temperature, *keys)
        tokens = []
        for start in range(0, len(self.logits), FILTERED_ROWS):
            part = slice(start, start + FILTERED_ROWS)
            scores, temperature, kept = self._of_nodes(part)
            noise = [x[part] for x in keys]
            drawn = sample_tokens(scores, temperature, *noise) if kept is None else sample_kept(kept, *noise)
            if self.processed is not None:
                self.processed[part] = scale(scores, temperature) if kept is None else kept_scores(kept)
            tokens.append(drawn)
        return torch.cat(tokens)

    def _of_nodes(self, part):
        """Scores [R, V], temperature [R] and Kept of the nodes in `part` (a slice), as their requests ask.

        Kept is None unless top-k, top-p or min-p apply.
        """
        batch, num_rows = self.batch, len(self.logits)
        position, temperature = batch.draws[2][part], batch.node_temperature[part]
        request = torch.arange(len(batch.seats), device=self.logits.device)
        request = request[:, None].expand(-1, num_rows // len(request)).flatten()[part]
        path = request.new_empty(len(request), 0) if self.path is None else self.path[part]
        scores = self.logits[part]
        if self.filters >= CHANGED:
            tables = self.seats.logit_state.tables
            scores = _changed(scores, batch, tables, request=request, position=position, path=path)
        if self.filters < CUT:
            return scores, temperature, None
        return scores, temperature, keep_top(scores, temperature, *_filters(batch, request))


def path_tokens(tokens, tree):
    """The drafted tokens on every node's path, its own included, -1 after it.  tokens [B, N] -> [B N, D]"""
    depth = torch.arange(1, tree.max_depth + 1, device=tokens.device)
    on_path = depth <= tree.depths[..., None]  # [N, D] or [B, N, D]
    nodes = tree.ancestors[..., 1:].expand(len(tokens), -1, -1)
    found = tokens.gather(1, nodes.flatten(1)).view(nodes.shape)
    return torch.where(on_path, found, -1).flatten(0, 1)


def draft_scores(batch, filters, seats, max_depth, logits, depths):
    """Scores that drafts are drawn from: their softmax is the draft's distribution (temperature 0: the best token is drawn).

    For K nodes at depths [K], all below max_depth: logits [K, B, V] -> fp32 [K, B, V], temperature to draw with [B], and on a GPU
    the Kept [K B].

    Penalties count the output up to the root, without drafted tokens. (The target's own scores count drafted tokens too.)
    """
    (count, requests), device = logits.shape[:2], logits.device
    request = torch.arange(requests, device=device).repeat(count)
    position = (batch.committed + 1 + depths[:, None]).flatten()
    unknown = torch.full((len(request), max_depth), -1, device=device)
    changed = logits.flatten(0, 1)
    if filters >= CHANGED:
        # Where a grammar drafts, nothing of this is used.
        tables = seats.logit_state.tables._replace(masks=None)
        changed = _changed(changed, batch, tables, request=request, position=position, path=unknown)
    heat = batch.temperature.repeat(count)
    kept = keep_top(changed, heat, *_filters(batch, request)) if filters >= CUT else None
    scores = scale(changed, heat) if kept is None else kept_scores(kept)
    # The scores are divided by the temperature already; here 1 asks for noise and 0 for none.
    noisy = (batch.temperature > 0).to(batch.temperature.dtype)
    return scores.view(logits.shape), noisy, kept if on_triton(logits) else None


def _filters(batch, request):
    """Top-k, top-p and min-p of rows that belong to these requests."""
    return batch.top_k[request], batch.top_p[request], batch.min_p[request]


def _changed(logits, batch, tables, *, request, position, path):
    """Scores of rows [R, V], given each row's request, position [R] and tokens after the root."""
    if all(table is None for table in tables):
        return logits
    nodes = NodeRows(
        seat=batch.seats[request],
        root=batch.committed[request],
        position=position,
        min_position=batch.min_position[request],
        repetition=batch.repetition_penalty[request],
        presence=batch.presence_penalty[request],
        frequency=batch.frequency_penalty[request],
        path=path,
    )
    return process_logits(logits, nodes, tables)
