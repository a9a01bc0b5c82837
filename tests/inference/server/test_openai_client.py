"""The official `openai` client against a server with heads: whole answers and streams, equal to LLM's own."""

import asyncio

import openai
import pytest

from headstart import SamplingParams
from headstart.tests.inference.server.serving import NAME, PROMPTS

MESSAGES = [{"role": "user", "content": PROMPTS[0]}]


@pytest.fixture(scope="module")
def expected(plain_llm):
    """One output of plain decoding with these parameters."""

    def output(prompt, **params):
        return plain_llm.generate([prompt], SamplingParams(**params))[0]

    return output


def test_a_completion_is_that_of_plain_decoding(client, expected):
    params = dict(max_tokens=24, temperature=0.8, seed=7)
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], user="somebody", **params)
    own = expected(PROMPTS[1], **params)
    assert answer.choices[0].text == own.outputs[0].text
    assert answer.choices[0].finish_reason == own.outputs[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == NAME
    assert answer.usage.prompt_tokens == len(own.prompt_token_ids)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(own.prompt_token_ids) + 24
    assert answer.system_fingerprint.startswith("fp_")


def test_a_conversation_is_that_of_llm_chat(client, plain_llm):
    params = dict(max_tokens=40, temperature=0.8, seed=3)
    own = plain_llm.chat(MESSAGES, SamplingParams(**params))[0].outputs[0]
    for name in ("max_tokens", "max_completion_tokens"):
        given = {name: 40, "temperature": 0.8, "seed": 3}
        answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **given)
        assert answer.choices[0].message.content == own.text
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == own.finish_reason
        assert answer.object == "chat.completion"


def test_a_conversation_without_a_limit_goes_on_to_its_end(client, plain_llm):
    own = plain_llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (own.text, "stop")


def test_the_last_message_can_go_on(client, plain_llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "def count_words(text):\n    return"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}
    own = plain_llm.chat(
        messages, SamplingParams(temperature=0, max_tokens=8), add_generation_prompt=False, continue_final_message=True
    )
    answer = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=8, extra_body=extra
    )
    assert answer.choices[0].message.content == own[0].outputs[0].text


def test_prompts_are_texts_or_token_ids_or_lists_of_them(client, served, expected):
    params = dict(max_tokens=6, temperature=0.9, seed=5)
    texts = [expected(prompt, **params).outputs[0].text for prompt in PROMPTS[:2]]
    ids = [served.llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:2]]
    for prompt, count in ((PROMPTS[0], 1), (ids[0], 1), (PROMPTS[:2], 2), (ids, 2)):
        answer = client.completions.create(model=NAME, prompt=prompt, **params)
        assert [choice.text for choice in answer.choices] == texts[:count]
        assert [choice.index for choice in answer.choices] == list(range(count))


def test_the_first_of_n_outputs_is_the_only_one_of_one(client, expected):
    params = dict(max_tokens=10, temperature=1.0, seed=11)
    own = [output.text for output in expected(PROMPTS[1], n=3, **params).outputs]
    answer = client.completions.create(model=NAME, prompt=[PROMPTS[1], PROMPTS[2]], n=3, **params)
    assert [choice.text for choice in answer.choices[:3]] == own
    assert len({choice.index for choice in answer.choices}) == 6
    assert client.completions.create(model=NAME, prompt=PROMPTS[1], **params).choices[0].text == own[0]
    assert len(set(own)) > 1


def test_every_sampling_parameter_reaches_the_engine(client, expected):
    given = [
        dict(stop=["\n", "x"]),
        dict(stop="return", include_stop_str_in_output=True),
        dict(logit_bias={"50": 20, "60": 25}),
        dict(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2),
        dict(top_p=0.5, top_k=5, min_p=0.05),
        dict(min_tokens=12, ignore_eos=True),
        dict(stop_token_ids=list(range(0, 6000, 7))),
        dict(bad_words=["return", "self"]),
        dict(allowed_token_ids=list(range(40, 400))),
        dict(skip_special_tokens=False, spaces_between_special_tokens=False),
    ]
    ours = ("include_stop_str_in_output", "repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos")
    ours += ("stop_token_ids", "bad_words", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens")
    changed, prompt = 0, f"<|user|>{PROMPTS[0]}<|assistant|>"
    plain = expected(prompt, max_tokens=14, temperature=0.9, seed=2).outputs[0].text
    for params in given:
        standard = {name: value for name, value in params.items() if name not in ours}
        extra = {name: value for name, value in params.items() if name in ours}
        shared = dict(max_tokens=14, temperature=0.9, seed=2)
        answer = client.completions.create(model=NAME, prompt=prompt, extra_body=extra, **standard, **shared)
        own = expected(prompt, **params, **shared).outputs[0]
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (own.text, own.finish_reason, own.stop_reason)
        changed += own.text != plain
    assert changed >= 6


def test_logprobs_are_those_of_the_engine(client, served, expected):
    params = dict(max_tokens=5, temperature=0.7, seed=2)
    own = expected(PROMPTS[1], logprobs=3, **params).outputs[0]
    logprobs = client.completions.create(model=NAME, prompt=PROMPTS[1], logprobs=3, **params).choices[0].logprobs
    assert logprobs.token_logprobs == [entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs)]
    assert "".join(logprobs.tokens) == own.text
    assert [len(top) for top in logprobs.top_logprobs] == [len(entry) for entry in own.logprobs]
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(5)]

    own = served.llm.chat(MESSAGES, SamplingParams(logprobs=2, **params))[0].outputs[0]
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2, **params)
    content = answer.choices[0].logprobs.content
    assert [one.logprob for one in content] == [
        entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs)
    ]
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    assert all(one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob for one in content)


def test_echo_with_logprobs_scores_the_prompt(client, expected):
    """As lm-eval asks for it: no new token at all, and then one."""
    own = expected(PROMPTS[1], max_tokens=1, temperature=0, prompt_logprobs=1)
    ids = own.prompt_token_ids
    scores = [entry and entry[token].logprob for token, entry in zip(ids, own.prompt_logprobs)]
    for length in (0, 1):
        answer = client.completions.create(
            model=NAME, prompt=PROMPTS[1], echo=True, logprobs=1, max_tokens=length, temperature=0
        )
        choice = answer.choices[0]
        assert choice.text == PROMPTS[1] + (own.outputs[0].text if length else "")
        assert choice.logprobs.token_logprobs[: len(ids)] == scores
        assert len(choice.logprobs.tokens) == len(ids) + length
        assert answer.usage.completion_tokens == length


def test_token_ids_and_prompt_logprobs_come_along_if_asked_for(client, expected):
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "return_speculation_metrics": True}
    params = dict(max_tokens=8, temperature=0)
    own = expected(PROMPTS[1], prompt_logprobs=1, **params)
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], extra_body=extra, **params)
    choice = answer.choices[0]
    assert (choice.token_ids, choice.prompt_token_ids) == (own.outputs[0].token_ids, own.prompt_token_ids)
    assert choice.prompt_logprobs[0] is None
    assert [set(map(int, entry)) for entry in choice.prompt_logprobs[1:]] == [set(e) for e in own.prompt_logprobs[1:]]
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] >= 1


def test_an_asynchronous_client_gets_the_same(served, expected):
    params = dict(max_tokens=12, temperature=0.8)
    own = [expected(PROMPTS[seed % 4], seed=seed, **params).outputs[0].text for seed in range(12)]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=30) as client:

            async def ask(seed):
                stream = await client.completions.create(
                    model=NAME, prompt=PROMPTS[seed % 4], seed=seed, stream=True, **params
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(ask, range(12)))

    assert asyncio.run(ask_all()) == own


def test_answers_without_a_seed_differ(client):
    answers = {
        client.completions.create(model=NAME, prompt=PROMPTS[1], temperature=1, max_tokens=12).choices[0].text
        for _ in range(4)
    }
    assert len(answers) > 1


def test_models_and_tokens(client, http, served):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (NAME, served.llm.max_model_len)
    tokenizer = served.llm.tokenizer
    ids = tokenizer(PROMPTS[1])["input_ids"]
    told = http.post("/tokenize", json={"prompt": PROMPTS[1], "return_token_strs": True}).json()
    assert told["tokens"] == ids
    assert told["count"] == len(ids) == len(told["token_strs"])
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPTS[1]}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert tokenizer.decode(chat) == tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
