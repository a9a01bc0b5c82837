"""Messages between the HTTP side and the engine's process: plain data.

From the engine: first an EngineInfo (engine_info.py), or Refused if it cannot be built; then, after every step and whenever
commands were obeyed, one pair (news, counts). news: a list of (job, event); the event is Accepted or Refused, then the fields of
Tokens until every output of the job has ended, or GivenUp; counts: counts_of(engine). To the engine: Submit and Cancel. A closed
connection ends both: the server needs no engine any more, or the engine has failed. A job is the work of one HTTP request: its
prompts, each with its outputs. No torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...engine.metrics import RequestStateStats, SpecDecodeMetrics


@dataclass(frozen=True)
class Submit:
    """Start a job.  prompts: CheckedPrompts; streamed: whether every token is told, and not only each finished output"""

    job: int
    prompts: list
    streamed: bool


@dataclass(frozen=True)
class Cancel:
    """Drop what has not ended of a job."""

    job: int


@dataclass(frozen=True)
class Accepted:
    """The job waits in the engine's queue or runs."""


@dataclass(frozen=True)
class Refused:
    """The job can never run: the cache is too small for it. Or the engine cannot be built."""

    reason: str


@dataclass(frozen=True)
class GivenUp:
    """The job broke off in the engine, which goes on."""

    reason: str


class End(NamedTuple):
    """How an output ended.  stop_reason: the string or token id that stopped it"""

    finish_reason: str
    stop_reason: object
    drafts: SpecDecodeMetrics
    times: RequestStateStats


class Tokens(NamedTuple):
    """The new tokens of output number `sample` of prompt number `prompt`.

    accepted_drafts: places in token_ids of accepted drafts, told of streams only. logprobs: of token_ids, None if not asked for.
    prompt_logprobs: of the prompt's tokens but the first, with the first tokens of sample 0, if asked for.
    """

    prompt: int
    sample: int
    token_ids: list[int]
    accepted_drafts: list[int]
    logprobs: object  # TokenLogprobs (inference/engine/logprobs.py), or None
    prompt_logprobs: object  # TokenLogprobs, or None
    num_cached_tokens: int
    end: End | None
