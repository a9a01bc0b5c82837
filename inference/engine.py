"""The engine: schedule, then draft -> verify -> commit, hand tokens back.

A prompt is computed as a chain of already-known nodes, through the very pass that verifies drafts, PREFILL_NODES at a time. So a
prompt's KV is the same bits however it is cut. Plain decoding is a tree of one node.

Letters: B requests, N nodes per request, D the tree's depth, H hidden, V vocabulary, L committed length.
"""

import time

import torch

from ..kernels.kv_commit import kv_commit, kv_rows
from ..kernels.tree_attention import build_tree_index
from .decoder import ForwardPass
from .logprobs import top_logprobs
from .metrics import EngineMetrics
from .request import Status
from .sampling import SamplingBatch, draw
from .tree import MAX_NODES, ROOT_ONLY, chain
from .verify import TreeTensors, strict

PREFILL_NODES = MAX_NODES
# How many candidates per depth are kept when recording for `measure_acceptance`.
RECORDED_WIDTH = 10


class Engine:
    """Runs requests to their end on one decoder, one cache and at most one drafter.

    decoder: Decoder; cache: PagedCache; scheduler: Scheduler; drafter and tree: None and ROOT_ONLY without speculation.
    """

    def __init__(self, decoder, cache, scheduler, eos_token_ids, drafter=None, tree=ROOT_ONLY):
        self.decoder, self.cache, self.scheduler, self.drafter = decoder, cache, scheduler, drafter
        self.eos_token_ids = eos_token_ids
        self.tree = TreeTensors(tree, decoder.device)
        self.prompt_tree = TreeTensors(chain(PREFILL_NODES - 1), decoder.device)
        self.record_candidates = False  # measure_acceptance switches it on and reads `recorded`
        self.recorded = []  # (request, index of the root in its output, candidates per depth)
        self.metrics = EngineMetrics()
        # What the drafter reads: the target's final hidden state at the last committed position of each request.  [H] each
        self.features = {}

    @torch.no_grad()
    def step(self):
        """Advance: one chunk of every prompt being computed, then one tree of every running request.

        Returns the requests that got new tokens.
        """
        prefilling, running = self.scheduler.schedule()
        start = time.perf_counter()
        advanced = [request for request in prefilling if self._prefill(request)]
        middle = time.perf_counter()
        if running:
            self._decode(running)
        self.metrics.prefill_seconds += middle - start
        self.metrics.decode_seconds += time.perf_counter() - middle
        advanced += running
        for request in advanced:
            if request.finished:
                self._release(request)
        return advanced

    def cancel(self, request):
        """Drop a request, whatever it is doing."""
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        elif request in self.scheduler.active:
            self._release(request)
        request.status, request.finish_reason = Status.FINISHED, "abort"

    def _release(self, request):
        self.scheduler.release(request)
        self.features.pop(request.request_id, None)
        self.metrics.num_requests_finished += 1

    def _forward(self, tree, tokens, committed, block_table, host_committed):
        """One pass over tokens [B, N] (the first N nodes of `tree`).  -> hidden [B, N, H]"""
        num_nodes = tokens.shape[1]
        depths, ancestors = tree.depths[:num_nodes], tree.ancestors[:num_nodes]
        ancestors = ancestors[:, : int(max(tree.tree.depths[:num_nodes])) + 1]
        hk = self.cache.num_kv_heads
        index = build_tree_index(
            block_table,
            committed,
            host_committed,
            depths,
            ancestors,
            hk,
            torch.promote_types(self.decoder.dtype, torch.float32),
        )
        slots = committed[:, None] + torch.arange(num_nodes, device=committed.device)
        batch = ForwardPass(
            tokens=tokens,
            positions=committed[:, None] + depths,
            write_rows=kv_rows(block_table, slots, hk).flatten(),
            index=index,
        )
        return self.decoder.forward(batch, self.cache.kv)

    def _prefill(self, request):
        """Compute the next chunk of the prompt; with the last one, draw the first token. True if there is a token."""
        start = request.committed
        chunk = request.prompt_token_ids[start : start + PREFILL_NODES]
        device = self.decoder.device
        hidden = self._forward(
            self.prompt_tree,
            torch.tensor([chunk], device=device),
            torch.tensor([start], device=device),
            self.cache.block_table([request]),
            [start],
        )
        request.committed += len(chunk)
        self.metrics.num_prefill_passes += 1
        self.metrics.num_prompt_tokens += len(chunk)
        if request.committed < len(request.prompt_token_ids):
            return False
        request.status = Status.RUNNING
        sampling = SamplingBatch([request], device)
        logits = self.decoder.logits(hidden[0, -1:])  # [1, V]
        scores = sampling.target_scores(logits[None], [[0]], self.eos_token_ids)
        noise = sampling.noise(torch.tensor([[request.committed]], device=device), self.decoder.vocab_size)
        token = draw(scores, noise).item()
        self.features[request.request_id] = hidden[0, -1]
        if request.params.logprobs is not None:
            request.logprobs = top_logprobs(logits, [token], request.params.logprobs)
        request.append(token)
        self.metrics.num_generated_tokens += 1
        return True

    def _decode(self, requests):
        """draft -> verify -> commit for every running request."""
        device, tree = self.decoder.device, self.tree
        host_committed = [request.committed for request in requests]
        committed = torch.tensor(host_committed, device=device)  # [B] = L
        sampling = SamplingBatch(requests, device)
        block_table = self.cache.block_table(requests)
        # The token behind a node of depth d stands at L + d + 1; nodes of one depth share that position's noise.
        drawn_at = committed[:, None] + 1 + torch.arange(tree.max_depth + 1, device=device)
        noise = sampling.noise(drawn_at, self.decoder.vocab_size)  # [B, D + 1, V] or None

        # Draft.
        roots = torch.tensor([request.output_token_ids[-1] for request in requests], device=device)
        if tree.max_depth or self.record_candidates:
            feature = torch.stack([self.features[request.request_id] for request in requests])  # [B, H]
            temperature = sampling.temperature if sampling.any_random else None
            if self.record_candidates:
                self._record(requests, feature, temperature, drawn_at)
        if tree.max_depth:
            tokens, _ = self.drafter.propose(roots, feature, tree, temperature, noise)
        else:
            tokens = roots[:, None]

        # Verify. A tree is cut where max_tokens or max_model_len end: a path of d nodes emits d + 1 tokens.
        hidden = self._forward(tree, tokens, committed, block_table, host_committed)
        logits = self.decoder.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)  # [B, N, V]
        emitted = [len(request.output_token_ids) for request in requests]
        num_before = [[count + depth for depth in tree.tree.depths] for count in emitted]
        scores = sampling.target_scores(logits, num_before, self.eos_token_ids)
        target_tokens = draw(scores, None if noise is None else noise[:, tree.depths])  # [B, N]
        limits = [request.num_remaining - 1 for request in requests]
        path, num_accepted, bonus = strict(tree, tokens, target_tokens, torch.tensor(limits, device=device))

        # Commit: accepted nodes move to the positions behind the committed ones; the bonus token is the next root.
        step = torch.arange(tree.max_depth + 1, device=device)
        source = committed[:, None] + torch.where(step <= num_accepted[:, None], path, step)
        if not tree.tree.is_chain:
            kv_commit(self.cache.kv, block_table, source, committed[:, None] + step, self.cache.num_kv_heads)
        last = path.gather(1, num_accepted[:, None])  # [B, 1]
        features = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1])).squeeze(1)  # [B, H]
        path_tokens = tokens.gather(1, path)  # [B, D + 1]
        self._hand_back(requests, path, path_tokens, num_accepted, bonus, logits, features, limits)

    def _hand_back(self, requests, path, path_tokens, num_accepted, bonus, logits, features, limits):
        """Give each request its tokens, one by one, so that it ends where plain decoding would."""
        tree = self.tree
        path, path_tokens = path.tolist(), path_tokens.tolist()
        for b, (request, count, token) in enumerate(zip(requests, num_accepted.tolist(), bonus.tolist())):
            new = [*path_tokens[b][1 : count + 1], token]
            if request.params.logprobs is not None:
                rows = logits[b, path[b][: count + 1]]
                request.logprobs += top_logprobs(rows, new, request.params.logprobs)
            before = len(request.output_token_ids)
            for one in new:
                if request.append(one):
                    break
            kept = len(request.output_token_ids) - before
            request.committed += kept
            if request.logprobs is not None:
                del request.logprobs[len(request.output_token_ids) :]
            self.features[request.request_id] = features[b]
            self.metrics.num_generated_tokens += kept
            self.metrics.num_decoded_tokens += kept
            if tree.max_depth:
                drafted = sum(0 < depth <= limits[b] for depth in tree.tree.depths)
                # An accepted token behind the end of the output was never emitted: it does not count.
                for metrics in (request.metrics, self.metrics.spec_decode):
                    metrics.record(drafted, min(count, kept), tree.max_depth)
        self.metrics.num_decode_passes += 1

    def _record(self, requests, feature, temperature, drawn_at):
        """Keep the best candidates of every depth, with this step's place in the sequence."""
        noise = SamplingBatch(requests, self.decoder.device).noise(
            drawn_at[:, :1] + torch.arange(self.drafter.num_speculative_tokens, device=drawn_at.device),
            self.decoder.vocab_size,
        )
        widths = [min(RECORDED_WIDTH, self.decoder.vocab_size)] * self.drafter.num_speculative_tokens
        found = [c.tolist() for c in self.drafter.candidates(feature, widths, temperature, noise)]
        for b, request in enumerate(requests):
            self.recorded.append((request, len(request.output_token_ids) - 1, [candidates[b] for candidates in found]))
