"""/v1/chat/completions: the next message of a conversation."""

from .answer import Answer
from .token_logprobs import chat_logprobs, prompt_logprobs


class ChatAnswer(Answer):
    """The answer to ChatFields."""

    KIND, CHUNK = "chat.completion", "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def whole_fields(self, deltas):
        told = {}
        if self.fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs, self.service.texts)
        if self.asks_ids:
            told["prompt_token_ids"] = self.prompts[0].token_ids
        return told

    def choice(self, delta):
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(delta, {"message": message})

    def start(self):
        """The role, for every choice."""
        more = {"prompt_token_ids": self.prompts[0].token_ids} if self.asks_ids else {}
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [({"index": index, **role}, more) for index in range(self.n)]

    def chunk(self, delta):
        choice = self._choice(delta, {"delta": {"content": delta.text} if delta.text else {}}) | self.speculation(delta)
        told = delta.text or choice["logprobs"] or self.asks_ids or delta.finish_reason is not None
        told = told or choice.get("speculation")
        return (choice if told else None), {}

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
