"""/v1/chat/completions: the next message of a conversation."""

from .answer import Answer
from .token_logprobs import chat_logprobs, prompt_logprobs


class ChatAnswer(Answer):
    """The answer to ChatFields."""

    KIND, CHUNK = "chat.completion", "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def __init__(self, service, fields, prompts, name):
        super().__init__(service, fields, prompts, name)
        self._readers = [fields.reader() for _ in range(self.n)]  # of tool calls, per choice

    def whole_fields(self, deltas):
        told = {}
        if self.fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs, self.service.texts)
        if self.asks_ids:
            told["prompt_token_ids"] = self.prompts[0].token_ids
        return told

    def choice(self, delta):
        content, calls, reason = self._read(delta)
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            of_message = [{key: value for key, value in call.items() if key != "index"} for call in calls]
            message |= {"content": content or None, "tool_calls": of_message}
        return self._choice(delta, {"message": message}, reason)

    def _read(self, delta):
        """content, tool_calls as those of events, finish_reason"""
        reader, reason = self._readers[self.index(delta)], delta.finish_reason
        if reader is None:
            return delta.text, [], reason
        content, calls = reader.read(delta.text, last=reason is not None)
        return content, calls, reader.ends_as if reason == "stop" and reader.num_calls else reason

    def start(self):
        """The role, for every choice."""
        more = {"prompt_token_ids": self.prompts[0].token_ids} if self.asks_ids else {}
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [({"index": index, **role}, more) for index in range(self.n)]

    def chunk(self, delta):
        content, calls, reason = self._read(delta)
        said = ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
        choice = self._choice(delta, {"delta": said}, reason)
        told = said or choice["logprobs"] or self.asks_ids or delta.finish_reason is not None
        return (choice if told else None), {}

    def _choice(self, delta, said, reason):
        fields, logprobs = self.fields, None
        if fields.logprobs and delta.token_ids:
            count = fields.top_logprobs or 0
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, count, self.service.texts, self.as_ids)
        choice = {
            "index": self.index(delta),
            **said,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }
        if self.asks_ids:
            choice["token_ids"] = delta.token_ids
        return choice
