"""`headstart serve --chat-template FILE`: read the template, and try it before the engine is built."""

import traceback
from pathlib import Path

OPTION = "--chat-template"
ADVICE = f"mend it, or leave {OPTION} out for the tokenizer's own"
# A template may want a system's message first, so it is asked a second time with one.
TRIALS = (
    [{"role": "user", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
)


def read_chat_template(given):
    """The text of --chat-template: a file's, or what was given if it cannot be a path. ValueError if there is no such file."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{OPTION} {given} cannot be read: {reason}; name a file of a Jinja template") from None


def check_chat_template(given, template, tokenizer):
    """ValueError, with file and line, for a template that renders no conversation.

    given: the value of the option; template: its text; tokenizer: the target's, None if it has none
    """
    from jinja2 import TemplateError

    from ..inference.prompt_files import render_chat

    if tokenizer is None:
        raise ValueError(
            f"{OPTION} needs a tokenizer, and this model has none: give --tokenizer, or leave {OPTION} out"
        )
    errors = []
    for trial in TRIALS:
        try:
            render_chat(tokenizer, trial, chat_template=template)
            return
        except Exception as error:  # a template may raise anything
            errors.append(error.__cause__ or error)
    refusals = [type(error) is TemplateError for error in errors]  # by raise_exception: the template's own word
    which = -1 if all(refusals) else refusals.index(False)
    raise ValueError(f"{_place(given, errors[which])}: {_words(errors[which], refusals[which])}; {ADVICE}")


def _place(given, error):
    """Where in the template an error is."""
    name = f"{OPTION} {given}" if given and "{" not in given else OPTION
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return name if line is None else f"{name}, line {line}"


def _words(error, refuses):
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"no Jinja template: {error.message}"
    what = f"it refuses ({error})" if refuses else f"{type(error).__name__}: {error}"
    return f"a user's message cannot be rendered: {what}"
