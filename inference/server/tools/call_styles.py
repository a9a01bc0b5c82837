"""The ways in which models write tool calls in their text, by vLLM's names of their parsers. No torch."""

import secrets
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from .call_readers import FreeCalls, HermesCalls, LlamaCalls, MistralCalls


@dataclass(frozen=True)
class CallStyle:
    """A way to write calls.

    reader: reads them; marks: a chat template that writes calls so holds one of these texts; make_id: makes ids that such a
    template takes back; keeps_special: whether the text has to show special tokens
    """

    reader: type[FreeCalls]
    marks: tuple[str, ...]
    make_id: Callable
    keeps_special: bool = False


def _long_id():
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id():
    """Nine letters and digits: templates of Mistral refuse any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


STYLES = {
    "hermes": CallStyle(HermesCalls, ("<tool_call>",), _long_id),
    "mistral": CallStyle(MistralCalls, ("[TOOL_CALLS]",), _short_id, keeps_special=True),
    "llama3_json": CallStyle(LlamaCalls, ("<|python_tag|>", "Environment: ipython"), _long_id),
}


def style_of(template):
    """The name of the style in which a chat template writes calls, or None."""
    return next((name for name, style in STYLES.items() if any(mark in template for mark in style.marks)), None)
