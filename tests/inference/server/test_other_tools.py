"""What other people's tools send and read: lm-eval, aiperf, guidellm, `vllm bench serve`, and the types of `openai`."""

import json

import httpx
import pytest
import torch
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from headstart.tests.inference.server.serving import NAME, PROMPTS, TARGET, running
from headstart.tests.inference.server.test_streams import events

MESSAGES = [{"role": "user", "content": PROMPTS[0]}]
CHAT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
TEXT = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 8}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def extras(value, path=""):
    """Paths of the fields of an answer that are not OpenAI's."""
    if isinstance(value, BaseModel):
        yield from (f"{path}{name}" for name in value.model_extra)
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for one in value:
            yield from extras(one, path)


def check(kind, answer):
    """The extra fields of an answer that is valid by OpenAI's own types, nothing coerced."""
    return set(extras(kind.model_validate_json(json.dumps(answer), strict=True)))


STOP = {"choices.stop_reason"}
IDS = {"choices.token_ids"}


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ({}, STOP),
        ({"logprobs": 2}, STOP),
        ({"n": 2, "temperature": 1}, STOP),
        ({"return_token_ids": True}, STOP | IDS | {"choices.prompt_token_ids"}),
        ({"return_speculation_metrics": True}, STOP | {"metrics"}),
    ],
)
def test_completions_have_openai_types_and_known_further_fields(http, asked, known):
    assert check(Completion, http.post("/v1/completions", json=TEXT | asked).json()) == known
    found = set()
    *chunks, _ = events(http, "/v1/completions", **TEXT | asked | USAGE)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # their type forgets the null of streams
        found |= check(Completion, chunk)
    assert found == known


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ({}, STOP),
        ({"logprobs": True, "top_logprobs": 2}, STOP),
        ({"n": 2, "temperature": 1}, STOP),
        ({"return_token_ids": True}, STOP | IDS | {"prompt_token_ids"}),
        ({"return_speculation_metrics": True}, STOP | {"metrics"}),
    ],
)
def test_conversations_have_openai_types_and_known_further_fields(http, asked, known):
    assert check(ChatCompletion, http.post("/v1/chat/completions", json=CHAT | asked).json()) == known
    *chunks, _ = events(http, "/v1/chat/completions", **CHAT | asked | USAGE)
    assert set().union(*(check(ChatCompletionChunk, chunk) for chunk in chunks)) == known


def test_a_model_is_found_by_its_name_and_tells_where_it_comes_from(client, http, served):
    """`vllm bench serve` takes the tokenizer of `root`: with --served-model-name the name is no folder."""
    card = http.get("/v1/models").json()["data"][0]
    assert check(Model, card) == {"root", "parent", "max_model_len", "permission"}
    assert client.models.retrieve(NAME).model_dump() == card | {"shutdown_date": None}
    assert card["root"] == served.llm.model_name != NAME
    answer = http.get("/v1/models/some/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models"])
def test_the_head_of_what_can_be_read_can_be_asked_for(http, path):
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type" if whole.content else "content-length"]


def test_log_likelihoods_are_those_of_transformers(http, served):
    """lm-eval's requests: a batch of prompts as token ids, each with one new token; sums and whether all are the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    rows = [served.llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    rows.append(http.post("/v1/completions", json=TEXT | {"return_token_ids": True}).json()["choices"][0]["token_ids"])
    rows[-1] = rows[1] + rows[-1]  # a greedy continuation
    lengths = [2, 2, 2, 2, len(rows[1])]
    body = {"prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "model": NAME}
    greedy = []
    for row, length, choice in zip(rows, lengths, http.post("/v1/completions", json=body).json()["choices"]):
        told = choice["logprobs"]
        mine = told["token_logprobs"][length:-1]
        with torch.no_grad():
            logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)[length - 1 : -1]
        theirs = logprobs.gather(-1, torch.tensor(row[length:])[:, None])[:, 0]
        assert sum(mine) == pytest.approx(theirs.sum().item(), abs=2e-4)
        greedy.append(all(own == max(top.values()) for own, top in zip(mine, told["top_logprobs"][length:-1])))
        assert greedy[-1] == (logprobs.argmax(-1).tolist() == row[length:])
    assert greedy == [False] * 4 + [True]


def test_drafts_are_counted_as_vllm_counts_them(http, served, plain_llm):
    """What aiperf reads; it drops figures that contradict each other."""
    body = CHAT | {"max_tokens": 40, "return_speculation_metrics": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    drafts, num_tokens = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens"]
    histogram, num_steps, depth = drafts["acceptance_histogram"], drafts["num_spec_steps"], served.llm.tree.max_depth
    accepted = sum(number * steps for number, steps in enumerate(histogram))
    assert (len(histogram), drafts["num_spec_tokens"]) == (depth + 1, depth)
    assert (sum(histogram), drafts["num_accepted_draft_tokens"]) == (num_steps, accepted)
    assert 0 < num_steps < num_tokens - 1 <= num_steps + accepted  # the first token comes from the prompt
    assert drafts["num_draft_tokens"] < drafts["num_draft_nodes"]
    # The last steps draft no deeper than max_tokens lets them.
    assert num_steps * depth - sum(range(1, depth + 1)) <= drafts["num_draft_tokens"] <= num_steps * depth
    assert drafts["draft_acceptance_rate"] == accepted / drafts["num_draft_tokens"]
    assert drafts["mean_acceptance_length"] == 1 + accepted / num_steps
    with running(plain_llm) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.post("/v1/chat/completions", json=body).json()["metrics"] == {"speculative_decoding": None}


def test_an_empty_answer_streams_a_piece_of_content(http, served):
    """A reader that times the first token looks for content, also of a token that is no text."""
    end = served.llm.tokenizer.eos_token_id
    *chunks, _ = events(http, "/v1/chat/completions", **CHAT | {"logit_bias": {str(end): 100}})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {"content": ""}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_tokenizer_is_told_only_if_the_operator_says_so(http, speculative):
    """lm-eval asks for it first, and counts tokens with /tokenize then instead of a tokenizer of its own."""
    assert http.get("/tokenizer_info").status_code == 404
    with running(speculative(), tokenizer_info=True) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        tokenizer, told = server.llm.tokenizer, http.get("/tokenizer_info").json()
        assert told["eos_token"] == tokenizer.eos_token
        assert told["chat_template"] == tokenizer.chat_template
        ids = http.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()["tokens"]
        assert ids == [tokenizer.eos_token_id]
