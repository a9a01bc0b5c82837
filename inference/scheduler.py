"""Which requests run in this step, and which pages of the cache they hold. No torch.

A request is admitted when a slot is free and there are pages for its whole life: prompt, new tokens and one tree beyond them.
So a running request never waits for memory. First come, first served.
"""

from collections import deque

from .request import Status


class Scheduler:
    """Admits requests into at most `max_num_seqs` slots and `num_pages` pages of `page_size` positions.

    num_pages counts usable pages; page 0 of the cache is never handed out (padding points to it). tree_slots: positions past the
    committed ones that a draft tree may write.
    """

    def __init__(self, num_pages, page_size, max_num_seqs, tree_slots):
        self.page_size, self.max_num_seqs, self.tree_slots = page_size, max_num_seqs, tree_slots
        self.free_pages = list(range(num_pages, 0, -1))
        self.num_pages = num_pages
        self.waiting = deque()
        self.active = []  # prefilling and running, in order of admission

    def pages_needed(self, request):
        longest = len(request.prompt_token_ids) + request.max_new_tokens + self.tree_slots
        return -(-longest // self.page_size)

    def add(self, request):
        """Queue a request. ValueError if it could never be admitted."""
        needed = self.pages_needed(request)
        if needed > self.num_pages:
            raise ValueError(
                f"the request needs {needed} pages of {self.page_size} tokens and the cache holds {self.num_pages}: "
                f"shorten the prompt or max_tokens, or build the LLM with more memory"
            )
        self.waiting.append(request)

    def schedule(self):
        """(requests to prefill, requests to decode) of this step; admits waiting ones first."""
        while self.waiting and len(self.active) < self.max_num_seqs:
            request = self.waiting[0]
            needed = self.pages_needed(request)
            if needed > len(self.free_pages):
                break
            self.waiting.popleft()
            request.pages = [self.free_pages.pop() for _ in range(needed)]
            request.status = Status.PREFILLING
            self.active.append(request)
        prefilling = [request for request in self.active if request.status is Status.PREFILLING]
        running = [request for request in self.active if request.status is Status.RUNNING]
        return prefilling, running

    def release(self, request):
        """Take a finished request out and its pages back."""
        self.active.remove(request)
        self.free_pages.extend(reversed(request.pages))
        request.pages = []

    @property
    def has_unfinished(self):
        return bool(self.waiting or self.active)
