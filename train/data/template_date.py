"""Date of chat templates that print today's: a run keeps that of its start, or it could not go on with the same rows tomorrow."""

import re
from datetime import datetime

_CALL = re.compile(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")


def check_date(date: str) -> None:
    """ValueError unless the date is YYYY-MM-DD, or empty."""
    try:
        datetime.strptime(date or "2000-01-01", "%Y-%m-%d")
    except ValueError:
        raise ValueError(f"template_date must be a date as 2026-12-31, got {date!r}") from None


def prints_date(tokenizer) -> bool:
    """Whether the tokenizer's chat template prints today's date."""
    return "strftime_now(" in str(tokenizer.chat_template)


def set_date(tokenizer, date: str) -> None:
    """Let the tokenizer's chat template print this date (YYYY-MM-DD) instead of today's.

    Raises ValueError for a template that computes the format of its date.
    """
    day = datetime.strptime(date, "%Y-%m-%d")

    def dated(template):
        template = _CALL.sub(lambda call: repr(day.strftime(call[1] or call[2] or "")), template)
        if "strftime_now(" in template:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} prints today's date in a format that it computes, so the rows "
                "would differ tomorrow: write the format, or the date, into the template"
            )
        return template

    found = tokenizer.chat_template
    if isinstance(found, dict):
        tokenizer.chat_template = {name: dated(template) for name, template in found.items()}
    else:
        tokenizer.chat_template = dated(found)
