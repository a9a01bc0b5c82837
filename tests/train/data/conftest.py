"""What the tests of data read: a recipe's keys, and its documents."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from headstart.train.data.rows import load_documents


class Process:
    """A rank, as Accelerator is one."""

    def __init__(self, is_local_main_process=True):
        self.is_local_main_process = is_local_main_process

    def wait_for_everyone(self):
        pass


@pytest.fixture
def recipe(conversations, word_target, tmp_path):
    """recipe(**keys): what load_documents reads of a recipe, for data of 60 conversations."""
    own = dict(
        seed=0,
        max_tokens=0,
        max_examples=0,
        row_length=64,
        data_rules=2,
        document="conversation",
        eval_prompts=4,
        eval_data="",
        target=word_target,
    )
    own |= dict(data=conversations, packed_data=str(tmp_path / "packed"))
    return lambda **keys: SimpleNamespace(**own | keys)


@pytest.fixture
def load(word_target):
    """load(recipe) -> (documents, held-out conversations, what was noted)."""
    tokenizer = AutoTokenizer.from_pretrained(word_target)

    def load(recipe, tokenizer=tokenizer):
        said = []
        return *load_documents(recipe, tokenizer, SimpleNamespace(accelerator=Process(), note=said.append)), said

    load.tokenizer = tokenizer
    return load
