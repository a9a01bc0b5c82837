"""llguidance behind one file: its tokenizer, its limits, and grammars from StructuredOutputsParams. No torch.

Runs in the process of the engine and in the one that tries grammars (trial_process.py).
"""

import json
from importlib import metadata
from typing import NamedTuple

NEEDED = "structured outputs need the library llguidance: pip install 'headstart[serve]'"
# Blanks between the tokens of JSON. Without a bound a weak model fills its whole answer with them.
WHITESPACE = r"[ \t\n\r]{1,64}"
# States of a lexer, which grows while masks are computed. The library's own limits of time for a mask are some 20 ms.
SHARED_STATES, STATES_ALONE = 8192, 50_000
GROWTH = SHARED_STATES * 2048  # bytes of a lexer that outputs share, at most: a state takes 0.4 to 2 kB


class Grammar(NamedTuple):
    """A grammar that has been tried.  text: the library's own; num_bytes: what it takes once compiled, before its lexer grows"""

    text: str
    num_bytes: int

    @property
    def most_bytes(self):
        """What it takes once compiled, however its lexer grows."""
        return self.num_bytes + GROWTH


def library():
    """The module; ValueError where it is missing."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(NEEDED) from None
    return llguidance


def library_version():
    """The version that decides masks, "" where it is missing."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""


def make_tokenizer(text, vocab_size, eos_token_ids):
    """The library's view of a tokenizer.  text: its tokenizer.json; vocab_size: width of a mask in bits"""
    return library().LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)


def make_grammar(kind, value, whitespace=None, flexible=True):
    """The library's text of a grammar.

    kind: one of structured_outputs.KINDS; whitespace: whitespace_pattern; flexible: whether JSON may have any white space
    """
    matcher = library().LLMatcher
    if kind in ("json", "json_object"):
        blanks = {"whitespace_pattern": whitespace or WHITESPACE} if flexible else {"whitespace_flexible": False}
        return matcher.grammar_from_json_schema(value if kind == "json" else '{"type": "object"}', overrides=blanks)
    if kind == "regex":
        return matcher.grammar_from_regex(value)
    if kind == "choice":
        value = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
    elif "::=" in value:
        from llguidance.gbnf_to_lark import any_to_lark

        value = any_to_lark(value)
    return matcher.grammar_from_lark(value)


def compile_grammar(tokenizer, text, shared=False):
    """An LLMatcher at the start of a grammar, to be copied. ValueError in one line if it is wrong or too large.

    shared: whether several outputs copy it: copies share the lexer, which is then kept small
    """
    found, states = library(), SHARED_STATES if shared else STATES_ALONE
    limits = found.LLParserLimits(max_lexer_states=states, verbose_errors=False)
    matcher = found.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return matcher


def one_line(text):
    """The library's words in one line of at most 300 characters."""
    return " ".join(text.split())[:300] or "it is refused without a word"
