"""Which text of a conversation is supervised, for chat templates in the published styles: supervised.md shows all of it.

    python tests/train/data/test_chat_templates.py      # writes supervised.md anew; review the difference

Not shown there: exact token ids, which test_encoding.py checks.
"""

from pathlib import Path

import pytest

from headstart.tests.train.data.chat_templates import STYLES, byte_tokenizer
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.template_date import prints_date, set_date

SNAPSHOT = Path(__file__).with_name("supervised.md")
WRITE_ANEW = "python tests/train/data/test_chat_templates.py"


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
CONVERSATIONS = {
    "single turn": [user("One?"), answer("Un.")],
    "multi-turn": [user("One?"), answer("Un."), user("Two?"), answer("Deux.")],
    "system": [SYSTEM, user("One?"), answer("Un."), user("Two?"), answer("Deux.")],
    "tools": [
        {**user("Time?"), "tools": [TOOL]},
        answer("", tool_calls=[CALL]),
        {"role": "tool", "name": "clock", "content": "12:00"},
        answer("Noon."),
        user("Thanks."),
        answer("Bye."),
    ],
    "thinking": [
        user("One?"),
        answer("Un.", reasoning_content="French."),
        user("Two?"),
        answer("Deux.", reasoning_content="Again."),
    ],
}


def show(style, messages):
    """The rendered conversation with its supervised text in brackets, and what the user is told of it."""
    tokenizer, told = byte_tokenizer(style.template, style.special), []
    if prints_date(tokenizer):
        set_date(tokenizer, "2026-11-23")
    try:
        ((ids, supervised),) = encode_conversations(tokenizer, [messages], note=told.append)
    except ValueError as error:
        return "refused: " + str(error).partition(" The example:")[0].replace("''", "this style")
    text, inside = "", False
    for token, mark in zip([*ids, None], [*supervised, False]):
        text += "" if mark == inside else "⟦" if mark else "⟧"
        text, inside = text + ("" if token is None else tokenizer.decode([token])), mark
    return "\n".join([text.replace("\n", "\\n"), *(f"note: {one}" for one in told)])


def snapshot():
    lines = ["# Supervised text of conversations, by chat template", ""]
    lines += ["⟦In brackets⟧: the text that heads are trained on. A new line of the text is written as \\n."]
    lines += [f"`{WRITE_ANEW}` writes this page; a test compares."]
    for name, style in STYLES.items():
        lines += ["", f"## {name}"]
        for kind, messages in CONVERSATIONS.items():
            lines += ["", f"{kind}:", "", *("    " + line for line in show(style, messages).split("\n"))]
    return "\n".join(lines) + "\n"


def sections(text):
    """{(template, kind of conversation): what is shown}."""
    found, style = {}, None
    for block in text.split("\n\n"):
        if block.startswith("## "):
            style = block[3:]
        elif style and block.endswith(":") and not block.startswith(" "):
            kind = block[:-1]
        elif style:
            found[style, kind] = block.strip("\n")
    return found


@pytest.mark.parametrize("style", STYLES)
def test_supervised_text_is_that_of_the_reviewed_page(style):
    kept = sections(SNAPSHOT.read_text(encoding="utf-8"))
    for kind, messages in CONVERSATIONS.items():
        shown = "\n".join("    " + line for line in show(STYLES[style], messages).split("\n"))
        assert shown == kept[style, kind], f"{style}, {kind}: if that is meant, {WRITE_ANEW}, and review the difference"


def test_the_page_shows_what_is_tested_and_nothing_else():
    assert set(sections(SNAPSHOT.read_text(encoding="utf-8"))) == {(s, k) for s in STYLES for k in CONVERSATIONS}
    assert len(STYLES) >= 15


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
