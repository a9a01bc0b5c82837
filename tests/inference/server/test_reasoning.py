"""Reasoning told apart from the answer: by pieces of any size, and over a socket, whole and streamed."""

import random

import pytest

from headstart.inference.server.options import REASONING_MARKERS
from headstart.inference.server.reasoning import Reasoning
from headstart.tests.inference.server.serving import PROMPTS, running

THINK = REASONING_MARKERS["qwen3"]
CASES = [
    ("<think>\nTwo < four</ think></think>\n\nFour", "user:", "\nTwo < four</ think>", "\n\nFour"),
    ("Two</think>Four", "assistant:<think>\n", "Two", "Four"),
    ("  <think>Two</think>", "", "Two", ""),
    ("<think>never ends </thi", "", "never ends </thi", ""),
    ("never ends", "assistant:<think>", "never ends", ""),
    ("Four</think> is not reasoning", "what is <think> for? assistant:", "", "Four</think> is not reasoning"),
    ("Four", "assistant:<think>\n\n</think>\n\n", "", "Four"),
    ("<thin", "", "", "<thin"),
    ("", "", "", ""),
]


@pytest.mark.parametrize(("text", "prompt", "reasoning", "content"), CASES)
def test_pieces_of_any_size_give_the_same(text, prompt, reasoning, content):
    for seed in range(20):
        dice, one, left, found = random.Random(seed), Reasoning(THINK, prompt), text, ["", ""]
        while True:
            size = dice.randint(0, len(text)) if seed else len(text)
            piece, left = left[:size], left[size:]
            new = one.split(piece, ended=not left)
            found = [a + b for a, b in zip(found, new)]
            if not left:
                break
        assert found == [reasoning, content]


@pytest.fixture(scope="module")
def thinking(plain_llm):
    """A server for which the words of a docstring's first line are reasoning."""
    with running(plain_llm, reasoning_markers=("def ", "(")) as server:
        yield server


def test_reasoning_is_told_apart_over_a_socket(thinking):
    import openai

    asked = dict(
        model="coder",
        messages=[{"role": "user", "content": PROMPTS[0]}],
        temperature=0.0,
        max_tokens=24,
        response_format={"type": "text"},  # which is no form
    )
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.reasoning == message.reasoning_content == "count_words"
        assert message.content
        assert "def count_words(" not in message.content
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
        assert "".join(delta.content or "" for delta in deltas) == message.content
        hidden = client.chat.completions.create(extra_body={"include_reasoning": False}, **asked).choices[0].message
        assert hidden.content == message.content
        assert not hasattr(hidden, "reasoning")
