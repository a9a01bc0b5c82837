"""Pieces of long conversations that are slices of the whole's tokens: the documents are those of pieces encoded for themselves."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.tests.train.data.chat_templates import STYLES, byte_tokenizer
from headstart.train.data.encoding import encode_places
from headstart.train.data.packed.slices import Slices

# Most pieces of these are slices. In others the system prompt moves to another request, the end of a text is not that of a turn, or
# no special token begins an exchange.
SLICED = ("ChatML", "Llama-3", "Gemma", "Qwen2.5")
REFUSES_SYSTEM = ("Gemma", "Mistral v0.1")
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]


def random_conversation(dice, has_system, has_tools):
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    for number in range(dice.randrange(3, 12)):
        messages.append({"role": "user", "content": f" {number}?" + "q é\n" * dice.randrange(20)})
        answer = {"role": "assistant", "content": f"A{number}. " + "a " * dice.randrange(15)}
        answer |= dice.choice([{}, {}, {"weight": 0}, {"finish_reason": "length"}, {"reasoning_content": "Hm."}])
        messages.append(answer)
    if has_tools:
        messages[0]["tools"] = TOOLS
    return messages


def encoded(tokenizer, conversations, row_length, document):
    found, places = encode_places(tokenizer, conversations, rules=2, row_length=row_length, document=document)
    return list(found), places.tolist()


@pytest.mark.parametrize("document", ["conversation", "answer"])
@pytest.mark.parametrize("style", STYLES)
def test_documents_are_those_of_pieces_encoded_for_themselves(style, document, monkeypatch):
    tokenizer, dice = byte_tokenizer(STYLES[style].template, STYLES[style].special), random.Random(0)
    kinds = [(has_system, has_tools) for has_system in (False, True) for has_tools in (False, True)]
    kinds = [kind for kind in kinds if not (kind[0] and style in REFUSES_SYSTEM)]
    conversations = [random_conversation(dice, *kind) for kind in kinds * 2]
    made, slices_of = [], Slices.of
    monkeypatch.setattr(Slices, "of", lambda self, piece: made.append(slices_of(self, piece)) or made[-1])
    found = [encoded(tokenizer, conversations, length, document) for length in (150, 400)]
    if style in SLICED and document == "conversation":
        assert sum(one is not None for one in made) > len(made) / 2
    monkeypatch.setattr(Slices, "of", lambda self, piece: None)
    assert found == [encoded(tokenizer, conversations, length, document) for length in (150, 400)]


def chars_tokenizer(template, *special):
    """A tokenizer of single letters that merges x and y, of a whole text between its special tokens."""
    letters = sorted({*"xyzq: \nusertan.▁"})
    vocab = {token: number for number, token in enumerate([*special, *letters, "xy"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("x", "y")]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        additional_special_tokens=list(special[1:]),
        chat_template=template,
    )


def turns_of(*contents):
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("template", "special", "contents", "told"),
    [
        # Encoded for themselves, later pieces begin with a token that the whole does not hold.
        (
            "x{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}",
            (),
            ("qqqq", "tt", *("yyqq", "tt") * 3),
            "xy",
        ),
        # Without a head, later pieces begin the text, and so with a space.
        ("{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}", (), ("qqqq", "tt") * 4, "▁"),
        # Turns are numbered.
        (
            "{% for m in messages %}{{ '<|start|>' ~ 'xyzqtanser'[loop.index] ~ m.content ~ eos_token }}{% endfor %}",
            ("<|start|>",),
            ("qq", "tt") * 4,
            "y",
        ),
    ],
    ids=["merges", "space", "numbers"],
)
def test_what_the_whole_does_not_hold_is_encoded(template, special, contents, told, monkeypatch):
    tokenizer = chars_tokenizer(template, "<|end|>", *special)
    if told == "▁":
        tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    found = encoded(tokenizer, [turns_of(*contents)], 13, "conversation")
    assert len(found[0]) > 1
    assert tokenizer.convert_tokens_to_ids(told) in found[0][1][0]
    monkeypatch.setattr(Slices, "of", lambda self, piece: None)
    assert found == encoded(tokenizer, [turns_of(*contents)], 13, "conversation")


def test_a_special_token_that_takes_the_space_before_it_is_no_border(monkeypatch):
    template = "{% for m in messages %}{{ '<|start|>' ~ m.content ~ '<|end|> ' }}{% endfor %}"
    tokenizer = chars_tokenizer(template, "<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|start|>", special=True, lstrip=True)]})
    turns = turns_of(*["qqqq"] * 8)
    found = encoded(tokenizer, [turns], 16, "conversation")
    assert len(found[0]) > 1
    monkeypatch.setattr(Slices, "of", lambda self, piece: None)
    assert found == encoded(tokenizer, [turns], 16, "conversation")
