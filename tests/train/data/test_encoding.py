"""The assistant's tokens of a conversation: exactly its text is supervised, and a template that cannot tell is refused."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.tests.train.data.test_conversations import GOOD
from headstart.train.data import encoding as data
from headstart.train.data.encoding import encode_conversations

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim }}<|im_end|>\n{% endgeneration %}{% else %}{{ m['content'] | trim }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only the last turn carries an (empty) chain of thought, as in templates of reasoning models.
THINKING = CHATML.replace(
    "{{ m['content'] | trim }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] | trim }}",
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Un é."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": " Deux.\n"},
]


def encode_conversation(tokenizer, messages):
    """(ids, supervised) of one conversation."""
    return encode_conversations(tokenizer, [messages])[0]


def make_tokenizer(template):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[1], additional_special_tokens=special[:1], chat_template=template
    )


def supervised_text(tokenizer, messages):
    ids, supervised = encode_conversation(tokenizer, messages)
    assert len(ids) == len(supervised)
    return tokenizer.decode([token for token, mark in zip(ids, supervised) if mark])


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_exactly_the_assistants_text_and_its_end_are_supervised(template):
    tokenizer = make_tokenizer(template)
    assert supervised_text(tokenizer, MESSAGES) == "Un é.<|im_end|>\nDeux.<|im_end|>\n"
    ids, _ = encode_conversation(tokenizer, MESSAGES)
    assert (
        ids == tokenizer(tokenizer.apply_chat_template(MESSAGES, tokenize=False), add_special_tokens=False)["input_ids"]
    )


def test_both_derivations_give_the_same_masks():
    conversations = [MESSAGES, MESSAGES[1:3], MESSAGES[:3], [*MESSAGES[3:], *MESSAGES[1:]]]
    assert encode_conversations(make_tokenizer(MARKED), conversations) == encode_conversations(
        make_tokenizer(CHATML), conversations
    )


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_of_a_conversation_that_the_assistant_opens_only_its_words_are_supervised(template):
    """Not the system prompt that a template writes by itself, nor the turn's header."""
    default = "<|im_start|>system\nBe brief.<|im_end|>\n"
    tokenizer = make_tokenizer("{% if messages[0]['role'] != 'system' %}" + default + "{% endif %}" + template)
    greeting = {"role": "assistant", "content": " Hello. "}
    assert supervised_text(tokenizer, [greeting]) == "Hello.<|im_end|>\n"
    assert supervised_text(tokenizer, [greeting, *MESSAGES[1:3]]) == "Hello.<|im_end|>\nUn é.<|im_end|>\n"


def test_an_opening_answer_of_which_the_template_drops_the_thoughts_is_supervised():
    tokenizer = make_tokenizer(CHATML.replace("m['content'] | trim", "m['content'].split('</think>')[-1] | trim"))
    greeting = {"role": "assistant", "content": "So.</think>Hello."}
    assert supervised_text(tokenizer, [greeting]) == "Hello.<|im_end|>\n"
    assert supervised_text(tokenizer, [greeting, *MESSAGES[1:3]]) == "Hello.<|im_end|>\nUn é.<|im_end|>\n"


def test_template_that_renders_the_last_turn_unlike_earlier_ones_is_understood():
    expected = "Un é.<|im_end|>\n<think></think>Deux.<|im_end|>\n"
    assert supervised_text(make_tokenizer(THINKING), MESSAGES) == expected


@pytest.mark.parametrize("template", [MARKED, CHATML, THINKING], ids=["markers", "rendering", "thinking"])
@pytest.mark.parametrize("cut", [(2,), (4,), (2, 4)])
def test_end_that_an_answer_cut_off_never_had_is_not_supervised(template, cut):
    tokenizer = make_tokenizer(template)
    messages = [{**one, "finish_reason": "length"} if place in cut else one for place, one in enumerate(MESSAGES)]
    thought = "<think></think>" if template == THINKING else ""
    first, last = ("" if place in cut else "<|im_end|>\n" for place in (2, 4))
    assert supervised_text(tokenizer, messages) == f"Un é.{first}{thought}Deux.{last}"
    assert encode_conversation(tokenizer, messages)[0] == encode_conversation(tokenizer, MESSAGES)[0]


def test_content_equal_to_other_text_is_not_confused():
    messages = [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}]
    ids, supervised = encode_conversation(make_tokenizer(CHATML), messages * 2)
    assert supervised == [False] * (len(ids) // 4) + [*supervised[len(ids) // 4 :]]
    assert supervised_text(make_tokenizer(CHATML), messages * 2) == "same<|im_end|>\n" * 2


def test_many_conversations_are_encoded_as_each_alone(monkeypatch):
    monkeypatch.setattr(data, "_BATCH", 3)
    tokenizer = make_tokenizer(CHATML)
    conversations = [
        [{"role": "user", "content": "q" * i}, {"role": "assistant", "content": f"a{i}"}] for i in range(8)
    ]
    together = encode_conversations(tokenizer, conversations, progress=True)
    assert together == [encode_conversation(tokenizer, messages) for messages in conversations]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% generation %}" + CHATML + "{% endgeneration %}", "marks every token"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "marks no token"),
        (
            "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "does not show",
        ),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "does not show"),
        ("{% for m in messages %}{{ m['content'] | upper | length }}{% endfor %}", "does not show"),
    ],
)
def test_mask_that_means_nothing_is_an_error_showing_the_example(template, message):
    with pytest.raises(ValueError, match=rf"{message}.*Be brief\."):
        encode_conversation(make_tokenizer(template), MESSAGES)


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([{"role": "system", "content": "Be brief."}, *GOOD["messages"]], "System role not supported"),
        ([{"role": "user", "content": "Be brief."}, *GOOD["messages"]], "Roles must alternate"),
    ],
)
def test_conversation_that_the_template_refuses_is_shown(template, bad, reason):
    """The one of a batch, not its neighbours."""
    tokenizer = make_tokenizer(STRICT + template)
    with pytest.raises(ValueError, match=rf"refuses a conversation: {reason}.*The example: .*Be brief\."):
        encode_conversations(tokenizer, [GOOD["messages"], bad, GOOD["messages"]])
    assert len(encode_conversations(tokenizer, [GOOD["messages"]] * 2)) == 2


def test_template_that_refuses_only_the_parts_of_a_conversation_asks_for_markers():
    wants_user = (
        "{% if not messages | selectattr('role', 'eq', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, *GOOD["messages"][::-1]]
    with pytest.raises(ValueError, match=r"refuses a part of a conversation \(No user\).*generation.*Be brief\."):
        encode_conversation(make_tokenizer(wants_user + CHATML), messages)


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_template_that_refuses_the_start_of_a_conversation_cut_off_shows_the_conversation(template):
    """Where an answer was cut off, the conversation up to it is rendered alone."""
    wants_thanks = "{% if 'thanks' not in messages[-1]['content'] %}{{ raise_exception('No thanks') }}{% endif %}"
    tokenizer = make_tokenizer(wants_thanks + template)
    cut = [*GOOD["messages"], {"role": "user", "content": "Be brief, thanks."}]
    cut[1] = {**cut[1], "finish_reason": "length"}
    with pytest.raises(ValueError, match=r"refuses a part of a conversation \(No thanks\).*Be brief, thanks\."):
        encode_conversations(tokenizer, [cut])


def test_tokenizers_that_cannot_give_masks_are_refused():
    with pytest.raises(ValueError, match="no chat template"):
        encode_conversation(make_tokenizer(None), MESSAGES)

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow gives no character offsets"):
        encode_conversation(Slow(), MESSAGES)
