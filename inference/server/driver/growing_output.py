"""An output that grows, on the HTTP side: from the engine's tokens to deltas with the text that is final. No torch."""

from dataclasses import dataclass

from ...engine.metrics import RequestStateStats, SpecDecodeMetrics
from ...engine.stopping import GrowingText, StopChecker, final_text, stable_length
from ...outputs import entries_of, prompt_entries_of


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


class GrowingOutput:
    """One output.  tokenizer, eos_token_ids: those of the engine; params: SamplingParams

    It has what final_text reads of a Request: output_token_ids, finish_reason, stop_reason, stop_checker. Where it ends, the engine
    has decided.
    """

    def __init__(self, tokenizer, eos_token_ids, params):
        self.output_token_ids, self.finish_reason, self.stop_reason = [], None, None
        self.stop_checker = StopChecker(tokenizer, eos_token_ids, params)
        self._params, self._eos_token_ids = params, eos_token_ids
        self._text, self._num_shown = GrowingText(self.stop_checker), 0

    def grow(self, tokens):
        """Take the Tokens of this output that are next.  -> Delta"""
        self.output_token_ids += tokens.token_ids
        end = {}
        if tokens.end is not None:
            self.finish_reason, self.stop_reason, drafts, times = tokens.end
            by_eos = self.stop_reason in self._eos_token_ids and not self._params.ignore_eos
            told = None if by_eos else self.stop_reason
            end = dict(finish_reason=self.finish_reason, stop_reason=told, drafts=drafts, times=times)
        return Delta(
            tokens.prompt,
            tokens.sample,
            self._new_text(tokens.end is not None),
            tokens.token_ids,
            tokens.accepted_drafts,
            entries_of(tokens.logprobs),
            prompt_entries_of(tokens.prompt_logprobs),
            tokens.num_cached_tokens,
            **end,
        )

    def _new_text(self, ended):
        if ended:
            text = final_text(self)
            end = len(text)
        else:
            text = self._text.of(self.output_token_ids)
            end = max(stable_length(text, self._params.stop), self._num_shown)
        new, self._num_shown = text[self._num_shown : end], end
        return new
