"""A small target whose heads two and four ranks divide, and LLMs whose other ranks are forks."""

import pytest
import torch

from headstart.inference.llm import LLM
from headstart.inference.ranks import processes
from headstart.tests.inference.ranks.forks import start_fork
from headstart.tests.inference.speculation.small_drafters import llama


@pytest.fixture(scope="session")
def divided_folder(tmp_path_factory):
    """Folder of a random Llama: 4 layers, 4 heads on 2 key heads, 97 tokens, no tokenizer."""
    folder = tmp_path_factory.mktemp("divided")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread():
    """Products of one thread here, as in forks, where others do not live on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_llm(monkeypatch, one_thread):
    """forked_llm(model, size, **arguments) -> an LLM on the CPU; all ranks have ended after the test."""
    if torch.cuda.is_available():
        pytest.skip("forks, which CUDA does not survive")
    monkeypatch.setattr(processes, "start_worker", start_fork)
    made = []

    def make(model, size, **arguments):
        llm = LLM(model, device="cpu", dtype="float32", tensor_parallel_size=size, **arguments)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        if llm.session.ranks is not None:
            llm.session.ranks.end()
