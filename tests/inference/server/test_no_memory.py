"""Steps that find no memory on the device: who is told, who goes on, and with which bits."""

import re
import threading

import httpx
import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.inference.engine import logprobs
from headstart.inference.server.driver.engine_loop import NO_MEMORY
from headstart.tests.inference.server.serving import PROMPTS, TARGET, running

BODY = {"prompt": PROMPTS[1], "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def ask(url, body, answers):
    """Ask in a thread. -> the thread; its answer is appended"""

    def work():
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def let_fail(engine, monkeypatch, fails, where="read_steps"):
    """Steps raise OutOfMemoryError where fails() says so. where: the method in which; read_steps: after the launch."""
    method = getattr(engine, where)

    def failing(*given, **named):
        if fails():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(*given, **named)

    monkeypatch.setattr(engine, where, failing)


def text_alone(llm, seed):
    params = SamplingParams(temperature=1.0, max_tokens=BODY["max_tokens"], ignore_eos=True, seed=seed)
    return llm.generate([BODY["prompt"]], params)[0].outputs[0].text


def test_a_step_without_memory_is_done_again_and_twice_is_too_often(speculative, plain_llm, monkeypatch):
    llm, plan = speculative(), []
    let_fail(llm.engine, monkeypatch, lambda: plan.pop(0) if plan else False)
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        plan += [False, True, False, False, True]  # the output goes on in between, by more than its prompt
        answer = http.post("/v1/completions", json=BODY | {"seed": 7}).json()
        assert answer["choices"][0]["text"] == text_alone(plain_llm, 7)
        assert not plan
        for too_often in ([False, True, True], [False, True, False, True]):
            plan += too_often
            answer = http.post("/v1/completions", json=BODY | {"seed": 7})
            assert answer.status_code == 503
            assert NO_MEMORY in answer.json()["error"]["message"]
            server.wait_until_idle()
            assert not plan
            plan += [True]  # the first one of others: what came of the last request does not count
            answer = http.post("/v1/completions", json=BODY | {"seed": 7}).json()
            assert answer["choices"][0]["text"] == text_alone(plain_llm, 7)


def test_an_output_that_ended_in_a_step_without_memory_is_told(speculative, plain_llm, monkeypatch):
    llm, short = speculative(), []
    step = llm.engine.step

    def fail_at_the_end():
        advanced = step()
        if any(request.finished for request in advanced) and not short:
            short.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return advanced

    monkeypatch.setattr(llm.engine, "step", fail_at_the_end)
    with running(llm) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"seed": 7}, timeout=20).json()
        assert short
        assert answer["choices"][0]["text"] == text_alone(plain_llm, 7)


@pytest.mark.parametrize(
    ("stream", "where"), [(False, "read_steps"), (True, "read_steps"), (False, "_decode"), (True, "_decode")]
)
def test_the_request_that_needs_most_is_given_up_and_others_keep_their_bits(
    speculative, plain_llm, monkeypatch, stream, where
):
    """Where drafts alone do not fit, prompts are computed again and again in between."""
    llm = speculative()
    engine = llm.engine
    with running(llm) as server:

        def fails():
            return any(request.params.seed == 13 for request in engine.scheduler.active)

        let_fail(engine, monkeypatch, fails, where)
        others, answers = [], []
        threads = [ask(server.url, BODY | {"seed": seed}, others) for seed in (1, 2)]
        needy = {"stream": True, "logprobs": 5} if stream else {"prompt_logprobs": 5}
        needy |= {"seed": 13, "n": 3}
        threads.append(ask(server.url, BODY | needy, answers))
        threads.append(ask(server.url, BODY | {"seed": 3}, others))
        for thread in threads:
            thread.join(60)
        assert answers[0].status_code == (200 if stream else 503)
        assert NO_MEMORY in answers[0].text
        assert sorted(one.json()["choices"][0]["text"] for one in others) == sorted(
            text_alone(plain_llm, seed) for seed in (1, 2, 3)
        )
        server.wait_until_idle()
        assert httpx.get(f"{server.url}/health").status_code == 200
        told = httpx.get(f"{server.url}/metrics").text
        assert re.search(r'vllm:request_success_total{[^}]*"error"[^}]*} (.*)', told)[1] == "3.0"


@pytest.mark.gpu
def test_log_probabilities_that_do_not_fit_the_card_end_alone(monkeypatch):
    """The allocator's own error: the process may take 64 MiB more of the card than it has, and they take 1 GiB."""
    llm = LLM(str(TARGET), dtype="bfloat16", max_num_seqs=8, max_logprobs=20, num_gpu_blocks_override=40)
    alone = {seed: text_alone(llm, seed) for seed in (1, 2)}
    gather = logprobs.gather_logprobs

    def take_much(*given):
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
        return gather(*given)

    monkeypatch.setattr(logprobs, "gather_logprobs", take_much)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    try:
        with running(llm) as server:
            others, answers = [], []
            threads = [ask(server.url, BODY | {"seed": seed}, others) for seed in (1, 2)]
            threads.append(ask(server.url, BODY | {"seed": 13, "prompt_logprobs": 5}, answers))
            for thread in threads:
                thread.join(60)
            assert answers[0].status_code == 503, answers[0].text[:500]
            assert NO_MEMORY in answers[0].text
            assert sorted(one.json()["choices"][0]["text"] for one in others) == sorted(alone.values())
            server.wait_until_idle()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
