"""A request and its life: waiting -> prefilling -> running -> finished. No torch.

One request is one output sequence; a prompt asked for n outputs becomes n requests with sample indices 0..n-1.
"""

import enum
from dataclasses import dataclass, field

from .metrics import SpecDecodeMetrics


class Status(enum.Enum):
    WAITING = "waiting"  # no pages yet
    PREFILLING = "prefilling"  # holds pages; the prompt's KV is being computed
    RUNNING = "running"  # decoding
    FINISHED = "finished"


@dataclass
class Request:
    """One output being made. `committed` tokens have their KV in the cache for good; while running, the newest token (the
    root of the next tree) is not among them."""

    request_id: int
    prompt_token_ids: list[int]
    params: object  # SamplingParams
    seed: int
    sample_index: int
    max_new_tokens: int  # max_tokens cut to what max_model_len leaves
    stop_checker: object  # (request) -> (finish_reason, text length) | None, called after every appended token
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list | None = None
    committed: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    output_text: str = ""
    metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)

    @property
    def num_tokens(self):
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self):
        return self.max_new_tokens - len(self.output_token_ids)

    @property
    def finished(self):
        return self.status is Status.FINISHED

    def append(self, token):
        """Add one emitted token; finishes the request where plain decoding would. True if it is finished now."""
        self.output_token_ids.append(token)
        stopped = self.stop_checker(self)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped
        elif self.num_remaining <= 0:
            self.finish_reason = "length"
        if self.finish_reason:
            self.status = Status.FINISHED
        return self.finished
