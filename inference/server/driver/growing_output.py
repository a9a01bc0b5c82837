"""An output that grows, as a row of deltas: the text that is final, and the tokens, since the last one. No torch."""

from bisect import bisect_left

from ...engine.stopping import GrowingText, final_text, stable_length
from .messages import Delta


class GrowingOutput:
    """One Request of a job.  prompt: number of its prompt in the job; eos_token_ids: those of the engine"""

    def __init__(self, job, prompt, request, eos_token_ids):
        self.job, self.prompt, self.request = job, prompt, request
        self._eos_token_ids = eos_token_ids
        self._text, self._num_shown, self._num_told = GrowingText(request.stop_checker), 0, 0

    def delta(self):
        """What is new since the last call, after a step that gave the request tokens.  -> Delta"""
        request, first = self.request, self._num_told == 0
        start, end = self._num_told, len(request.output_token_ids)
        self._num_told = end
        drafts = request.accepted_drafts[bisect_left(request.accepted_drafts, start) :]
        new = {}
        if request.finished:
            by_eos = request.stop_reason in self._eos_token_ids and not request.params.ignore_eos
            new = dict(
                finish_reason=request.finish_reason,
                stop_reason=None if by_eos else request.stop_reason,
                drafts=request.metrics,
                times=request.times,
            )
        return Delta(
            self.prompt,
            request.sample_index,
            self._new_text(),
            request.output_token_ids[start:end],
            accepted_drafts=[place - start for place in drafts if place < end],
            logprobs=None if request.logprobs is None else request.logprobs[start:end],
            prompt_logprobs=request.prompt_logprobs if first else None,
            num_cached_tokens=request.num_cached_tokens,
            **new,
        )

    def _new_text(self):
        request = self.request
        if request.finished:
            text = final_text(request)
            end = len(text)
        else:
            text = self._text.of(request.output_token_ids)
            end = max(stable_length(text, request.params.stop), self._num_shown)
        new, self._num_shown = text[self._num_shown : end], end
        return new
