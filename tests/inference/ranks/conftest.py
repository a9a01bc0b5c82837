"""A small target whose heads two and four ranks divide, and LLMs whose other ranks are forks."""

import pytest
import torch

from headstart.inference.llm import LLM
from headstart.tests.inference.ranks.forks import forked_workers  # noqa: F401
from headstart.tests.inference.speculation.small_drafters import llama


@pytest.fixture(scope="session")
def divided_folder(tmp_path_factory):
    """Folder of a random Llama: 4 layers, 4 heads on 2 key heads, 97 tokens, no tokenizer."""
    folder = tmp_path_factory.mktemp("divided")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def forked_llm(forked_workers):  # noqa: F811 (the fixture, by its name)
    """forked_llm(model, size, **arguments) -> an LLM on the CPU; all ranks have ended after the test."""
    if torch.cuda.is_available():
        pytest.skip("forks, which CUDA does not survive")
    made = []

    def make(model, size, **arguments):
        llm = LLM(model, device="cpu", dtype="float32", tensor_parallel_size=size, **arguments)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        if llm.session.ranks is not None:
            llm.session.ranks.end()
