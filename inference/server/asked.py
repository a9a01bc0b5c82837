"""From a request's fields to checked prompts: text and chat template, sampling parameters, and the caps of one request.

All of it may run in any thread. The work is the tokenizer's, so a long prompt does not stop the event loop.
"""

import inspect
from dataclasses import replace

from ..grammar.structured_outputs import StructuredOutputsParams
from ..prompt_files import render_chat
from ..sampling_params import SamplingParams
from .errors import ApiError, value_error
from .fields import SAMPLING
from .tools.call_styles import STYLES, style_of
from .tools.tool_fields import messages_for_template


class Asker:
    """Makes checked prompts of fields.  checker: PromptChecker; defaults: generation_defaults of the LLM; options: ServerOptions"""

    def __init__(self, checker, defaults, options):
        self.tokenizer, self.max_model_len, self.vocab_size = (
            checker.tokenizer,
            checker.max_model_len,
            checker.vocab_size,
        )
        self._checker, self._options = checker, options
        self.chat_template = options.chat_template or getattr(self.tokenizer, "chat_template", None)
        self.call_style = options.tool_call_parser or style_of(
            str(self.chat_template)
        )  # in which the model writes calls
        # Of a template's own options none may change what apply_chat_template does.
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters if self.tokenizer else ()
        self._not_for_templates = {"messages", "tokenize", "chat_template", *taken} - {"kwargs"}
        self._defaults = {}
        if options.model_defaults:
            own, plain = SamplingParams(**defaults), SamplingParams()
            names = (*SAMPLING, "max_tokens")
            self._defaults = {n: getattr(own, n) for n in names if getattr(own, n) != getattr(plain, n)}

    def completion_prompts(self, fields):
        """The CheckedPrompts of CompletionFields, in their order."""
        given = fields.prompt
        many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if many else [given]
        if len(prompts) > self._options.max_prompts:
            self._refuse("prompt", f"holds {len(prompts)} prompts; at most {self._options.max_prompts} per request")
        if self.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
            self._refuse("prompt", "is text, and this model has no tokenizer: give token ids")
        prompt_logprobs = fields.prompt_logprobs
        if fields.echo and fields.logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = fields.logprobs
        nothing_new = fields.max_tokens == 0 and fields.echo
        length = 1 if nothing_new else self._defaults.get("max_tokens", 16)
        if fields.max_tokens is not None and not nothing_new:
            length = fields.max_tokens
        params = self._params(fields, length, fields.logprobs, prompt_logprobs)
        special = fields.add_special_tokens is not False
        return [self._checked(p, params, number, special, fields, "prompt") for number, p in enumerate(prompts)]

    def chat_prompts(self, fields):
        """The CheckedPrompt of ChatFields, in a list."""
        if fields.top_logprobs is not None and not fields.logprobs:
            self._refuse("top_logprobs", "needs logprobs: true")
        given = (fields.max_completion_tokens, fields.max_tokens)
        length = next((value for value in given if value is not None), self._defaults.get("max_tokens"))
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        try:
            fields.check_tools(str(self.chat_template), self.call_style)
        except ValueError as error:
            raise value_error(error, type(fields).model_fields) from None
        params = self._params(fields, length, logprobs, fields.prompt_logprobs)
        if fields.tool_use == "auto" and STYLES[self.call_style].keeps_special:
            params = replace(params, skip_special_tokens=False)
        text = self.render(fields, fields.tools_for_template)
        return [self._checked(text, params, 0, bool(fields.add_special_tokens), fields, "messages")]

    def render(self, fields, tools=None):
        """The text of a Conversation.  tools: those that the template tells the model of"""
        options = fields.chat_template_kwargs or {}
        for name in options:
            if name in self._not_for_templates:
                self._refuse("chat_template_kwargs", f"cannot set {name!r}")
        going_on = bool(fields.continue_final_message)
        prompt = not going_on if fields.add_generation_prompt is None else fields.add_generation_prompt
        try:
            return render_chat(
                self.tokenizer,
                messages_for_template(fields.messages),
                options,
                tools,
                chat_template=self._options.chat_template,
                add_generation_prompt=prompt,
                continue_final_message=going_on,
            )
        except ValueError as error:
            raise value_error(error, ("add_generation_prompt", "continue_final_message"), "messages") from None
        except (TypeError, AttributeError, KeyError, IndexError, RecursionError):
            raise ApiError(400, "the chat template cannot render this conversation", param="messages") from None

    def tokens(self, text, special):
        """The token ids of a text."""
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]  # else long ones warn

    def _checked(self, prompt, params, number, special, fields, field):
        if isinstance(prompt, str):
            prompt = {"prompt": prompt, "prompt_token_ids": self.tokens(prompt, special)}
        if fields.cache_salt is not None:
            prompt = {
                **(prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}),
                "cache_salt": fields.cache_salt,
            }
        try:
            return self._checker.check(prompt, params, number)
        except ValueError as error:
            if str(error).startswith("structured_outputs "):
                raise _form_error(fields, error) from None
            raise value_error(error, type(fields).model_fields, field) from None

    def _form(self, fields):
        """The StructuredOutputsParams of response_format or structured_outputs, or None."""
        asked, given = fields.response_format, fields.structured_outputs
        tool_use = getattr(fields, "tool_use", "none")
        if tool_use != "none" and (given is not None or (asked is not None and asked.type != "text")):
            name = "response_format" if given is None else "structured_outputs"
            self._refuse(name, 'cannot stand beside tools, which have a form of their own: say tool_choice "none"')
        if tool_use in ("required", "named"):
            # A weak model fills its answer with blanks where it may.
            given = {"json": fields.call_schema, "disable_any_whitespace": True}
        if asked is not None and asked.type != "text":
            if given is not None:
                self._refuse("response_format", "cannot stand beside structured_outputs: give one of them")
            if asked.type == "json_schema" and asked.json_schema is None:
                self._refuse("response_format", "of type json_schema needs json_schema: {name, schema}")
            schema = asked.json_schema and asked.json_schema.schema_
            given = {"json_object": True} if schema is None else {"json": schema}
        try:
            return None if given is None else StructuredOutputsParams(**given)
        except ValueError as error:
            raise _form_error(fields, error) from None

    def _params(self, fields, max_tokens, logprobs, prompt_logprobs):
        """The SamplingParams of SamplingFields, within the caps."""
        options = self._options
        stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        caps = (
            ("n", fields.n or 0, options.max_n),
            ("stop", len(stops), options.max_stops),
            ("logit_bias", len(fields.logit_bias or ()), options.max_biases),
            ("stop_token_ids", len(fields.stop_token_ids or ()), options.max_biases),
            ("bad_words", len(fields.bad_words or ()), options.max_biases),
            ("allowed_token_ids", len(fields.allowed_token_ids or ()), self.vocab_size),
        )
        for name, count, most in caps:
            if count > most:
                self._refuse(name, f"asks for {count}; at most {most} per request")
        for name in ("stop", "bad_words"):
            longest = max(map(len, stops if name == "stop" else fields.bad_words or ()), default=0)
            if longest > options.max_stop_length:
                self._refuse(name, f"holds {longest} characters; at most {options.max_stop_length}")
        asked = type(fields).model_fields
        names = ("top_logprobs" if "top_logprobs" in asked else "logprobs", "prompt_logprobs")
        for name, count in zip(names, (logprobs, prompt_logprobs)):
            if count is not None and not 0 <= count <= options.max_logprobs:
                self._refuse(name, f"must be from 0 to {options.max_logprobs} (--max-logprobs), got {count}")
        if fields.stream_options is not None and not fields.stream:
            self._refuse("stream_options", "needs stream: true")
        if fields.stream and fields.prompt_logprobs is not None:
            self._refuse("prompt_logprobs", "comes with whole answers only: leave out stream")
        given = {name: value for name in SAMPLING if (value := getattr(fields, name)) is not None}
        own = {name: value for name, value in self._defaults.items() if name != "max_tokens"}
        try:
            return SamplingParams(
                **own | given,
                structured_outputs=self._form(fields),
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        except ValueError as error:
            raise value_error(error, type(fields).model_fields) from None

    def _refuse(self, field, words):
        raise ApiError(400, f"{field} {words}", param=field)


def _form_error(fields, error):
    """The ApiError of a form that is refused, which names the field it was given in."""
    name = "response_format" if fields.structured_outputs is None else "structured_outputs"
    if getattr(fields, "tool_use", "none") != "none":
        name = "tools"
    return ApiError(400, str(error).replace("structured_outputs", name, 1), param=name)
