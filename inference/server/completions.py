"""/v1/completions: text that goes on after a prompt."""

from .answer import Answer
from .token_logprobs import CompletionLogprobs, prompt_logprobs


class CompletionAnswer(Answer):
    """The answer to CompletionFields."""

    KIND = CHUNK = "text_completion"
    PREFIX = "cmpl"

    def __init__(self, service, fields, prompts, name):
        super().__init__(service, fields, prompts, name)
        self._nothing_new = fields.max_tokens == 0 and bool(fields.echo)  # one token was made, because one has to be
        self._logprobs, self._prompt_logprobs = {}, {}  # per choice; per prompt

    def count(self, delta):
        super().count(delta)
        if self._nothing_new:
            self.counts.completion = 0

    def choice(self, delta):
        return self._choice(delta, token_ids=self.prompts[delta.prompt].token_ids)

    def chunk(self, delta):
        is_first = self.index(delta) not in self._logprobs
        choice = self._choice(delta, token_ids=self.prompts[delta.prompt].token_ids if is_first else None)
        choice |= self.speculation(delta)
        told = choice["text"] or choice["logprobs"] or self.asks_ids or delta.finish_reason is not None
        told = told or choice.get("speculation")
        return (choice if told else None), {}

    def _choice(self, delta, token_ids):
        """token_ids: the prompt's, with the first delta of a choice"""
        fields, texts = self.fields, self.service.texts
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.prompt] = delta.prompt_logprobs
        text = "" if self._nothing_new else delta.text
        if fields.echo and token_ids is not None:
            text = self._prompt_text(delta.prompt) + text
        logprobs = None
        growing = self._logprobs.setdefault(self.index(delta), CompletionLogprobs(texts, self.as_ids))
        if fields.logprobs is not None:
            ids, entries = ([], []) if self._nothing_new else (delta.token_ids, delta.logprobs or [])
            if fields.echo and token_ids is not None:
                ids, entries = [*token_ids, *ids], [*self._prompt_logprobs[delta.prompt], *entries]
            logprobs = growing.of(ids, entries) if ids else None
        choice = {
            "index": self.index(delta),
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs[delta.prompt], texts)
        if self.asks_ids:
            choice["token_ids"] = [] if self._nothing_new else delta.token_ids
            choice["prompt_token_ids"] = token_ids
        return choice

    def _prompt_text(self, number):
        prompt = self.prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self.service.decode(prompt.token_ids)
