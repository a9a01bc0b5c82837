"""The promise: a seed's answer has the same bits alone and in company, with heads and without, after a restart, and by LLM."""

import asyncio
import json
import random

import httpx
import pytest

from headstart import LLM, SamplingParams
from headstart.benchmarks.proofs.serving import ask_all, mixed_requests
from headstart.tests.inference.server.serving import HEADS, PROMPTS, running

COUNT = 24  # three times as many as there are seats


@pytest.fixture(scope="module")
def alone(plain_llm):
    """(text, token ids) of every request by itself, through LLM."""
    bodies = mixed_requests(COUNT)
    params = [SamplingParams(**{name: v for name, v in body.items() if name != "prompt"}) for body in bodies]
    outputs = [plain_llm.generate([body["prompt"]], one)[0].outputs[0] for body, one in zip(bodies, params)]
    return [(output.text, output.token_ids) for output in outputs]


@pytest.mark.parametrize("heads", [False, True], ids=["plain", "heads"])
def test_company_cancellations_heads_and_restarts_change_no_answer(heads, alone, plain_llm, speculative):
    """Two servers one after the other, each with another order and others that leave."""
    bodies = mixed_requests(COUNT)
    for restart in range(2):
        dice = random.Random(restart)
        order, leave = dice.sample(range(COUNT), COUNT), set(dice.sample(range(COUNT), COUNT // 3))
        llm = speculative() if heads else LLM(plain_llm, seed=restart)
        with running(llm) as server:
            asked = [(number, number in leave) for number in order]
            found = asyncio.run(ask_all(server.url, asked, bodies, dict.fromkeys(leave, 1)))
            server.wait_until_idle()
        assert len(found) == COUNT - len(leave)
        assert {number: alone[number] for number in found} == found


def test_the_fingerprint_is_of_the_model_and_not_of_the_head(plain_llm, speculative):
    from headstart.inference.server.driver.engine_info import fingerprint

    assert fingerprint(plain_llm) == fingerprint(speculative())


def test_a_cache_salt_keeps_prompts_apart_and_changes_no_answer(speculative):
    llm, prompt = speculative(), PROMPTS[1] * 30
    salts = (None, "a", "a", "b", None)
    with running(llm, prompt_tokens_details=True) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        found, cached = [], []
        for salt, given in zip(salts, (prompt, prompt, llm.tokenizer(prompt)["input_ids"], prompt, prompt)):
            body = {"prompt": given, "cache_salt": salt, "max_tokens": 12, "seed": 3, "return_token_ids": True}
            answer = http.post("/v1/completions", json=body).json()
            found.append((answer["choices"][0]["text"], answer["choices"][0]["token_ids"]))
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[:2] == [0, 0]
        assert cached[3] == 0
        assert min(cached[2], cached[4]) >= 64
        assert found == [found[0]] * 5
        chat = {"messages": [{"role": "user", "content": "x"}], "cache_salt": "a", "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "x", "cache_salt": ""})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    output = llm.generate({"prompt": prompt, "cache_salt": "a"}, SamplingParams(max_tokens=12, seed=3))[0].outputs[0]
    assert (output.text, output.token_ids) == found[0]


@pytest.mark.parametrize(("draft", "same"), [("static", True), ("block", False), ("synthetic", False)])
def test_an_answer_without_drafts_takes_a_step_per_token(draft, same, plain_llm, speculative):
    """Beside one with drafts, in the same steps. The pieces tell which tokens were drafted."""
    config = {"model": str(HEADS), "tree": "chain", "verifier": draft}
    if draft == "synthetic":
        config["acceptance_length"] = 1.8
    llm = speculative() if draft == "static" else LLM(plain_llm, speculative_config=config)
    body = {"prompt": PROMPTS[0], "max_tokens": 40, "seed": 5, "stream": True, "ignore_eos": True, "temperature": 0.6}
    body |= {"return_speculation_tokens": True, "return_speculation_metrics": True, "return_token_ids": True}

    async def ask(server, speculate):
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            answer = await http.post("/v1/completions", json=body | {"speculate": speculate})
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    async def both(server):
        return await asyncio.gather(ask(server, True), ask(server, False))

    with running(llm) as server:
        found = asyncio.run(both(server))
    ids, pieces, drafts = [], [], []
    for chunks in found:
        choices = [chunk["choices"][0] for chunk in chunks]
        ids.append([token for choice in choices for token in choice["token_ids"]])
        pieces.append([choice["speculation"] for choice in choices])
        assert [len(choice["token_ids"]) for choice in choices] == [len(piece) for piece in pieces[-1]]
        told = "".join(token["token"] for piece in pieces[-1] for token in piece)
        assert told == "".join(choice["text"] for choice in choices)
        drafts.append(chunks[-1]["metrics"]["speculative_decoding"])
    accepted = [token["accepted"] for piece in pieces[0] for token in piece]
    assert sum(accepted) == drafts[0]["num_accepted_draft_tokens"] > 0
    assert not any(piece[-1]["accepted"] for piece in pieces[0][:-1])  # a step's last token is the model's own
    assert [len(piece) for piece in pieces[1]] == [1] * 40
    assert not any(piece[0]["accepted"] for piece in pieces[1])
    assert (drafts[1]["num_spec_steps"], drafts[1]["num_accepted_draft_tokens"]) == (0, 0)
    assert llm.engine.metrics.spec_decode.num_steps == drafts[0]["num_spec_steps"]
    if same:
        params = SamplingParams(temperature=0.6, max_tokens=40, seed=5, ignore_eos=True)
        assert ids == [plain_llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids] * 2


def test_preemption_changes_no_answer(alone, speculative):
    """A cache too small for all: some lose their pages and are computed again."""
    llm, bodies = speculative(num_gpu_blocks_override=9), mixed_requests(COUNT)
    with running(llm) as server:
        longer = [body | {"max_tokens": 45} for body in bodies]
        found = asyncio.run(ask_all(server.url, [(number, False) for number in range(9)], longer, {}))
        server.wait_until_idle()
        whole = asyncio.run(ask_all(server.url, [(3, False)], longer, {}))
    assert llm.engine.metrics.num_preemptions > 0
    assert found[3] == whole[3]
    assert all(found[number][1][: len(alone[number][1])] == alone[number][1] for number in (0, 6))
