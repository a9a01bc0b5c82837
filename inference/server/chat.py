"""/v1/chat/completions: the next message of a conversation."""

from .answer import Answer
from .reasoning import Reasoning
from .token_logprobs import chat_logprobs, prompt_logprobs


class ChatAnswer(Answer):
    """The answer to ChatFields."""

    KIND, CHUNK = "chat.completion", "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def __init__(self, service, fields, prompts, name):
        super().__init__(service, fields, prompts, name)
        markers = service.options.reasoning_markers
        self._reasoning = markers and [Reasoning(markers, prompts[0].text) for _ in range(self.n)]
        self._shows_reasoning = fields.include_reasoning is not False

    def whole_fields(self, deltas):
        told = {}
        if self.fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs, self.service.texts)
        if self.asks_ids:
            told["prompt_token_ids"] = self.prompts[0].token_ids
        return told

    def choice(self, delta):
        content, reasoning = self._told(delta)
        if reasoning:
            content = content or None
        return self._choice(delta, {"message": {"role": "assistant", "content": content, "refusal": None, **reasoning}})

    def start(self):
        """The role, for every choice."""
        more = {"prompt_token_ids": self.prompts[0].token_ids} if self.asks_ids else {}
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [({"index": index, **role}, more) for index in range(self.n)]

    def chunk(self, delta):
        content, reasoning = self._told(delta)
        choice = self._choice(delta, {"delta": {"content": content, **reasoning}})
        told = content or reasoning or choice["logprobs"] or self.asks_ids or delta.finish_reason is not None
        return (choice if told else None), {}

    def _told(self, delta):
        """(new text of the answer, {} or the fields of its new reasoning)"""
        if not self._reasoning:
            return delta.text, {}
        ended = delta.finish_reason is not None
        reasoning, content = self._reasoning[self.index(delta)].split(delta.text, ended)
        if not reasoning or not self._shows_reasoning:
            return content, {}
        return content, {"reasoning": reasoning, "reasoning_content": reasoning}

    def _choice(self, delta, said):
        fields, logprobs = self.fields, None
        if fields.logprobs and delta.token_ids:
            count = fields.top_logprobs or 0
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, count, self.service.texts, self.as_ids)
        choice = {
            "index": self.index(delta),
            **said,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.asks_ids:
            choice["token_ids"] = delta.token_ids
        return choice
