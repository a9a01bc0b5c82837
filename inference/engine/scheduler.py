"""Choose the requests that run in each step, and give them seats and pages. No torch.

First come, first served. A request is admitted when a seat is free and there are pages for the tokens it knows and one tree; it
gets more pages as it grows. When no page is left, the youngest request gives up its pages and waits again, so the oldest always
advances. Launching may run ahead of reading: a request's length is then known only up to `in_flight * max_emitted` tokens, and its
pages cover the greatest possible length.
"""

import heapq
import time
from collections import deque
from dataclasses import dataclass, field

from .pages import PagePool, first_name, hash_page
from .request import Request, Status


@dataclass(frozen=True)
class Chunk:
    """Known tokens start..start+count-1 of a request, to be computed in this step. After its last chunk the request can decode."""

    request: Request
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True)
class ScheduledStep:
    """The work of one step. `grown`: requests whose page list changed, newly admitted ones included.

    All lists are oldest first, except `preempted`: it is in the order in which requests lost their pages."""

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)


class Scheduler:
    """Shares `max_num_seqs` seats and `num_pages` pages of `page_size` positions (page 0, the padding, not counted) among requests.

    max_num_batched_tokens: prompt tokens computed per step, over all requests. tree_positions: nodes of a draft tree = positions
    past the committed ones that a step may write; max_emitted: most tokens that a step emits; both 1 for plain decoding.
    enable_prefix_caching: keep full pages by content, and let requests that begin with the same tokens share them. lookahead:
    number of tokens after a page that its content depends on (an EAGLE head's keys at a token depend on the next token); they are
    part of the page's name.
    """

    def __init__(
        self,
        num_pages,
        page_size,
        max_num_seqs,
        max_num_batched_tokens,
        tree_positions=1,
        max_emitted=1,
        enable_prefix_caching=True,
        lookahead=0,
    ):
        sizes = dict(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_emitted=max_emitted,
        )
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if tree_positions < max_emitted:
            raise ValueError(
                f"a tree of {tree_positions} nodes emits at most as many tokens, got max_emitted={max_emitted}"
            )
        self.page_size, self.max_num_seqs, self.max_num_batched_tokens = page_size, max_num_seqs, max_num_batched_tokens
        self.tree_positions, self.max_emitted = tree_positions, max_emitted
        self.enable_prefix_caching, self.lookahead = enable_prefix_caching, lookahead
        self.pool = PagePool(num_pages)
        self.free_seats = list(range(max_num_seqs))  # a heap: low seats are taken first, so batches stay dense
        self.waiting = deque()
        self.active = []  # prefilling and running, in order of admission
        self.left_queue = {}  # {request: None} in order of admission: all that are not in the queue, at any moment in between, too
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of requests admitted
        self.num_cached_tokens = 0  # of these, tokens found in the cache instead of computed

    @property
    def num_pages(self):
        return self.pool.num_pages

    @property
    def num_free_pages(self):
        return self.pool.num_free

    @property
    def has_unfinished(self):
        return bool(self.waiting or self.active)

    def add(self, request):
        """Queue a request. ValueError if it would not fit even alone."""
        self.check_fits(request)
        self.waiting.append(request)

    def check_fits(self, request):
        """ValueError for a request that would not fit even alone."""
        prompt, new = len(request.prompt_token_ids), request.max_new_tokens
        needed = self._pages_for(prompt + new + self.tree_positions)
        if needed > self.num_pages:
            room = max(self.num_pages * self.page_size - self.tree_positions, 0)
            raise ValueError(
                f"a prompt of {prompt} tokens and {new} new ones need {needed} pages of {self.page_size} tokens (tree of "
                f"{self.tree_positions} included) and the cache holds {self.num_pages}: prompt and new tokens together may be "
                f"{room}; shorten the prompt or max_tokens, or build the LLM with more memory"
            )

    def reset_prefix_cache(self):
        """Forget the content of all pages. False, and nothing happens, while requests hold pages."""
        if not self.active:
            self.pool.forget()
        return not self.active

    def schedule(self, known_budget=lambda running, entering: None, max_chunks=None):
        """Decide one step and take the pages for it.  -> ScheduledStep

        known_budget(running requests, requests whose prompts have seats or could get some; neither list is empty): the most prompt
        tokens beside the running ones, None for max_num_batched_tokens; max_chunks: the most chunks of prompts, None: as many as
        there are.
        """
        max_chunks = max_chunks or self.max_num_seqs
        step = ScheduledStep()
        for request in list(self.active):  # a younger request may be WAITING when its turn comes
            # Only the host knows what a grammar lets follow, once it has read the tokens before.
            unread = request.matcher is not None and request.in_flight
            if request.status is Status.RUNNING and request.num_remaining > request.in_flight and not unread:
                self._schedule_decode(request, step)
        entering = [request for request in self.active if request.status is Status.PREFILLING]
        # By their places: another thread may join the end of the queue meanwhile, which ends an iterator.
        entering += [self.waiting[i] for i in range(min(len(self.waiting), len(self.free_seats)))]
        limit = known_budget(step.decode, entering) if step.decode and entering else None
        budget = min(limit or self.max_num_batched_tokens, self.max_num_batched_tokens)
        for request in self.active:
            if request.status is Status.PREFILLING and len(step.prefill) < max_chunks:
                budget -= self._cut_chunk(request, budget, step)
        # Pages just taken from a request are for older requests, not for admitting this one again.
        while self.waiting and self.free_seats and budget > 0 and len(step.prefill) < max_chunks and not step.preempted:
            if not self._admit(self.waiting[0], step):
                break  # the next one in the queue does not overtake it
            budget -= self._cut_chunk(self.active[-1], budget, step)
        return step

    def committed_advanced(self, request):
        """Share the pages that became full. Call it after raising `request.committed`."""
        assert request.committed <= request.num_known
        if not self.enable_prefix_caching or request.seat is None:
            return
        for i in range(request.num_named, (request.committed - self.lookahead) // self.page_size):
            self.pool.name(request.pages[i], self._page_name(request, i))
            request.num_named = i + 1

    def release(self, request):
        """Remove a finished or cancelled request in any state, and take back its pages and seat."""
        if request.seat is not None:
            self._take_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status, request.matcher = Status.FINISHED, None  # its caller may keep the request for long
        self.left_queue.pop(request, None)

    def start_over(self):
        """Send all requests back to the queue with the tokens they have been handed, as if memory had run out.

        Called after a step broke off, at any line: the state of the device is then unknown, and seats and pages may be half-way
        from one place to another, so they are dealt out anew. If this breaks off, too, it is called again.
        """
        for request in [*self.left_queue, *self.waiting]:
            request.start_over()
            if request.finished and request in self.waiting:
                self.waiting.remove(request)
        self.pool.start_over()
        self.active, self.free_seats = [], list(range(self.max_num_seqs))
        for request in reversed(list(self.left_queue)):
            if not request.finished and request not in self.waiting:
                self.waiting.appendleft(request)
            del self.left_queue[request]

    def check(self):
        """Assert that no page, seat or request is lost, held twice, or held without a holder. For tests and long runs; O(pages)."""
        self.pool.check([request.pages for request in self.active])
        seats = [request.seat for request in self.active]
        assert sorted(seats + self.free_seats) == list(range(self.max_num_seqs)), "a seat is lost or held twice"
        for request in self.active:
            assert request.status in (Status.PREFILLING, Status.RUNNING), f"{request.status} but not released"
            assert self._pages_for(request.committed) <= len(request.pages), "committed tokens without a page"
            assert request.num_named * self.page_size <= request.committed, "a page was shared before it was full"
            for page, name in zip(request.pages[: request.num_named], request.page_names):
                assert self.pool.name_of.get(page, name) == name, "a page is known by another content"
            for page in request.pages[request.num_named :]:
                assert self.pool.num_holders[page] == 1, "a page that will be written is shared"
        for request in self.waiting:
            assert request.status is Status.WAITING
            assert request.seat is None
            assert not request.pages
            assert request.committed == request.in_flight == request.num_named == 0

    # --- the steps of schedule ---

    def _pages_for(self, num_positions):
        return -(-num_positions // self.page_size)

    def _schedule_decode(self, request, step):
        """Let a running request decode if it gets the pages that its next step may write. Otherwise it may be preempted itself."""
        longest = len(request.prompt_token_ids) + request.max_new_tokens + self.max_emitted
        root = min(request.committed + request.in_flight * self.max_emitted, longest)
        needed = self._pages_for(root + self.tree_positions)
        if needed > self.num_pages:
            return  # it needs fewer pages once its steps in flight are read: no other request must give way
        missing = needed - len(request.pages)
        while missing > self.pool.num_free:
            youngest = self.active[-1]
            if youngest is request and request.in_flight:
                return  # the same here: read first, so that no token is drawn in vain
            self._preempt(youngest, step)
            if youngest is request:
                return
        if missing > 0:
            request.pages += [self.pool.take() for _ in range(missing)]
            step.grown.append(request)
        step.decode.append(request)

    def _preempt(self, request, step):
        assert len(self.active) > 1
        assert not request.finished, "finished requests are released before the next step is scheduled"
        self._send_back(request)
        step.preempted.append(request)
        self.num_preemptions += 1

    def _send_back(self, request):
        """Put a request at the head of the queue, without seat and pages; its work in flight becomes stale."""
        self._take_back(request)
        request.status = Status.WAITING
        request.committed = request.in_flight = 0
        request.epoch += 1
        self.waiting.appendleft(request)
        del self.left_queue[request]

    def _take_back(self, request):
        """Free the seat and the pages; the last pages first, so that the beginning stays cached longest."""
        self.active.remove(request)
        heapq.heappush(self.free_seats, request.seat)
        for page in reversed(request.pages):
            self.pool.let_go(page)
        request.seat, request.pages, request.num_named = None, [], 0

    def _admit(self, request, step):
        """Give the first request of the queue a seat and pages, cached pages first. False if it has to wait."""
        cached = self._cached_pages(request)
        if self._is_being_computed(request, len(cached), step):
            return False
        missing = self._pages_for(request.num_known + self.tree_positions) - len(cached)
        if missing > self.pool.num_free - sum(self.pool.is_idle(page) for page in cached):
            return False
        self.left_queue[request] = None
        self.waiting.popleft()
        for page in cached:
            self.pool.hold(page)
        request.pages = cached + [self.pool.take() for _ in range(missing)]
        request.num_named = len(cached)
        request.committed = len(cached) * self.page_size
        request.seat = heapq.heappop(self.free_seats)
        request.status = Status.PREFILLING
        if not request.times.scheduled_ts:  # it may have waited through a step that broke off
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.committed
            request.num_cached_tokens, request.times.scheduled_ts = request.committed, time.monotonic()
        self.active.append(request)
        step.admitted.append(request)
        step.grown.append(request)
        return True

    def _cached_pages(self, request):
        """Pages that already hold the request's first tokens: as many as follow each other without a gap."""
        pages = []
        for i in range(self._num_reusable(request)):
            page = self.pool.find(self._page_name(request, i))
            if page is None:
                break
            pages.append(page)
        return pages

    def _num_reusable(self, request):
        """Number of pages that may come from the cache. Tokens whose hidden states are needed must be computed."""
        # Another token follows the last token that may be skipped, so the lookahead is known.
        return request.num_skippable // self.page_size if self.enable_prefix_caching else 0

    def _is_being_computed(self, request, i, step):
        """Whether this step already computes the page that the request would compute next; a step later the page can be shared.

        That is the case for all but the first of a prompt's n outputs."""
        if i >= self._num_reusable(request):
            return False
        first, end = i * self.page_size, (i + 1) * self.page_size
        return any(
            chunk.start <= first
            and end + self.lookahead <= chunk.start + chunk.count
            and self._page_name(chunk.request, i) == self._page_name(request, i)
            for chunk in step.prefill
        )

    def _page_name(self, request, i):
        """Name of the request's i-th page. All of its tokens, and the tokens after it that it depends on, must be known."""
        names = request.page_names
        while len(names) <= i:
            start = len(names) * self.page_size
            tokens = request.tokens_between(start, start + self.page_size + self.lookahead)
            names.append(hash_page(names[-1] if names else first_name(request.cache_salt), tokens))
        return names[i]

    def _cut_chunk(self, request, budget, step):
        """Schedule the request's next known tokens, at most `budget`.  -> their number"""
        left = request.num_known - request.computed
        count = min(left, budget)
        if count:
            step.prefill.append(Chunk(request, request.computed, count, count == left))
        return count
