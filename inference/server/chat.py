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
        # Reasoning comes before free text only: a form begins with the first token.
        markers = None if fields.has_form else service.options.reasoning_markers
        self._reasoning = markers and [Reasoning(markers, prompts[0].text) for _ in range(self.n)]
        self._shows_reasoning = fields.include_reasoning is not False
        self._readers = [fields.reader(service.asker.call_style) for _ in range(self.n)]  # of tool calls, per choice

    def whole_fields(self, deltas):
        told = {}
        if self.fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs, self.service.texts)
        if self.asks_ids:
            told["prompt_token_ids"] = self.prompts[0].token_ids
        return told

    def choice(self, delta):
        content, said, reason = self._read(delta)
        calls = said.get("tool_calls")
        if calls:
            said["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        content = content or None if said else content
        return self._choice(
            delta, {"message": {"role": "assistant", "content": content, "refusal": None, **said}}, reason
        )

    def _read(self, delta):
        """content, reasoning and tool_calls as fields of an event, finish_reason"""
        content, said, reason = delta.text, {}, delta.finish_reason
        if self._reasoning:
            reasoning, content = self._reasoning[self.index(delta)].split(content, ended=reason is not None)
            if reasoning and self._shows_reasoning:
                said |= {"reasoning": reasoning, "reasoning_content": reasoning}
        reader = self._readers[self.index(delta)]
        if reader is not None:
            content, calls = reader.read(content, last=reason is not None)
            said |= {"tool_calls": calls} if calls else {}
            reason = reader.ends_as if reason == "stop" and reader.num_calls else reason
        return content, said, reason

    def start(self):
        """The role, for every choice."""
        more = {"prompt_token_ids": self.prompts[0].token_ids} if self.asks_ids else {}
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [({"index": index, **role}, more) for index in range(self.n)]

    def chunk(self, delta):
        content, said, reason = self._read(delta)
        choice = self._choice(delta, {"delta": {"content": content, **said}}, reason) | self.speculation(delta)
        told = content or said or choice["logprobs"] or self.asks_ids or reason is not None
        told = told or choice.get("speculation")
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
