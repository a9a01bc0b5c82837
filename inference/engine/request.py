"""A request and its life: waiting -> prefilling -> running -> finished. No torch.

One request is one output sequence; a prompt asked for n outputs becomes n requests with sample indices 0..n-1. A request that
loses its pages to an older one (preemption) waits again, keeps its output tokens, and computes their keys and values anew.
"""

import enum
from dataclasses import dataclass, field

from ..grammar.matcher import ENDED
from .metrics import RequestStateStats, SpecDecodeMetrics


class Status(enum.Enum):
    WAITING = "waiting"  # no seat, no pages
    PREFILLING = "prefilling"  # holds a seat and pages; the KV of its known tokens is being computed
    RUNNING = "running"  # decoding
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One output being made. Compared by identity.

    `committed` counts the tokens whose KV is in the cache for good, as far as the host has read (the device may be `in_flight`
    steps ahead). While the request runs, its newest token (the root of the next tree) is not among them.
    """

    request_id: tuple[int, int]  # the prompt's number, and sample_index
    prompt_token_ids: list[int]
    params: object  # SamplingParams
    seed: int
    sample_index: int
    max_new_tokens: int  # max_tokens cut to what max_model_len leaves
    stop_checker: object  # stopping.StopChecker, called after every appended token; None or what stopped it
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    matcher: object = (
        None  # of a form: a grammar.matcher.Matcher that has accepted output_token_ids; None once released
    )
    cache_salt: str | None = None  # pages are shared with requests of the same salt only
    is_streamed: bool = False  # whether somebody waits for every token: then prompts beside it must not take long
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_settled: int = 0  # of output_token_ids: those after them were not handed back whole
    accepted_drafts: list[int] = field(
        default_factory=list
    )  # places in output_token_ids of drafts, of streamed requests
    logprobs: object = None  # if asked for: logprobs.TokenLogprobs of output_token_ids
    prompt_logprobs: object = None  # if asked for: of the prompt's tokens but the first, as far as they are read
    committed: int = 0
    pages: list[int] = field(default_factory=list)
    seat: int | None = None  # row of the device's tables, while admitted
    in_flight: int = 0  # decode steps launched whose tokens the host has not read; each emits at least one token
    epoch: int = 0  # raised by preemption: results of steps launched in an earlier epoch are stale and dropped
    page_names: list[bytes] = field(default_factory=list)  # hash_page of the full pages of its tokens, computed once
    num_named: int = 0  # number of `pages`, from the first, that have their name in the pool
    finish_reason: str | None = None
    stop_reason: object = None
    output_text: str = ""
    metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)
    times: RequestStateStats = field(default_factory=RequestStateStats)
    num_cached_tokens: int = 0  # tokens of the prompt found in the cache when it was first admitted

    @property
    def num_tokens(self):
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self):
        return self.max_new_tokens - len(self.output_token_ids)

    @property
    def num_known(self):
        """Number of tokens that must be in the cache before decoding goes on: the prompt, and all output tokens but the newest."""
        return self.num_tokens - 1 if self.output_token_ids else len(self.prompt_token_ids)

    @property
    def known_token_ids(self):
        """The `num_known` tokens. Prefill computes them; decoding then starts from the newest token, or draws the first."""
        return self.prompt_token_ids + self.output_token_ids[:-1]

    @property
    def wants_prompt_logprobs(self):
        """Whether prompt logprobs are still missing, as far as the host has read."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def num_skippable(self):
        """Number of known tokens, from the first, that the cache may supply. Hidden states are needed of all others.

        Never skipped: the last known token, and tokens that predict a prompt token whose logprob is wanted.
        """
        last = self.num_known - 1
        return min(len(self.prompt_logprobs), last) if self.wants_prompt_logprobs else last

    @property
    def computed(self):
        """Number of known tokens whose KV is in the cache, or will be by work already launched. The next chunk starts there."""
        return min(self.committed, self.num_known)

    @property
    def finished(self):
        return self.status is Status.FINISHED

    def tokens_between(self, start, stop):
        """Token ids at positions start..stop-1."""
        split = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]

    def start_over(self):
        """Wait again without seat and pages, with the tokens that were handed back whole. Results in flight become stale."""
        if len(self.output_token_ids) > self.num_settled:
            if self.finish_reason != "abort":
                self.status, self.finish_reason, self.stop_reason = Status.WAITING, None, None
            if self.logprobs is not None:
                self.logprobs.cut(self.num_settled)
            del self.output_token_ids[self.num_settled :]
            self.accepted_drafts = [place for place in self.accepted_drafts if place < self.num_settled]
        if not self.finished:
            self.status = Status.WAITING
        self.committed = self.in_flight = self.num_named = 0
        self.seat, self.pages = None, []
        self.epoch += 1
        if self.matcher is not None and not self.finished and self.matcher.start_over(self.output_token_ids):
            self._end_broken()

    def count_drafts(self, num_new, num_drafted, num_depths, num_accepted, max_depth):
        """Count a step that has appended `num_new` tokens, the first `num_accepted` of which were drafts."""
        self.metrics.record(num_drafted, num_depths, num_accepted, max_depth)
        if self.is_streamed:  # somebody may ask which tokens these were
            first = len(self.output_token_ids) - num_new
            self.accepted_drafts.extend(range(first, first + num_accepted))

    def append(self, token):
        """Add one emitted token; finishes the request where plain decoding would. True if it is finished now."""
        self.output_token_ids.append(token)
        stopped = self.stop_checker(self)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped
        elif self.matcher is not None and (end := self.matcher.accept(token)):
            self.finish_reason, self.stop_reason = ("stop", None) if end == ENDED else ("error", self.matcher.error)
        elif self.num_remaining <= 0:
            self.finish_reason = "length"
        if self.finish_reason:
            self.status = Status.FINISHED
        return self.finished

    def count_drafted(self, tree, kept):
        """Number of nodes of a step's Tree that could be accepted, before `look_ahead`, and of their depths.

        kept: tokens handed back of the step
        """
        depth = min(self.num_remaining + kept - 1, tree.max_depth)  # deeper nodes were never candidates
        if self.matcher is None:
            return tree.count_drafted(depth), depth
        return (min(depth, len(self.matcher.drafts)),) * 2  # a chain

    def look_ahead(self):
        """Let its grammar, if it has one, find what may follow the tokens handed back."""
        if self.matcher is not None and not self.finished and self.matcher.look_ahead():
            self._end_broken()

    def _end_broken(self):
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, "error", self.matcher.error
