"""StructuredOutputsParams: the form that an output must have. No torch."""

import json
from dataclasses import dataclass, fields

from ...heads.storage.keywords import Theirs, python_value, reject_unknown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MOST_CHARACTERS = 2**18  # of a schema, a grammar, a regular expression, or all choices
REFUSED = (
    Theirs("disable_additional_properties", (False, None), 'say "additionalProperties": false in the schema'),
    Theirs("structural_tag", (None,), "write a grammar"),
    Theirs("backend", (None, "auto", "guidance"), "the library is llguidance: leave it out"),
    Theirs("disable_fallback", (False, None), "there is one library: leave it out"),
)


@dataclass(frozen=True)
class _Fields:
    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class StructuredOutputsParams(_Fields):
    """The form of an output, given in exactly one way; names are vLLM's.

    json: a JSON schema, as a dict or as its text (kept as text). regex: the whole output matches it (Rust's syntax: neither
    look-around nor backreferences). choice: a list of strings, one of which is the output. grammar: in Lark's syntax, its first
    rule `start`, or in GBNF (`root ::= ...`). json_object: True for any JSON object. For both kinds of JSON:
    disable_any_whitespace: no white space between tokens; whitespace_pattern: a regular expression of what may stand there (else up
    to 64 blanks, tabs and newlines). Raises ValueError; what only the library can tell is found when a prompt is checked.
    """

    def __init__(self, *positional, **given):
        names = [field.name for field in fields(_Fields)]
        if positional:
            raise ValueError(f"StructuredOutputsParams takes keywords only, got {positional[0]!r:.60}: write regex=...")
        reject_unknown(given, names, "structured_outputs field", REFUSED)
        given = {name: python_value(value) for name, value in given.items() if name in names and value is not None}
        if isinstance(given.get("json"), dict | bool):
            given["json"] = _as_text(given["json"])
        if isinstance(given.get("choice"), list):
            given["choice"] = tuple(given["choice"])
        super().__init__(**given)
        self._check()

    @property
    def kind(self):
        """The one of KINDS that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _check(self):
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {got}")
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                what = "a JSON schema: a dict, or its text" if name == "json" else "a string that is not empty"
                raise ValueError(f"structured_outputs {name} must be {what}, got {value!r:.60}")
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"structured_outputs {name} must be True or False, got {getattr(self, name)!r:.60}")
        choices = self.choice
        if choices is not None and not (
            isinstance(choices, tuple) and choices and all(isinstance(choice, str) and choice for choice in choices)
        ):
            raise ValueError(
                f"structured_outputs choice must be a list of strings that are not empty, got {choices!r:.60}"
            )
        given = choices or [getattr(self, self.kind) if self.kind != "json_object" else ""]
        length = sum(map(len, [*given, self.whitespace_pattern or ""]))
        if length > MOST_CHARACTERS:
            raise ValueError(
                f"structured_outputs {self.kind} has {length} characters; at most {MOST_CHARACTERS} are taken"
            )
        if self.json is not None and not isinstance(_schema(self.json), dict | bool):
            raise ValueError(f"structured_outputs json must be a JSON schema, an object, got {self.json!r:.60}")


def _as_text(schema):
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs json must be a JSON schema: {error}") from None


def _schema(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs json is no JSON: {error}") from None
