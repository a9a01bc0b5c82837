"""Conversations from every source, the assistant's tokens, and packed rows that keep documents apart."""

import json
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.train.data import conversations as data
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversation, encode_conversations
from headstart.train.data.packing import block_attention_mask, pack

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


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


# Loading


def test_both_shapes_and_all_role_names_become_the_same_messages(tmp_path):
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ]
    }
    openai = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a"},
        ]
    }
    expected = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"))]
    assert load_conversations(write(tmp_path / "a.jsonl", sharegpt, "", openai)) == [expected, expected]
    assert load_conversations(write(tmp_path / "a.json", [sharegpt, openai])) == [expected, expected]


def test_answer_cut_off_stays_marked_and_prompts_alone_can_be_asked_for(tmp_path):
    cut = {"role": "assistant", "content": "a", "finish_reason": "length"}
    whole = {"role": "assistant", "content": "b", "finish_reason": "stop"}
    user = {"role": "user", "content": "q", "finish_reason": None}
    path = write(tmp_path / "a.jsonl", {"messages": [user, cut, user, whole]}, {"messages": [user]})
    plain = {"role": "user", "content": "q"}
    first = [plain, cut, plain, {"role": "assistant", "content": "b"}]
    assert load_conversations(path, answered=False) == [first, [plain]]
    with pytest.raises(ValueError, match="line 2: a conversation without an assistant turn"):
        load_conversations(path)


def test_builtin_set_gives_its_splits(stdlib_source, monkeypatch):
    monkeypatch.setattr("headstart.train.data.stdlib_pairs.stdlib_source_pairs", lambda: stdlib_source)
    train, heldout = load_conversations("stdlib"), load_conversations("stdlib:heldout")
    assert len(train) > 5 * len(heldout) > 500
    assert [turn["role"] for turn in train[0]] == ["user", "assistant"]
    with pytest.raises(ValueError, match="split 'validation'"):
        load_conversations("stdlib:validation")


GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"bad\.jsonl, line 3: not JSON"),
        ({"text": "just text"}, r"bad\.jsonl, line 3: expected an object with a list.*just text"),
        ({"messages": []}, r"bad\.jsonl, line 3: expected"),
        ("[1, 2]", r"bad\.jsonl, line 3: expected"),
        (
            {"messages": [{"role": "user", "content": "alone"}]},
            r"bad\.jsonl, line 3: .*without an assistant turn.*alone",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"line 3: a turn needs a role, one of .*tool"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"line 3: a turn needs a role.*null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"line 3: a turn needs .*image"),
    ],
)
def test_broken_line_is_an_error_that_names_file_and_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        load_conversations(write(tmp_path / "bad.jsonl", GOOD, "", line))


def test_a_few_records_without_use_are_left_out_and_counted(tmp_path):
    """As the sets of the Hub hold them; of more than a tenth the first is an error."""
    user, answer = GOOD["messages"]
    empty = [
        {"conversations": []},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": " "}]},
        {"messages": [user, {"role": ["user"], "content": "x"}, answer]},
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": []}]},
    ]
    odd = [
        {"messages": None, "conversations": [{"from": "User", "value": "q"}, {"from": "bing", "value": "a"}]},
        {"messages": [{"role": "developer", "content": "s"}, user, answer]},
    ]
    said, good = [], [GOOD] * 43
    path = write(tmp_path / "a.jsonl", *good, *empty, *odd)
    found = load_conversations(path, note=said.append)
    system = {"role": "system", "content": "s"}
    assert found == [GOOD["messages"]] * 43 + [[user, answer], [system, user, answer]]
    (text,) = said
    assert (
        "5 of 50 records are left out: 2 without an answer, 1 without turns, 1 with a turn of another role, 1 with a"
        in text
    )
    assert "The first: " in text
    assert "line 44: expected an object" in text
    with pytest.raises(ValueError, match=r"line 43: expected an object .*\n.*of 49 records 2 without an answer"):
        load_conversations(write(tmp_path / "b.jsonl", *good[1:], *empty, *odd))


def test_half_a_character_becomes_the_sign_for_one(tmp_path):
    line = (
        '{"messages": [{"role": "user", "content": "q \\ud83d"}, {"role": "assistant", "content": "\\ud83d\\ude00"}]}'
    )
    (messages,) = load_conversations(write(tmp_path / "a.jsonl", line))
    assert [message["content"] for message in messages] == ["q \ufffd", "\U0001f600"]


def test_broken_json_file_names_the_place(tmp_path):
    with pytest.raises(ValueError, match=r"bad\.json, line 2: not JSON"):
        load_conversations(write(tmp_path / "bad.json", "[", "oops]"))
    with pytest.raises(ValueError, match="expected a JSON list"):
        load_conversations(write(tmp_path / "bad.json", GOOD))
    with pytest.raises(ValueError, match=r"line 2: not JSON .*one object per line\? then name it \.jsonl"):
        load_conversations(write(tmp_path / "bad.json", GOOD, GOOD))
    with pytest.raises(ValueError, match=r"item 2.*without an assistant turn"):
        load_conversations(write(tmp_path / "bad.json", [GOOD, {"messages": GOOD["messages"][:1]}]))


def test_missing_empty_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read: No such file"):
        load_conversations(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no conversations"):
        load_conversations(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match="no split 'test'"):
        load_conversations(write(tmp_path / "good.jsonl", GOOD) + ":test")
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        load_conversations(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ValueError, match=r"the data folder .*nowhere does not exist"):
        load_conversations(str(tmp_path / "nowhere"))


def test_dataset_folders_load_whether_saved_or_made_of_jsonl(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    other = {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]}
    datasets.Dataset.from_list([GOOD, other]).save_to_disk(tmp_path / "saved")
    splits = {"train": datasets.Dataset.from_list([GOOD]), "test": datasets.Dataset.from_list([other])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines" / "train.jsonl", GOOD, other)
    both = [GOOD["messages"], other["messages"]]
    datasets.Dataset.from_list([GOOD, other]).to_parquet(tmp_path / "one.parquet")
    assert load_conversations(str(tmp_path / "one.parquet")) == both
    assert load_conversations(str(tmp_path / "saved")) == both
    assert load_conversations(str(tmp_path / "lines")) == both
    assert load_conversations(f"{tmp_path / 'splits'}:test") == both[1:]
    with pytest.raises(ValueError, match=r"no split 'dev', only train, test: name one, as .*splits:train"):
        load_conversations(f"{tmp_path / 'splits'}:dev")
    with pytest.raises(ValueError, match="saved as one split"):
        load_conversations(f"{tmp_path / 'saved'}:test")


def test_dataset_that_cannot_be_loaded_says_what_data_may_be(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"'nobody/nothing' cannot be loaded.*needs the network"):
        load_conversations("nobody/nothing")  # the tests run offline
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_conversations(str(tmp_path / "empty"))


def test_missing_datasets_library_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the `datasets` library"):
        load_conversations("somebody/something")


# Masks


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


# Packing


def documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(1, 50, (n,), generator=generator).tolist(), [i % 2 == 1 for i in range(n)]) for n in lengths]


LENGTHS = [7, 40, 13, 1, 0, 33, 20, 5, 19, 64, 2, 31, 17, 29]


def test_every_document_lies_whole_in_one_row_with_positions_from_zero():
    encoded = documents(LENGTHS)
    rows = pack(encoded, 37, pad_token_id=99)
    found = []
    for row in range(len(rows.input_ids)):
        ids = rows.document_ids[row]
        for document in ids[ids >= 0].unique_consecutive().tolist():
            here = ids == document
            found.append(document)
            assert rows.input_ids[row][here].tolist() == encoded[document][0][:37]
            assert rows.supervised[row][here].tolist() == encoded[document][1][:37]
            assert rows.position_ids[row][here].tolist() == list(range(int(here.sum())))
    assert sorted(found) == [i for i, n in enumerate(LENGTHS) if n]
    padding = rows.document_ids == -1
    assert (rows.input_ids[padding] == 99).all()
    assert not rows.supervised[padding].any()
    assert not rows.position_ids[padding].any()
    assert rows.num_cut == sum(n > 37 for n in LENGTHS)
    assert rows.input_ids.dtype == rows.position_ids.dtype == rows.document_ids.dtype == torch.int64


def test_packing_wastes_little_and_repeats_itself():
    lengths = torch.randint(20, 500, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    encoded = documents(lengths)
    rows, again = pack(encoded, 1024), pack(encoded, 1024)
    assert (rows.document_ids < 0).float().mean() < 0.02
    assert torch.equal(rows.document_ids, again.document_ids)
    assert torch.equal(rows.input_ids, again.input_ids)


def test_impossible_packing_is_refused():
    with pytest.raises(ValueError, match="length 1 is too short"):
        pack(documents([3]), 1)
    with pytest.raises(ValueError, match="nothing to pack"):
        pack(documents([0]), 8)


def test_mask_is_causal_inside_documents_and_padding_sees_itself():
    mask = block_attention_mask(torch.tensor([[4, 4, 9, 9, 9, -1, -1]]))
    assert mask.shape == (1, 1, 7, 7)
    expected = torch.eye(7, dtype=torch.bool)
    expected[1, 0] = expected[3, 2] = expected[4, 2] = expected[4, 3] = True
    assert torch.equal(mask[0, 0], expected)


def test_packed_logits_equal_those_of_each_document_alone():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # sharp attention, so that a wrong mask shows
        parameter.data.mul_(8 if parameter.ndim == 2 else 1)
    encoded = documents(LENGTHS)
    rows = pack(encoded, 64)
    mask = block_attention_mask(rows.document_ids)
    with torch.no_grad():
        packed = model(rows.input_ids, attention_mask=mask, position_ids=rows.position_ids).logits
        causal = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(mask)
        leaky = model(rows.input_ids, attention_mask=causal, position_ids=rows.position_ids).logits
        assert packed.isfinite().all()
        leaks = 0.0
        for document, (ids, _) in enumerate(encoded):
            if ids:
                alone = model(torch.tensor([ids])).logits[0]
                here = rows.document_ids == document
                torch.testing.assert_close(packed[here], alone, atol=1e-5, rtol=1e-5)
                leaks = max(leaks, (leaky[here] - alone).abs().max().item())
    assert leaks > 0.1  # the comparison above would have noticed a mask that lets documents see each other
