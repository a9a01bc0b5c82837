"""`benchmarks/proofs/equality.py`: equal outputs pass, another token fails it, and what a cut run had found is kept."""

import json

import pytest
import torch

from headstart.benchmarks.proofs import equality
from headstart.inference.speculation.tree import chain

SMALL = ["--target", "embedded", "--dtype", "float32", "--requests", "2", "--max-tokens", "5", "--commit", "abc"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One tree and one kind of heads, and the threads as they were."""
    threads, heads = torch.get_num_threads(), equality.medusa_heads
    monkeypatch.setattr(equality, "TREES", {"chain of 2": chain(2)})
    monkeypatch.setattr(equality, "MIXED", equality.MIXED[:2])
    monkeypatch.setattr(equality, "medusa_heads", lambda *given: {"chain": heads(*given)["chain"]})
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def answers(monkeypatch):
    """Set `answers.change` to a function of (draft's number from 0, answers) -> answers."""
    answer = equality.Comparison.answer

    class Changed:
        change = staticmethod(lambda number, found: found)
        count = 0

    def changed(self, *given, **options):
        Changed.count += 1
        return Changed.change(Changed.count - 1, answer(self, *given, **options))

    monkeypatch.setattr(equality.Comparison, "answer", changed)
    return Changed


def other_token(number, found):
    """The fourth way of answering has another last token in one request."""
    if number == 3:
        (first, (tokens, scores)), *others = found.items()
        return {first: ([*tokens[:-1], tokens[-1] + 1], scores)} | dict(others)
    return found


def test_equal_outputs_pass_and_another_token_does_not(answers, tmp_path, capsys):
    assert equality.main([*SMALL, "--output", str(tmp_path / "same.json")]) == 0
    same = json.loads((tmp_path / "same.json").read_text())
    assert same["commit"] == "abc"
    assert same["facts"]["differing_requests"] == 0
    assert same["facts"]["emitted_tokens"] == sum(row["tokens"] for row in same["rows"])
    assert {row["draft"] for row in same["rows"]} > {"plain", "oracle, chain of 2", "medusa, chain"}
    assert max(row["acceptance_length"] for row in same["rows"]) > 1.2, "drafts were accepted"
    answers.count, answers.change = 0, other_token
    assert equality.main([*SMALL, "--output", str(tmp_path / "other.json")]) == 1
    assert json.loads((tmp_path / "other.json").read_text())["facts"]["differing_requests"] == 1


def test_a_run_that_is_cut_keeps_its_rows(answers, tmp_path):
    def cut(number, found):
        if number == 4:
            raise KeyboardInterrupt
        return found

    answers.change = cut
    with pytest.raises(KeyboardInterrupt):
        equality.main([*SMALL, "--output", str(tmp_path / "cut.json")])
    assert len(json.loads((tmp_path / "cut.unfinished.json").read_text())["rows"]) == 4
    assert not (tmp_path / "cut.json").exists()
