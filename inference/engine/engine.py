"""The engine: schedule, launch one step, hand the tokens of the step before back.

A step (step.py) runs on the device from the slots' own rows, so the host need not know a step's tokens to launch the next
one: on a GPU it reads them one step late, while the next step computes. On the CPU it reads them at once. Whatever a late step
did for a request that had ended, or was preempted, is dropped; tokens are a function of the request alone, so computing them
again gives the same ones.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass

import torch

from ...kernels.attention.tree_attention import PAGE
from ...kernels.jit import on_device
from ..speculation.adaptive import OneDepth
from ..speculation.tree import ROOT_ONLY, DynamicTree, cut_tree
from ..speculation.verify import Ratio, TreeTensors, strict
from .cache import PagedCache, bytes_of_page, check_pages_fit, pages_that_fit
from .graphs import StepGraphs
from .logprobs import gather_emitted, score_prompts
from .metrics import EngineMetrics
from .prompt_passes import PromptPasses
from .request import Status
from .sampling import next_filters
from .scheduler import Scheduler
from .slots import SlotTable
from .step import Step, draw
from .workspace import measure_workspace

# How many candidates per depth are kept when recording for `measure_acceptance`.
RECORDED_WIDTH = 10


@dataclass
class Launched:
    """Work whose tokens the host has not read yet."""

    kind: str  # "prefill" or "decode"
    requests: list
    epochs: list
    emitted: torch.Tensor  # [B, 1 + J] on the host: how many tokens, then they
    logprobs: dict  # {place of a request that wants them: (GatheredLogprobs on the host, its first row there)}
    prompts: list  # PromptParts not delivered yet
    which: int  # of the engine's steps
    event: object  # passed when they are there; None on the CPU
    at: float  # when it was launched; where nothing is read late: done
    begin: object = None  # where the plan measures steps: an event before this one, on the CPU a time
    num_read: int = 0  # requests that have been given their tokens

    def seconds(self):
        """What the work took from `begin` on, on the device: the host may have had other things to do before it read."""
        return self.at - self.begin if self.event is None else self.begin.elapsed_time(self.event) / 1e3


class Engine:
    """Runs requests to their end on one decoder, one cache and at most one drafter.  See `build`."""

    def __init__(
        self, decoder, cache, scheduler, slots, eos_token_ids, drafter, tree, verifier, captured, processed, plan
    ):
        self.decoder, self.cache, self.scheduler, self.slots = decoder, cache, scheduler, slots
        self.eos_token_ids, self.drafter = eos_token_ids, drafter
        self.tree = TreeTensors(tree, decoder.device)
        self.prompts = PromptPasses(decoder, cache, slots, drafter)
        self.above_root = torch.tensor([-1], device=decoder.device)
        self.keeps_state = drafter is not None and drafter.state_shape is not None
        self.plan, steps = plan, []
        for depth in plan.depths:
            cut = self.tree if depth == tree.max_depth else TreeTensors(cut_tree(tree, depth), decoder.device)
            # Where nothing is drafted there is nothing to compare laws of.
            rule = strict if depth == 0 and isinstance(verifier, Ratio) else verifier
            steps.append(Step(decoder, cache, slots, cut, rule, drafter, processed))
        self.graphs = StepGraphs(steps, scheduler.max_num_seqs, captured)
        self.on_gpu = decoder.device.type == "cuda"
        self.steps_late = 1 if self.on_gpu else 0  # how many steps may be unread when the next one is launched
        self.launched = deque()  # per step a list of Launched
        self.record_candidates = False  # measure_acceptance switches it on and reads `recorded`
        self.recorded = []  # (request, index of the root in its output, candidates per depth)
        self.metrics = EngineMetrics()
        self._read_until = time.perf_counter()

    @classmethod
    def build(
        cls,
        decoder,
        eos_token_ids,
        max_model_len,
        max_num_seqs,
        drafter=None,
        tree=ROOT_ONLY,
        verifier=strict,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=True,
        captured=True,
        num_pages=None,
        logprobs_mode="raw_logprobs",
        plan=None,
        progress=lambda sizes: sizes,
    ):
        """An engine with a cache as large as memory allows, or as `max_num_seqs` requests of `max_model_len` tokens need.

        verifier: a rule of verify.py; plan: how deep to draft in which step (adaptive.py), None: the whole tree in all; captured:
        replay CUDA graphs on a GPU; num_pages: this many pages of cache instead; logprobs_mode: one of logprobs.py; progress wraps
        the list of graphs to capture. Raises ValueError if memory does not suffice for one request of max_model_len tokens, or for
        num_pages, saying what would fit.
        """
        device, max_emitted = decoder.device, tree.max_depth + 1
        own = drafter is not None and drafter.kv_shape is not None
        tree_slots = tree.num_nodes
        if drafter is not None:
            rows = 1 + tree.num_rows if isinstance(tree, DynamicTree) else tree.num_nodes
            # A dynamic tree may have fewer nodes than a path that is emitted.
            tree_slots = max(tree_slots, rows, max_emitted) + drafter.extra_places
        per_request = -(-(max_model_len + tree_slots + max_emitted) // PAGE)
        width, dtype = (drafter and drafter.state_shape) or (decoder.hidden_size, decoder.dtype)
        slots = SlotTable(max_num_seqs, per_request, width, decoder.vocab_size, dtype, device)
        page_bytes = bytes_of_page(*decoder.kv_shape) + (bytes_of_page(*drafter.kv_shape) if own else 0)

        def make(pages, captured):
            cache = PagedCache(pages, *decoder.kv_shape, device)
            if own:
                drafter.attach(PagedCache(pages, *drafter.kv_shape, device).kv)
            scheduler = Scheduler(
                pages,
                PAGE,
                max_num_seqs,
                max_num_batched_tokens,
                tree_slots=tree_slots,
                max_emitted=max_emitted,
                enable_prefix_caching=enable_prefix_caching,
                lookahead=drafter.lookahead if drafter else 0,
            )
            processed = logprobs_mode == "processed_logprobs"
            given = decoder, cache, scheduler, slots, eos_token_ids, drafter, tree, verifier, captured, processed
            return cls(*given, plan or OneDepth(tree.max_depth))

        with on_device(device):
            if num_pages is not None:
                check_pages_fit(page_bytes, device, num_pages)
            else:
                workspace = measure_workspace(make(1, False), max_num_batched_tokens) if device.type == "cuda" else 0
                wanted = max_num_seqs * per_request
                num_pages = pages_that_fit(
                    page_bytes,
                    device,
                    wanted,
                    least=per_request,
                    workspace=workspace,
                    utilization=gpu_memory_utilization,
                )
            engine = make(num_pages, captured)
            engine.graphs.capture(progress)
        return engine

    # --- one step ---

    @torch.no_grad()
    def step(self):
        """Advance: prompt tokens of requests being admitted, then one tree of every running request.

        Returns the requests whose tokens were handed back. After an error or an interrupt in it every request that is not cancelled
        goes on from those, with the same tokens as without.
        """
        with on_device(self.decoder.device):
            try:
                return self._step()
            except BaseException:
                self.scheduler.start_over()
                raise

    def _step(self):
        if not self.scheduler.active:
            # What is still unread belongs to requests that have ended: nobody waited for it.
            self.launched.clear()
            self._read_until = time.perf_counter()
        scheduled = self.scheduler.schedule()
        self.slots.write_pages(scheduled.grown)
        self.metrics.num_preemptions += len(scheduled.preempted)
        if self.scheduler.enable_prefix_caching:
            self.metrics.prefix_cache_queries = self.scheduler.num_prompt_tokens
            self.metrics.prefix_cache_hits = self.scheduler.num_cached_tokens
        # Both are launched before anything is read: a request that turns out to have ended is in `decode` still.
        now = []
        if scheduled.prefill:
            now.append(self._prefill(scheduled.prefill))
        if scheduled.decode:
            now.append(self._decode(scheduled.decode))
        if now:
            self.launched.append(now)
        for launched in now:
            for request in launched.requests:
                request.in_flight += 1
        advanced = []
        while len(self.launched) > (self.steps_late if now and not self.record_candidates else 0):
            # An entry goes once it is read: an interrupt while waiting loses nothing.
            for launched in self.launched[0]:
                advanced += self._read(launched)
            self.launched.popleft()
        return advanced

    def cancel(self, request):
        """Drop a request, whatever it is doing."""
        if not request.finished:
            request.status, request.finish_reason = Status.FINISHED, "abort"
            self.scheduler.release(request)

    # --- prefill ---

    def _prefill(self, chunks):
        """Compute chunks of known tokens; where a request's last one is among them, draw its first token.  -> Launched"""
        ends = list(itertools.accumulate(chunk.count for chunk in chunks))
        done = [(end - 1, chunk.request) for end, chunk in zip(ends, chunks) if chunk.is_last]
        requests = [request for _, request in done]
        if done:  # first, for it may take memory: if there is none, nothing has happened yet
            roots = [request.output_token_ids[-1] if request.output_token_ids else 0 for request in requests]
            self.slots.write_requests(requests, roots, self._stop_tokens)
        hidden, feature = self.prompts.run(chunks)  # [T, H], [T, F]
        prompts = score_prompts(chunks, hidden, self.decoder, self.slots.on_device, self._to_host)
        for chunk in chunks:
            chunk.request.committed += chunk.count
            self.scheduler.committed_advanced(chunk.request)
            self.metrics.num_prompt_tokens += chunk.count
        self.metrics.num_prefill_passes += 1
        if not done:
            return self._hand_over("prefill", [], hidden[:0], prompts)
        last = self.slots.on_device([row for row, _ in done])
        hidden, feature = hidden[last], feature[last]  # [B, H], [B, F] at the last token of each
        launched = self._draw_first(requests, hidden, prompts)
        slots = self.slots.on_device([request.slot for request in requests])
        if self.keeps_state:
            # As if a step had just emitted the root: the token before it was the root then.
            batch = self.slots.gather(slots, self.tree.depths).one_token_ago()
            first = torch.zeros(len(slots), 1, dtype=torch.int64, device=slots.device)
            emitted = torch.stack((torch.ones_like(batch.root), batch.root), 1)
            feature = self.drafter.advance(batch, feature, emitted, first, first[:, 0])
        self.slots.feature[slots] = feature
        for request in requests:
            request.status = Status.RUNNING
        return launched

    def _draw_first(self, requests, hidden, prompts):
        """The first token of every request that has none.  hidden [B, H] of the requests' last tokens  ->  Launched"""
        # A request that was preempted goes on from its newest token.
        fresh = [i for i, request in enumerate(requests) if not request.output_token_ids]
        if not fresh:
            return self._hand_over("prefill", [], hidden[:0], prompts)
        requests = [requests[i] for i in fresh]
        slots = self.slots.on_device([request.slot for request in requests])
        # The last token of the prompt is a node one above the root: the token behind it stands at L.
        batch = self.slots.gather(slots, self.above_root)
        logits = self.decoder.logits(hidden[self.slots.on_device(fresh)])  # [B, V]
        filters, scores = max(map(next_filters, requests)), None
        if self.graphs.step.keep_scores:
            scores = torch.empty_like(logits, dtype=torch.float32)
        tokens = draw(batch, logits, filters, self.slots, processed=scores)
        self.slots.write_first_tokens(slots, tokens, batch.committed)
        self.slots.integers[slots, 2] = batch.remaining - 1
        emitted = torch.stack((torch.ones_like(tokens), tokens), 1)
        if filters:
            self.slots.logit_state.record(slots, emitted)
        return self._hand_over("prefill", requests, emitted, prompts, (logits if scores is None else scores)[:, None])

    # --- decode ---

    def _decode(self, requests):
        """draft -> verify -> commit for every running request.  -> Launched"""
        if self.record_candidates:
            self._record(requests)
        which, num_captures = self.plan.choose(len(requests)), self.graphs.num_captures
        begin = self._mark(timed=True) or time.perf_counter() if self.plan.measures else None
        output = self.graphs.run([request.slot for request in requests], max(map(next_filters, requests)), which)
        if self.graphs.num_captures > num_captures:
            begin = None  # capturing takes as long as a thousand steps: that says nothing of what a depth costs
        self.metrics.num_decode_passes += 1
        emitted = output.emitted[: len(requests)]
        if output.scores is not None:
            return self._hand_over("decode", requests, emitted, [], output.scores, None, which, begin)
        return self._hand_over("decode", requests, emitted, [], output.logits, output.path, which, begin)

    def _mark(self, timed=False):
        """An event here in the stream; None on the CPU."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=timed)
        event.record()
        return event

    def _hand_over(self, kind, requests, emitted, prompts, logits=None, path=None, which=0, begin=None):
        """Start the copies to the host.  emitted [B, 1 + J], prompts: list of PromptPart  ->  Launched

        logits [B, N, V]: what the tokens are scored by; path [B, J]: each one's node (None: the j-th for the j-th token); which,
        begin: see Launched.
        """
        asked, logprobs = [i for i, request in enumerate(requests) if request.params.logprobs is not None], {}
        if asked:
            count = max(requests[i].params.logprobs for i in asked)
            found = gather_emitted(emitted[:, 1:], logits, path, self.slots.on_device(asked), count).map(self._to_host)
            logprobs = {i: (found, place * (emitted.shape[1] - 1)) for place, i in enumerate(asked)}
        host = self._to_host(emitted)
        event, epochs = self._mark(timed=begin is not None), [request.epoch for request in requests]
        return Launched(kind, list(requests), epochs, host, logprobs, prompts, which, event, time.perf_counter(), begin)

    def _to_host(self, x):
        if not self.on_gpu:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)

    def _read(self, launched):
        """Wait for launched work and give each request its tokens.  -> the requests that got some"""
        if launched.event is not None:
            launched.event.synchronize()
        advanced, accepted = [], []
        while launched.prompts:
            launched.prompts[0].deliver()
            del launched.prompts[0]
        while launched.num_read < len(launched.requests):
            i = launched.num_read
            request = launched.requests[i]
            # Else it was preempted, has ended or was cancelled since.
            if request.epoch == launched.epochs[i] and not request.finished:
                count, *tokens = launched.emitted[i].tolist()
                kept = self._hand_back(request, tokens[:count], launched.logprobs.get(i))
                request.in_flight -= 1
                if launched.kind == "decode":
                    self._count(request, count, kept, self.graphs.steps[launched.which].tree)
                    accepted.append(count - 1)
                advanced.append(request)
            if request.finished and request.slot is not None:
                self.scheduler.release(request)
                self.metrics.num_requests_finished += 1
            launched.num_read += 1
        now = time.perf_counter() if self.steps_late else launched.at
        if launched.kind == "prefill":
            self.metrics.prefill_seconds += now - self._read_until
        else:
            self.metrics.decode_seconds += now - self._read_until
            if launched.begin is not None:
                self.plan.record(len(launched.requests), launched.which, launched.seconds(), accepted)
        self._read_until = now
        return advanced

    def _hand_back(self, request, tokens, logprobs):
        """Append tokens one by one, so that the output ends where plain decoding would.  -> how many were kept"""
        before = len(request.output_token_ids)
        try:
            for token in tokens:
                if request.append(token):
                    break
            kept = len(request.output_token_ids) - before
            if logprobs is not None:
                gathered, first = logprobs
                found = gathered.read(first, first + kept, request.params.logprobs)
        except BaseException:  # all or nothing: they come again
            del request.output_token_ids[before:]
            request.status, request.finish_reason, request.stop_reason = Status.RUNNING, None, None
            raise
        if before:  # the first token comes from the prompt's last position, which is committed already
            request.committed += kept
            self.scheduler.committed_advanced(request)
        if logprobs is not None:
            request.logprobs = (request.logprobs or []) + found
        self.metrics.num_generated_tokens += kept
        return kept

    def _count(self, request, emitted, kept, tree):
        self.metrics.num_decoded_tokens += kept
        if self.tree.max_depth:
            # Nodes deeper than the request had tokens left were never candidates.
            limit = request.num_remaining + kept - 1
            drafted = tree.num_nodes - 1  # where the tree is grown on the device its depths are not known here
            if not isinstance(tree.tree, DynamicTree):
                drafted = sum(0 < depth <= limit for depth in tree.tree.depths)
            # An accepted token behind the end of the output was never emitted: it does not count.
            for metrics in (request.metrics, self.metrics.spec_decode):
                metrics.record(drafted, min(emitted - 1, kept), self.tree.max_depth)

    def _stop_tokens(self, request):
        """Ids that min_tokens keeps out: as in vLLM EOS is one, ignored or not. A model may name one that it cannot emit."""
        ids = {*request.params.stop_token_ids, *self.eos_token_ids}
        return {token for token in ids if token < self.decoder.vocab_size}

    def _record(self, requests):
        """Keep the best candidates of every depth, with this step's place in the sequence."""
        slots = self.slots.on_device([request.slot for request in requests])
        batch = self.slots.gather(slots, self.tree.depths)
        depth = self.drafter.num_speculative_tokens
        width = min(RECORDED_WIDTH, self.decoder.vocab_size)
        found = self.drafter.candidates(batch, [width] * depth).tolist()  # [B, depth, width]
        for request, candidates in zip(requests, found):
            self.recorded.append((request, len(request.output_token_ids) - 1, candidates))
