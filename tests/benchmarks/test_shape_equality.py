"""benchmarks/proofs/shape_equality.py on tiny shapes: all ways of drafting are tried and counted, and a difference fails it."""

import json

import pytest

from headstart.benchmarks.proofs import shape_equality
from headstart.tests.inference.models.small_architectures import small_config

VOCAB = 2100  # the mixed requests allow tokens below 2003


@pytest.fixture
def tiny(tmp_path):
    """tiny(model type) -> folder with the config.json of a tiny shape."""

    def make(model_type, **changes):
        small_config(model_type, vocab_size=VOCAB, **changes).save_pretrained(tmp_path / model_type)
        return str(tmp_path / model_type)

    return make


def prove(*words):
    sizes = ["--context", "20", "--max-tokens", "8", "--batch", "3", "--depth", "3", "--dtype", "float32"]
    return shape_equality.main([*words, *sizes, "--tokens", "400"])


def rows_of(capsys):
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    return said["rows"], said["facts"]


@pytest.mark.parametrize(
    ("target", "drafter", "trees"),
    [
        ("opt", ["--draft-shape", "gpt2"], ["chain"]),
        ("gpt_bigcode", ["--head", "mlp_speculator"], ["chain"]),
        ("mixtral", ["--head", "eagle"], ["chain", "dynamic"]),
    ],
)
def test_the_documents_pairs_give_equal_tokens(tiny, capsys, target, drafter, trees):
    if "--draft-shape" in drafter:
        drafter = ["--draft-shape", tiny(drafter[1])]
    assert prove("--shape", tiny(target), *drafter) == 0
    rows, facts = rows_of(capsys)
    assert facts["differing_requests"] == 0
    assert facts["speculated_tokens"] == sum(row["tokens"] for row in rows if row["draft"] != "plain") >= 400
    drafts = {(row["draft"].rpartition("/")[2], row["batch"]) for row in rows}
    name = drafter[1].rpartition("/")[2]
    own = {(f"{name}, {tree}", batch) for tree in trees for batch in (1, 3)}
    oracles = {("oracle, chain of 4", 3), ("oracle, tree of 24", 3), ("oracle, tree of 24", 1)}
    assert drafts == {("plain", 3), ("plain", 1)} | own | oracles
    assert {row["requests"] for row in rows} == {"greedy", "temperature 0.9", "mixed"}
    accepted = [row["accepted_per_position"] for row in rows if row["draft"] == "oracle, chain of 4"]
    first, second, third, _ = map(sum, zip(*accepted))
    assert first > second > third > 0  # paths of several lengths


def test_a_token_that_differs_fails_it(tiny, capsys, monkeypatch):
    generate = shape_equality.LLM.generate

    def faulty(llm, *given):
        outputs = generate(llm, *given)
        if llm.engine.tree.max_depth and llm.engine.max_num_seqs == 1:
            outputs[0].outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(shape_equality.LLM, "generate", faulty)
    assert prove("--shape", tiny("opt"), "--head", "medusa") == 1
    rows, facts = rows_of(capsys)
    assert facts["differing_requests"] == sum(row["differing"] for row in rows) == 6  # of two engines, three groups


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("headstart.benchmarks.shape.free_bytes", lambda device: 10 << 30)
    with pytest.raises(ValueError, match=r"the weights and the drafter of opt-6\.7b take 1\d\.\d GiB"):
        shape_equality.main(["--shape", "opt-6.7b", "--draft-shape", "opt-125m"])
