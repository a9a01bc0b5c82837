"""The fields of requests, as pydantic models, and those of OpenAI's and vLLM's APIs that are refused, with the reason.

A field that is in neither is refused by its name. null is the same as leaving a field out. No torch.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...heads.storage.keywords import ANY, Theirs, reject_unknown
from .errors import ApiError, validation_error
from .tools.tool_fields import ToolFields

STRUCTURED = (
    'it is now a part of structured_outputs: {"json": ...}, {"regex": ...}, {"choice": ...} or {"grammar": ...}'
)
NO_TOOLS = "it is now tools and tool_choice"
TEXT_ONLY = "only text is read and written"
NO_BEAMS = "there is no beam search: ask for n outputs"
FIXED_TEMPLATE = "the chat template is the server's: render the text yourself and use /v1/completions"

REFUSED = (
    Theirs("best_of", (None, 1), "ask for n outputs with logprobs and keep the best"),
    Theirs("suffix", (None, ""), "text is written at the end only"),
    Theirs("guided_json", (None,), STRUCTURED),
    Theirs("guided_regex", (None,), STRUCTURED),
    Theirs("guided_choice", (None,), STRUCTURED),
    Theirs("guided_grammar", (None,), STRUCTURED),
    Theirs("guided_whitespace_pattern", (None,), STRUCTURED),
    Theirs("guided_decoding_backend", (None, "auto", "guidance"), "the library is llguidance: leave it out"),
    Theirs("functions", (None, []), NO_TOOLS),
    Theirs("function_call", (None, "none"), NO_TOOLS),
    Theirs("modalities", (None, ["text"]), TEXT_ONLY),
    Theirs("audio", (None,), TEXT_ONLY),
    Theirs("prediction", (None,), "drafts come from the server's own head: leave it out"),
    Theirs("reasoning_effort", (None,), "give what the chat template reads in chat_template_kwargs"),
    Theirs("web_search_options", (None,), "there is no search"),
    Theirs("verbosity", (None,), "ask for it in a message"),
    Theirs("store", (None, False), "nothing is kept"),
    Theirs("metadata", ANY, "nothing is kept"),
    Theirs("service_tier", (None, "auto", "default"), "first come, first served"),
    Theirs("safety_identifier", ANY, "nothing is kept"),
    Theirs("prompt_cache_key", ANY, "prompts that begin alike share their cache"),
    Theirs("priority", (None, 0), "first come, first served"),
    Theirs("use_beam_search", (None, False), NO_BEAMS),
    Theirs("length_penalty", (None, 1, 1.0), NO_BEAMS),
    Theirs("chat_template", (None,), FIXED_TEMPLATE),
    Theirs("documents", (None, []), "give them in a message"),
    Theirs("mm_processor_kwargs", (None, {}), TEXT_ONLY),
    Theirs("truncate_prompt_tokens", (None,), "cut the prompt before the call"),
    Theirs("prompt_embeds", (None,), "prompts are text or token ids"),
    Theirs("logits_processors", (None, []), "use logit_bias, allowed_token_ids, bad_words or the penalties"),
    Theirs("vllm_xargs", (None, {}), "nothing reads them here: leave it out"),
    Theirs("kv_transfer_params", (None,), "the cache stays in this process"),
    Theirs("request_id", (None,), "name the request in the header X-Request-Id"),
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    """`schema` may be left out: any JSON object. Answers follow it whether `strict` is said or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Fields(BaseModel):
    """Unknown fields are collected, and refused by `parse` with the nearest known name or the reason."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None


class SamplingFields(Fields):
    """Fields of both ways to ask for text; those up to speculate go to SamplingParams under the same name."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    speculate: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None  # those of StructuredOutputsParams
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    user: str | None = None  # nothing is kept of it
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_speculation_metrics: bool | None = None
    return_speculation_tokens: bool | None = None

    @property
    def has_form(self):
        """Whether it asks for a form of the answer."""
        asked = self.response_format
        return self.structured_outputs is not None or (asked is not None and asked.type != "text")


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "stop",
    "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "speculate",
)  # fmt: skip


class CompletionFields(SamplingFields):
    """/v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class Conversation(BaseModel):
    """What the chat template is given."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatFields(SamplingFields, Conversation, ToolFields):
    """/v1/chat/completions"""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None  # whether reasoning that is told apart is sent

    @property
    def has_form(self):
        return super().has_form or self.tool_use in ("required", "named")


class TokenizeTextFields(Fields):
    """/tokenize of a text"""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatFields(Fields, Conversation):
    """/tokenize of a conversation"""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """/detokenize"""

    tokens: list[int]


SomeFields = TypeVar("SomeFields", bound=Fields)


def parse(kind: type[SomeFields], body: bytes) -> SomeFields:
    """The fields of a request's body, or ApiError."""
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None
    extra = fields.model_extra or {}
    for name in extra:
        try:
            reject_unknown({name: extra[name]}, tuple(kind.model_fields), "field", REFUSED, whose="OpenAI's or vLLM's,")
        except ValueError as error:
            raise ApiError(400, str(error), param=name) from None
    return fields
