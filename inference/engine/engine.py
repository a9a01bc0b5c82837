"""The engine: launch the next step, then read the one before.

A step (step.py) runs on the device from the seats' own rows, so the host can launch the next step before it knows a step's
tokens. On a GPU it reads them one step late, while the next step computes; on the CPU it reads them at once. Results for a
request that has since ended or been preempted are dropped. Tokens are a function of the request alone, so computing them again
gives the same tokens.
"""

import functools
import itertools
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...kernels.attention.tree_attention import PAGE
from ...kernels.jit import on_device
from ..speculation.speculation import Speculation
from ..speculation.tree import cut_tree
from ..speculation.tree_on_device import TreeOnDevice
from .cache import PagedCache, bytes_of_page, check_pages_fit, measure_workspace, pages_that_fit
from .graphs import StepGraphs
from .launched import hand_over, mark, to_host
from .logprobs import score_prompts
from .metrics import EngineMetrics
from .prompt_passes import PromptPasses
from .request import Status
from .scheduler import Scheduler
from .seats import SeatTable
from .step import Step
from .stopping import forbidden_early
from .target_scores import NO_FILTERS, next_filters

RECORDED_WIDTH = 10  # candidates per depth that are kept when recording for `measure_acceptance`


class Engine:
    """Runs requests to their end on one decoder, one cache and one drafter.  See `build`."""

    def __init__(self, decoder, cache, scheduler, seats, *, eos_token_ids, options, speculation):
        self.decoder, self.cache, self.scheduler, self.seats = decoder, cache, scheduler, seats
        self.eos_token_ids, self.options, self.drafter = eos_token_ids, options, speculation.drafter
        self.plan, tree, device = speculation.plan, speculation.tree, decoder.device
        self.tree = TreeOnDevice.of(tree, device)
        captured = device.type == "cuda" and not options.enforce_eager
        shape = scheduler.max_num_seqs * tree.num_nodes, decoder.vocab_size
        # One buffer for all graphs: each would keep logits of its own.
        logits = torch.empty(shape, dtype=decoder.dtype, device=device) if captured else None
        steps = [
            Step(
                decoder,
                cache,
                seats,
                tree=self.tree if depth == tree.max_depth else TreeOnDevice.of(cut_tree(tree, depth), device),
                verifier=speculation.verifier,
                drafter=self.drafter,
                keep_scores=options.keep_scores,
                logits=logits,
            )
            for depth in self.plan.depths
        ]
        most = min(options.max_num_batched_tokens, options.max_model_len)
        self.graphs = StepGraphs(steps, scheduler.max_num_seqs, captured, most)
        self.prompts = PromptPasses(decoder, cache, seats, self.drafter, self.graphs)
        self.on_gpu = device.type == "cuda"
        self._stream = None  # of the last step
        self.steps_late = 1 if self.on_gpu else 0  # number of steps that may be unread when the next is launched
        self.launched = deque()  # per step a list of Launched
        self.record_candidates = False
        self.recorded = []  # (request, index of the root in its output, candidates per depth)
        self.metrics = EngineMetrics()
        self._read_until = time.perf_counter()
        self._in_change = False  # in a step or a cancellation, and after one that broke off until `recover`

    @classmethod
    @torch.inference_mode(False)  # so that any step may write its tensors, whatever the mode of its thread
    def build(cls, decoder, eos_token_ids, options, speculation=None, progress=lambda sizes: sizes, filters=NO_FILTERS):
        """An engine with a cache as large as memory allows, or as max_num_seqs requests of max_model_len tokens need.

        options: EngineOptions with a max_model_len; speculation: Speculation, None for plain decoding; progress wraps the list of
        graphs to capture; filters: what requests are expected to need (target_scores.py). Raises ValueError if memory does not
        suffice for one request of max_model_len tokens, or for num_gpu_blocks_override, saying what would fit.
        """
        speculation = speculation or Speculation()
        drafter, tree, device = speculation.drafter, speculation.tree, decoder.device
        max_emitted = tree.max_depth + 1
        # A growing tree may have fewer nodes than the tokens it emits, and than the rows computed for it.
        tree_positions = max(tree.num_nodes, 1 + tree.num_rows, max_emitted) + drafter.extra_places
        per_request = -(-(options.max_model_len + tree_positions + max_emitted) // PAGE)
        width, dtype = drafter.state_shape or (decoder.hidden_size, decoder.dtype)
        # `strict` looks at tokens alone, whoever drafted them; a growing tree is not known beforehand.
        host_drafts = tree.max_depth if speculation.verifier.name == "strict" and not tree.grows else 0
        seats = SeatTable(options.max_num_seqs, per_request, width, decoder.vocab_size, dtype, device, host_drafts)
        page_bytes = bytes_of_page(*decoder.kv_shape) + (bytes_of_page(*drafter.kv_shape) if drafter.kv_shape else 0)

        def make(pages, options):
            cache = PagedCache(pages, *decoder.kv_shape, device)
            if drafter.kv_shape:
                drafter.attach(PagedCache(pages, *drafter.kv_shape, device).kv)
            scheduler = Scheduler(
                pages,
                PAGE,
                options.max_num_seqs,
                options.max_num_batched_tokens,
                tree_positions=tree_positions,
                max_emitted=max_emitted,
                enable_prefix_caching=options.enable_prefix_caching,
                lookahead=drafter.lookahead,
            )
            shared = {"eos_token_ids": eos_token_ids, "options": options, "speculation": speculation}
            return cls(decoder, cache, scheduler, seats, **shared)

        with on_device(device):
            num_pages, workspace = options.num_gpu_blocks_override, 0
            if device.type == "cuda":
                eager = make(1, replace(options, enforce_eager=True))
                workspace = measure_workspace(eager, options.max_num_batched_tokens)
            if num_pages is not None:
                check_pages_fit(page_bytes, device, num_pages)
            else:
                num_pages = pages_that_fit(
                    page_bytes,
                    device,
                    options.max_num_seqs * per_request,
                    least=per_request,
                    workspace=workspace,
                    utilization=options.gpu_memory_utilization,
                )
            engine = make(decoder.ranks.least(num_pages), options)
            engine.graphs.capture(progress, filters)
        return engine

    @property
    def max_num_seqs(self):
        """Number of requests that can run at once."""
        return self.scheduler.max_num_seqs

    @property
    def num_free_pages(self):
        """Pages of the cache that no request holds."""
        return self.scheduler.num_free_pages

    def check(self):
        """Assert that no page, seat or request is lost, held twice, or held without a holder. For tests and long runs."""
        self.scheduler.check()

    def add(self, request):
        """Queue a request. ValueError if it would not fit even alone."""
        self.scheduler.add(request)

    # --- one step ---

    @torch.inference_mode()  # on a CPU a tenth less time per operation than under no_grad
    def step(self):
        """Advance: prompt tokens of requests being admitted, then one tree of every running request.

        Any thread may step, one at a time. Returns the requests whose tokens were handed back. After an error or an interrupt in a
        step, every request that is not cancelled goes on from the tokens handed back, and its output is the same.
        """
        with on_device(self.decoder.device):
            self.recover()
            try:
                self._in_change = True
                self._follow_last_step()
                launched = self.launch_step()
                advanced = self.read_steps(unread=self.steps_late if launched and not self.record_candidates else 0)
                self._in_change = False
                return advanced
            except BaseException:
                self.recover()
                raise

    def recover(self):
        """Send all requests back to the queue if a step or a cancellation broke off. An interrupted call is done again."""
        if self._in_change:
            self.launched.clear()
            self.scheduler.start_over()
            self._in_change = False

    def _follow_last_step(self):
        """Let this step wait for the last one on the device: another thread may have another current stream."""
        if self.on_gpu:
            stream = torch.cuda.current_stream()
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream

    def launch_step(self):
        """Schedule the next step and start it on the device.  -> whether there was anything to do"""
        if not self.scheduler.active:
            # Unread steps belong to requests that have ended, so no caller waits for them.
            self.launched.clear()
            self._read_until = time.perf_counter()
        known_budget = functools.partial(self.graphs.known_budget, plan=self.plan)
        scheduled = self.scheduler.schedule(known_budget, self.graphs.max_chunks)
        self.seats.write_pages(scheduled.grown)
        self.metrics.num_preemptions += len(scheduled.preempted)
        if self.scheduler.enable_prefix_caching:
            self.metrics.prefix_cache_queries = self.scheduler.num_prompt_tokens
            self.metrics.prefix_cache_hits = self.scheduler.num_cached_tokens
        # Both are launched before anything is read, so `decode` may include a request that turns out to have ended.
        now, computed = [], None
        if scheduled.decode:
            launched, computed = self._decode(scheduled.decode, scheduled.prefill)
            now.append(launched)
        if scheduled.prefill:
            now.append(self._prefill(scheduled.prefill, computed))
        if now:
            self.launched.append(now)
        for request in itertools.chain.from_iterable(launched.requests for launched in now):
            request.in_flight += 1
        return bool(now)

    def read_steps(self, unread=0):
        """Wait for the oldest steps, all but the newest `unread`, and give requests their tokens.  -> the requests that got some"""
        advanced = []
        while len(self.launched) > unread:
            for launched in self.launched[0]:
                advanced += self._read(launched)
            self.launched.popleft()
        return advanced

    @contextmanager
    def recording(self):
        """Inside this context steps also record the best candidates of every depth. Yields the list of records.

        Its entries: (request, index of the root in its output, candidates per depth).
        """
        self.record_candidates, self.recorded = True, []
        try:
            yield self.recorded
        finally:
            self.record_candidates, self.recorded = False, []

    def cancel(self, request):
        """Drop a request in any state."""
        self.recover()
        if not request.finished:
            self._in_change = True
            request.status, request.finish_reason = Status.FINISHED, "abort"
            self.scheduler.release(request)
            self._in_change = False

    def reset_prefix_cache(self):
        """Forget the content of all pages. False, and nothing happens, while requests hold pages."""
        self.recover()
        self._in_change = True
        done = self.scheduler.reset_prefix_cache()
        self._in_change = False
        return done

    # --- prefill ---

    def _write_done(self, chunks):
        """Write the seats of requests whose last chunk is among these.  -> rows of their last tokens, the requests"""
        ends = itertools.accumulate(chunk.count for chunk in chunks)
        rows = [end - 1 for end, chunk in zip(ends, chunks) if chunk.is_last]
        requests = [chunk.request for chunk in chunks if chunk.is_last]
        if requests:
            roots = [request.output_token_ids[-1] if request.output_token_ids else 0 for request in requests]
            known = self.eos_token_ids, self.decoder.vocab_size
            self.seats.write_requests(requests, roots, lambda request: forbidden_early(request.params, *known))
        return rows, requests

    def _prefill(self, chunks, computed):
        """Compute chunks of known tokens, and draw the first token of each request that is done.  -> Launched

        computed: KnownOutput of all tokens, or None
        """
        computed = computed or self.prompts.run(chunks)
        # The seats are not read before the draw, and the device is busy meanwhile.
        rows, requests = self._write_done(chunks)
        prompts = score_prompts(chunks, computed, self.decoder, self.seats.on_device, to_host)
        for chunk in chunks:
            chunk.request.committed += chunk.count
            self.scheduler.committed_advanced(chunk.request)
            self.metrics.num_prompt_tokens += chunk.count
        self.metrics.num_prefill_passes += 1
        if not requests:
            return hand_over("prefill", [], computed.hidden[:0], self.seats, prompts=prompts)
        ended = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        hidden, feature = computed.last(*map(self.seats.on_device, (rows, ended)))  # [B, H], [B, F]
        fresh, emitted, scored = self.prompts.draw_first(requests, hidden, self.options.keep_scores)
        launched = hand_over("prefill", fresh, emitted, self.seats, prompts=prompts, logits=scored)
        seats = self.seats.on_device([request.seat for request in requests])
        if self.drafter.keeps_keys:
            # As if a step had just emitted the root, with the token before it as the root of that step.
            batch = self.seats.gather(seats, self.tree.depths).one_token_ago()
            emitted = torch.stack((torch.ones_like(batch.root), batch.root), 1)
            feature = self.drafter.advance(batch, feature[:, None], emitted, torch.zeros_like(batch.root))
        if feature is not None:
            self.seats.feature[seats] = feature
        for request in requests:
            request.status = Status.RUNNING
        return launched

    # --- decode ---

    def _decode(self, requests, chunks):
        """draft -> verify -> commit for every running request; if a graph holds them, chunks beside.

        -> Launched, what was computed of the chunks or None
        """
        if self.record_candidates:
            self._record(requests)
        filters, num_captures = max(map(next_filters, requests)), self.graphs.num_captures
        known = None
        if chunks and filters in self.graphs.mixed_filters:
            which = self.plan.choose_beside(len(requests), self.graphs.seconds_beside(requests, self.plan))
            known = self.prompts.place(chunks, len(requests), which)
        if known is None:
            which = self.plan.choose(len(requests))
        self.seats.logit_state.write_grammars(requests)
        timed = self.plan.measures and known is None
        begin = mark(self.seats.device, timed=True) or time.perf_counter() if timed else None
        output = self.graphs.run([request.seat for request in requests], filters, which, known)
        if self.graphs.num_captures > num_captures:
            begin = None  # a capture takes as long as a thousand steps, so its time tells nothing about a depth's cost
        self.metrics.num_decode_passes += 1
        scored = dict(logits=output.logits, path=output.path) if output.scores is None else dict(logits=output.scores)
        told = dict(which=which, begin=begin, confidence=output.confidence)
        launched = hand_over("decode", requests, output.emitted[: len(requests)], self.seats, **told, **scored)
        return launched, output.known

    def _read(self, launched):
        """Wait for launched work and give each request its tokens.  -> the requests that got some"""
        if launched.event is not None:
            launched.event.synchronize()
        advanced, accepted = [], {}
        while launched.prompts:
            launched.prompts[0].deliver()
            del launched.prompts[0]
        while launched.num_read < len(launched.requests):
            i = launched.num_read
            request = launched.requests[i]
            # Otherwise it has since been preempted or cancelled, or has ended.
            if request.epoch == launched.epochs[i] and not request.finished:
                count, *tokens = launched.emitted[i].tolist()
                kept = self._hand_back(request, tokens[:count], launched.logprobs.get(i))
                request.in_flight -= 1
                if launched.kind == "decode":
                    self._count(request, count, kept, self.graphs.steps[launched.which].tree)
                    if request.matcher is None and request.params.speculate:  # else the drafter's were not tried
                        accepted[i] = count - 1
                request.look_ahead()
                advanced.append(request)
            if request.finished and request.seat is not None:
                self.scheduler.release(request)
                self.metrics.num_requests_finished += 1
            launched.num_read += 1
        now = time.perf_counter() if self.steps_late else launched.at
        if launched.kind == "prefill":
            self.metrics.prefill_seconds += now - self._read_until
        else:
            self.metrics.decode_seconds += now - self._read_until
            if self.plan.measures:
                self.plan.record(len(launched.requests), launched.which, *launched.measured(accepted))
        self._read_until = now
        return advanced

    def _hand_back(self, request, tokens, logprobs):
        """Append tokens one by one, so that the output ends where plain decoding would.  -> number of tokens kept"""
        before = len(request.output_token_ids)
        for token in tokens:
            if request.append(token):
                break
        kept = len(request.output_token_ids) - before
        if logprobs is not None:
            gathered, first = logprobs
            request.logprobs.extend(gathered, first, first + kept, request.params.logprobs)
        request.num_settled = before + kept  # all or nothing: tokens before this line will be computed again
        if before:  # the first token comes from the prompt's last position, which is committed already
            request.committed += kept
            self.scheduler.committed_advanced(request)
        self.metrics.num_generated_tokens += kept
        request.times.count(kept)
        return kept

    def _count(self, request, emitted, kept, tree):
        self.metrics.num_decoded_tokens += kept
        if self.tree.max_depth and request.params.speculate:
            # An accepted token after the end of the output was never emitted: it does not count.
            counted = *request.count_drafted(tree.tree, kept), min(emitted - 1, kept), self.tree.max_depth
            self.metrics.spec_decode.record(*counted)
            request.count_drafts(kept, *counted)

    def _record(self, requests):
        """Keep the best candidates of every depth, with this step's place in the sequence."""
        seats = self.seats.on_device([request.seat for request in requests])
        batch = self.seats.gather(seats, self.tree.depths)
        widths = [min(RECORDED_WIDTH, self.decoder.vocab_size)] * self.drafter.num_speculative_tokens
        found = self.drafter.candidates(batch, widths).tolist()  # [B, depth, width]
        for request, candidates in zip(requests, found):
            self.recorded.append((request, len(request.output_token_ids) - 1, candidates))
