"""The assistant's tokens of a conversation: exactly its text is supervised, and a template that cannot tell is refused."""

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.tests.train.data.chat_templates import STYLES, byte_tokenizer
from headstart.tests.train.data.test_conversations import GOOD
from headstart.train.data import encoding as data
from headstart.train.data.encoding import choose_encodable, encode_conversations

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
    assert supervised_text(tokenizer, MESSAGES) == "Un é.<|im_end|>Deux.<|im_end|>"
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
    assert supervised_text(tokenizer, [greeting]) == "Hello.<|im_end|>"
    assert supervised_text(tokenizer, [greeting, *MESSAGES[1:3]]) == "Hello.<|im_end|>Un é.<|im_end|>"


def test_an_opening_answer_of_which_the_template_drops_the_thoughts_is_supervised():
    tokenizer = make_tokenizer(CHATML.replace("m['content'] | trim", "m['content'].split('</think>')[-1] | trim"))
    greeting = {"role": "assistant", "content": "So.</think>Hello."}
    assert supervised_text(tokenizer, [greeting]) == "Hello.<|im_end|>"
    assert supervised_text(tokenizer, [greeting, *MESSAGES[1:3]]) == "Hello.<|im_end|>Un é.<|im_end|>"


def test_template_that_renders_the_last_turn_unlike_earlier_ones_is_understood():
    expected = "Un é.<|im_end|><think></think>Deux.<|im_end|>"
    assert supervised_text(make_tokenizer(THINKING), MESSAGES) == expected


@pytest.mark.parametrize("template", [MARKED, CHATML, THINKING], ids=["markers", "rendering", "thinking"])
@pytest.mark.parametrize("cut", [(2,), (4,), (2, 4)])
def test_end_that_an_answer_cut_off_never_had_is_not_supervised(template, cut):
    tokenizer = make_tokenizer(template)
    messages = [{**one, "finish_reason": "length"} if place in cut else one for place, one in enumerate(MESSAGES)]
    thought = "<think></think>" if template == THINKING else ""
    first, last = ("" if place in cut else "<|im_end|>" for place in (2, 4))
    assert supervised_text(tokenizer, messages) == f"Un é.{first}{thought}Deux.{last}"
    assert encode_conversation(tokenizer, messages)[0] == encode_conversation(tokenizer, MESSAGES)[0]


def test_content_equal_to_other_text_is_not_confused():
    messages = [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}]
    ids, supervised = encode_conversation(make_tokenizer(CHATML), messages * 2)
    assert supervised == [False] * (len(ids) // 4) + [*supervised[len(ids) // 4 :]]
    assert supervised_text(make_tokenizer(CHATML), messages * 2) == "same<|im_end|>" * 2


def test_many_conversations_are_encoded_as_each_alone(monkeypatch):
    monkeypatch.setattr(data, "BATCH", 3)
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


THANKS = {"role": "user", "content": "Thanks."}


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_a_few_conversations_that_the_template_refuses_are_left_out_and_counted(template):
    """Of more than a tenth the first is an error that counts them, too."""
    tokenizer, said = make_tokenizer(STRICT + template), []
    system = [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]
    silent = [THANKS, {"role": "assistant", "content": "", "weight": 0}]
    good = [GOOD["messages"]] * 18
    found = encode_conversations(tokenizer, [*good[:9], system, *good[9:], silent], note=said.append)
    assert found == encode_conversations(tokenizer, good)
    (text,) = said
    assert "2 of 20 conversations are left out: 1 refused by the chat template, 1 whose assistant's tokens" in text
    assert "The first: the chat template of '' refuses a conversation: System role not supported" in text
    with pytest.raises(ValueError, match=r"System role.*\n\(2 of 19 conversations are left out"):
        encode_conversations(tokenizer, [*good[1:], system, silent])


def test_held_out_conversations_that_the_template_refuses_are_left_out():
    tokenizer, said = make_tokenizer(STRICT + CHATML), []
    system = [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]
    assert choose_encodable(tokenizer, [system, GOOD["messages"], system], said.append) == [GOOD["messages"]]
    assert said == ["2 of 3 conversations to measure on are left out: 2 refused by the chat template"]
    assert choose_encodable(tokenizer, [], said.append) == []
    assert choose_encodable(None, [], said.append) == [], "no template is asked for"
    with pytest.raises(ValueError, match="System role not supported"):
        choose_encodable(tokenizer, [system], said.append)


def test_error_of_python_in_a_template_is_a_refusal():
    tokenizer = make_tokenizer(CHATML.replace("m['role'] }}", "m['role'] + (1 if 'x' in m['content'] else '') }}"))
    good, bad = GOOD["messages"], [{"role": "user", "content": "x"}, GOOD["messages"][1]]
    assert len(encode_conversations(tokenizer, [*[good] * 9, bad])) == 9


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("DeepSeek-R1-Distill", "Un é.<|end_of_sentence|>Deux.<|end_of_sentence|>"),
        ("Qwen3-Thinking", "Un é.<|im_end|>\n</think>\n\nDeux.<|im_end|>"),
        ("Mistral v0.3", " Un é.</s> Deux.</s>"),
        ("Harmony", "<|channel|>final<|message|>Un é.<|channel|>final<|message|>Deux.<|return|>"),
        ("Phi-3", "Un é.<|end|>Deux.<|end|>"),
    ],
)
def test_turns_that_later_ones_change_or_that_begin_unlike_the_prompt_are_found(style, expected):
    style = STYLES[style]
    tokenizer = byte_tokenizer(style.template, style.special)
    messages = [*MESSAGES[:4], {"role": "assistant", "content": "Deux."}]
    assert supervised_text(tokenizer, messages) == expected


def test_runs_of_the_first_rules_keep_the_newline_after_the_end():
    for template in (MARKED, CHATML):
        tokenizer = make_tokenizer(template)
        ((ids, old),) = encode_conversations(tokenizer, [MESSAGES], rules=0)
        ((same, new),) = encode_conversations(tokenizer, [MESSAGES])
        assert ids == same
        assert tokenizer.decode([i for i, mark in zip(ids, old) if mark]) == "Un é.<|im_end|>\nDeux.<|im_end|>\n"
        assert tokenizer.decode([i for i, a, b in zip(ids, old, new) if a != b]) == "\n\n"


def test_newline_that_ends_an_answer_without_an_end_token_stays():
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>\n{% endfor", "\n{% endfor"))
    assert supervised_text(tokenizer, MESSAGES) == "Un é.\nDeux.\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MARKED.replace("<|im_end|>\n{% endgen", "{% endgen", 1).replace("eration %}{% else", "eration %}<|im_end|>{% else", 1),
         r"the {% generation %} markers of the chat template leave '<\|im_end\|>' out.*move {% endgeneration %} after it"),
        (CHATML.replace("<|im_end|>\n{% endfor", "\n{% endfor"),
         r"closes no answer with a special token.*\(the tokenizer's is '<\|im_end\|>'\), write it after"),
    ],
    ids=["outside the markers", "never written"],
)  # fmt: skip
def test_end_token_that_is_never_supervised_is_told(template, message):
    said = []
    encode_conversations(make_tokenizer(template), [MESSAGES], note=said.append)
    (text,) = said
    assert re.search(message, text)
    for rules in (0, 1):
        assert encode_conversations(make_tokenizer(CHATML), [MESSAGES], note=said.append, rules=rules)
    assert len(said) == 1


def test_only_answers_cut_off_say_nothing_of_end_tokens():
    said, cut = [], [MESSAGES[1], {**MESSAGES[2], "finish_reason": "length"}]
    encode_conversations(make_tokenizer(CHATML), [cut], note=said.append)
    assert said == []


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_answer_of_weight_0_is_not_supervised(template):
    messages = [{**one, "weight": 0} if place == 2 else one for place, one in enumerate(MESSAGES)]
    tokenizer = make_tokenizer(template)
    assert supervised_text(tokenizer, messages) == "Deux.<|im_end|>"
    assert encode_conversation(tokenizer, messages)[0] == encode_conversation(tokenizer, MESSAGES)[0]


TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
CALLING = [
    {"role": "user", "content": "Time?", "tools": TOOLS},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
    },
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
]


def test_tools_of_each_conversation_are_its_own_in_a_template_with_markers():
    template = "{% if tools %}<tools>{{ tools | tojson }}{{ 'tool_calls' | length }}</tools>{% endif %}" + MARKED
    tokenizer = make_tokenizer(template)
    conversations = [GOOD["messages"], CALLING, GOOD["messages"]]
    texts = [tokenizer.decode(ids) for ids, _ in encode_conversations(tokenizer, conversations)]
    assert ["clock" in text for text in texts] == [False, True, False]


def test_fields_that_the_template_does_not_write_are_counted():
    said, thinking = [], [GOOD["messages"][0], {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]
    in_content = [GOOD["messages"][0], {"role": "assistant", "content": "<think>\nSo.\n</think>a"}]
    with_tools = [{**GOOD["messages"][0], "tools": TOOLS}, GOOD["messages"][1]]
    drops = CHATML.replace("m['content'] | trim", "m['content'].split('</think>')[-1] | trim")
    conversations = [thinking, in_content, with_tools, GOOD["messages"]]
    assert len(encode_conversations(make_tokenizer(drops), conversations, note=said.append)) == 4
    assert said == [
        "the chat template does not write tools: those of 1 conversations are left out",
        "the chat template does not write the thoughts of 2 of 2 answers that have any: they are left out (many templates keep "
        "only those of the last answer)",
    ]
    with pytest.raises(ValueError, match=r"calls of tools, which the chat template does not render.*Time\?"):
        encode_conversation(make_tokenizer(CHATML), CALLING)


@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["markers", "rendering"])
def test_a_text_longer_than_the_model_takes_is_no_warning(template, caplog):
    """It is split or cut into rows, and the library's words would stand in the middle of the progress bar."""
    tokenizer = make_tokenizer(template)
    tokenizer.model_max_length = 8
    cut = MESSAGES[:-1] + [MESSAGES[-1] | {"finish_reason": "length"}]
    assert len(encode_conversation(tokenizer, cut)[0]) > 8
    assert not tokenizer.deprecation_warnings
