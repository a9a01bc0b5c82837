"""Results of LLM.generate: a prompt, its outputs, and counts of their accepted drafts."""

from dataclasses import dataclass, field

from .engine.metrics import RequestStateStats, SpecDecodeMetrics
from .engine.stopping import final_text


@dataclass
class CompletionOutput:
    """One output of a prompt.

    finish_reason: "stop", "length", "abort", or "error" if its structured output went beyond a limit; stop_reason: the string or
    token id that stopped it, or what went wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: object = None
    logprobs: list | None = None  # per token {token id: Logprob}, the emitted token first, then the likeliest
    cumulative_logprob: float | None = None  # of the emitted tokens, where logprobs were asked for
    spec_decode_metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)

    def finished(self):
        """Whether the output has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its outputs (`SamplingParams.n` of them)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list | None = None  # None for the first token, then as CompletionOutput.logprobs
    metrics: RequestStateStats | None = None  # times, of the first output
    num_cached_tokens: int | None = None  # tokens of the prompt found in the cache, for the first output


def make_output(text, group, text_of, eos_token_ids):
    """The RequestOutput of one prompt.

    text: the prompt's, or None; group: its Requests, one per output; text_of(token id): its text, None if there is no tokenizer
    """
    outputs, text_of = [], text_of if group[0].params.detokenize else None
    for request in group:
        by_eos = request.stop_reason in eos_token_ids and not request.params.ignore_eos
        outputs.append(
            CompletionOutput(
                index=request.sample_index,
                text=final_text(request),
                token_ids=request.output_token_ids,
                finish_reason=request.finish_reason,
                stop_reason=None if by_eos else request.stop_reason,
                logprobs=entries_of(request.logprobs, text_of),
                cumulative_logprob=None if request.logprobs is None else sum(request.logprobs.own(), 0.0),
                spec_decode_metrics=request.metrics,
            )
        )
    return RequestOutput(
        str(group[0].request_id[0]),
        text,
        group[0].prompt_token_ids,
        outputs,
        prompt_logprobs=prompt_entries_of(group[0].prompt_logprobs, text_of),
        metrics=group[0].times,
        num_cached_tokens=group[0].num_cached_tokens,
    )


def entries_of(logprobs, text_of=None):
    """CompletionOutput.logprobs of a TokenLogprobs or None.  text_of: as TokenLogprobs.entries takes it"""
    return None if logprobs is None else logprobs.entries(text_of)


def prompt_entries_of(logprobs, text_of=None):
    """RequestOutput.prompt_logprobs of a Request's, or None."""
    return None if logprobs is None else [None, *logprobs.entries(text_of)]
