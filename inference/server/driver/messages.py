"""Messages between the HTTP side and the engine: plain data, so that they could also travel between two processes.

To the engine: Submit, Cancel, Stop. From it, each with the number of its job: Accepted or Refused, then Delta until every output of
the job has ended, or Failed instead. A job is the work of one HTTP request: its prompts, each with its outputs. No torch.
"""

from dataclasses import dataclass

from ...engine.metrics import RequestStateStats, SpecDecodeMetrics


@dataclass(frozen=True)
class Submit:
    """Start a job.  prompts: CheckedPrompts; streamed: whether every piece is told, and not only each finished output"""

    job: int
    prompts: list
    streamed: bool


@dataclass(frozen=True)
class Cancel:
    """Drop what has not ended of a job."""

    job: int


@dataclass(frozen=True)
class Stop:
    """End the thread."""


@dataclass(frozen=True)
class Accepted:
    """The job waits in the engine's queue or runs."""


@dataclass(frozen=True)
class Refused:
    """The job can never run: the cache is too small for it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The engine, or this job in it, broke off: nothing more comes."""

    reason: str


@dataclass(frozen=True)
class Delta:
    """What is new of one output, number `sample` of prompt number `prompt`. All deltas of an output joined are the output.

    accepted_drafts: places in token_ids of accepted drafts. logprobs: one entry per token of token_ids, None if not asked for.
    prompt_logprobs: with the first delta of sample 0, if asked for. finish_reason, stop_reason, drafts, times: with the last one.
    """

    prompt: int
    sample: int
    text: str
    token_ids: list[int]
    accepted_drafts: list[int] | tuple = ()
    logprobs: list | None = None
    prompt_logprobs: list | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: object = None
    drafts: SpecDecodeMetrics | None = None
    times: RequestStateStats | None = None
