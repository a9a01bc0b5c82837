"""The embedded target, plain and with its shipped heads, each behind a server that lives as long as a test module."""

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import LLM
from headstart.tests.inference.server.serving import HEADS, TARGET, running

SEATS = 8


@pytest.fixture(scope="session")
def plain_llm():
    module = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    return LLM(module, tokenizer=AutoTokenizer.from_pretrained(TARGET), max_num_seqs=SEATS, max_logprobs=20)


@pytest.fixture(scope="session")
def speculative(plain_llm):
    """A function that makes an LLM with the heads, on the weights of the plain one."""

    def make(**options):
        config = {"model": str(HEADS), "tree": "static"}
        return LLM(plain_llm, speculative_config=config, **{"max_num_seqs": SEATS, "max_logprobs": 20, **options})

    return make


@pytest.fixture(scope="module")
def served(speculative):
    """A server with heads."""
    with running(speculative()) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.url, timeout=30) as http:
        yield http
