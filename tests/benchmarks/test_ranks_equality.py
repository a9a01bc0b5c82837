"""benchmarks/proofs/ranks_equality.py on a tiny shape: ranks are compared with one, and a difference fails it."""

import json

import pytest

from headstart.benchmarks.proofs import ranks_equality
from headstart.inference.llm import LLM
from headstart.tests.inference.models.small_architectures import small_config
from headstart.tests.inference.ranks.forks import forked_workers

pytestmark = pytest.mark.usefixtures(forked_workers.__name__)


@pytest.fixture
def shape(tmp_path):
    """Folder with the config.json of a tiny Llama. The mixed requests allow tokens below 2003."""
    small_config("llama", vocab_size=2100).save_pretrained(tmp_path)
    return str(tmp_path)


def prove(shape, *words):
    """words: ways of drafting, and options."""
    sizes = ["--context", "20", "--max-tokens", "8", "--batch", "3", "--depth", "4", "--dtype", "float32"]
    drafts = [word for draft in words if draft in ranks_equality.WAYS for word in ("--draft", draft)]
    words = [*drafts, *(word for word in words if word not in ranks_equality.WAYS)]
    return ranks_equality.main(["--shape", shape, "--invariant", "2", *sizes, "--tokens", "200", *words])


def rows_of(capsys):
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    return said["rows"], said["facts"]


def test_two_ranks_give_the_tokens_of_one(shape, capsys):
    assert prove(shape, "medusa", "draft model") == 0
    rows, facts = rows_of(capsys)
    ways = ["medusa", "draft model"]
    assert [(row["ranks"], row["draft"], row["batch"]) for row in rows] == [
        (1, "plain", 3),
        *((2, way, batch) for way in ways for batch in (3, 1)),
    ]
    assert facts["differing_requests"] == 0
    assert facts["ranks_tokens"] == sum(row["tokens"] for row in rows[1:]) >= 200
    assert rows[3]["acceptance_length"] > 3  # the target itself


def test_ranks_are_compared_with_ranks_where_none_fits_one(shape, capsys):
    assert prove(shape, "eagle3", "mlp speculator", "--reference", "2") == 0
    rows, facts = rows_of(capsys)
    ways = [("plain", 3), ("eagle3", 3), ("eagle3", 1), ("mlp speculator", 3), ("mlp speculator", 1)]
    assert [(row["ranks"], row["draft"], row["batch"]) for row in rows] == [(2, *way) for way in ways]
    assert facts["ranks_tokens"] == sum(row["tokens"] for row in rows[1:])


def test_a_log_probability_that_differs_fails_it(shape, capsys, monkeypatch):
    generate = LLM.generate

    def faulty(llm, prompts, params):
        outputs = generate(llm, prompts, params)
        for output in outputs:
            if len(prompts) == 1 and output.outputs[0].logprobs:
                output.outputs[0].logprobs[-1] = None
        return outputs

    monkeypatch.setattr(LLM, "generate", faulty)
    assert prove(shape, "plain") == 1
    rows, facts = rows_of(capsys)
    assert facts["differing_requests"] == sum(row["differing"] for row in rows) == ranks_equality.ALONE
    # The mixed requests are the last third. Of each the last of 8 log-probabilities differs, and no token.
    assert rows[2]["first_differences"] == {str(rows[0]["requests"] // 3 * 2 + i): [None, 7] for i in range(2)}
    assert all("first_differences" not in row for row in rows[:2])


def test_where_a_request_begins_to_differ():
    first = ranks_equality.first_differences
    assert first(([1, 2, 3], None), ([1, 2, 3], None)) == [None, None]
    assert first(([1, 5, 4], [{}, {2: 0}]), ([1, 2, 3], [{}, {2: 1}])) == [1, 1]
    assert first(([1, 2], None), ([1, 2, 3], None)) == [2, None], "one is shorter"
