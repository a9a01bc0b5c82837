"""Several data sets in a run: how they are named, what share of an epoch each gives, and what is measured."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from headstart.cli import main
from headstart.tests.train.data.test_rows import ROWS
from headstart.tests.train.tiny_runs import assert_same_run, in_step, terminate
from headstart.train.data.conversations import load_conversations, write_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.held_out import hash_of_conversation
from headstart.train.data.packed.blend import BlendedRows, rows_per_epoch
from headstart.train.data.packed.packing import lay_out
from headstart.train.data.rows import build_rows, fingerprint, rows_of_step
from headstart.train.data.sources.data_sets import data_sets
from headstart.train.run.recipe import parse_recipe
from headstart.train.run.run_recipe import RunRecipe


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("a.jsonl", [("a.jsonl", None)]),
        ("OWNER/NAME:train_sft", [("OWNER/NAME:train_sft", None)]),
        ("a.jsonl:0.7,OWNER/NAME:train_sft:.3", [("a.jsonl", 0.7), ("OWNER/NAME:train_sft", 0.3)]),
        ("a*.jsonl.gz:3, stdlib:1e-1", [("a*.jsonl.gz", 3.0), ("stdlib", 0.1)]),
        ("a.jsonl,OWNER/NAME:train_sft", [("a.jsonl", None), ("OWNER/NAME:train_sft", None)]),
    ],
)
def test_sets_are_named_with_commas_and_weights_after_a_colon(data, expected):
    assert [(one.name, one.weight) for one in data_sets(data)] == expected


def test_names_of_files_with_commas_are_one_set(tmp_path):
    (tmp_path / "a,b.jsonl").touch()
    (tmp_path / "c:7").touch()
    for name in ("a,b.jsonl", "a,*.jsonl"):
        assert [one.name for one in data_sets(f"{tmp_path}/{name}")] == [f"{tmp_path}/{name}"]
    sets = data_sets(f"{tmp_path}/c:7,x.jsonl")
    assert [(one.name, one.weight) for one in sets] == [(f"{tmp_path}/c:7", None), ("x.jsonl", None)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a.jsonl,", "names an empty set"),
        ("a.jsonl:1,a.jsonl:2", r"names a\.jsonl twice"),
        ("a.jsonl:1,b.jsonl", r"gives b\.jsonl no weight: give all sets one, as b\.jsonl:0\.5, or none"),
        ("a.jsonl:1,b.jsonl:0", r"the weight of b\.jsonl must be more than 0, got 0"),
        ("a.jsonl:-1,b.jsonl:1", r"the weight of a\.jsonl must be more than 0, got -1"),
        ("a.jsonl:1e999,b.jsonl:1", r"the weight of a\.jsonl must be more than 0, got inf"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused_at_once(data, message):
    with pytest.raises(ValueError, match=message):
        RunRecipe(target="t", data=data, output="new")


def test_a_list_in_yaml_is_the_same_as_a_text_with_commas(tmp_path):
    words = ["--target", "t", "--output", "new", "--config", str(tmp_path / "a.yaml")]
    for listed in ("- a.jsonl:0.7\n- O/N:train_sft:0.3", "- a.jsonl: 0.7\n- O/N:train_sft: 0.3"):
        (tmp_path / "a.yaml").write_text("data:\n" + listed)
        assert parse_recipe(RunRecipe, words, "").data == "a.jsonl:0.7,O/N:train_sft:0.3"
    (tmp_path / "a.yaml").write_text("data: [a.jsonl, b.jsonl]")
    assert parse_recipe(RunRecipe, words, "").data == "a.jsonl,b.jsonl"
    for odd in ("data: [{a: 1, b: 2}]", "data: [[a]]", "data: [{a: true}]", "data: [1]"):
        (tmp_path / "a.yaml").write_text(odd)
        with pytest.raises(ValueError, match=r"data must list texts, or texts with a number as `- NAME: 0\.5`, got"):
            parse_recipe(RunRecipe, words, "")
    (tmp_path / "a.yaml").write_text("data: a\neval_data: [a]")
    with pytest.raises(ValueError, match="eval_data must be a text, got"):
        parse_recipe(RunRecipe, words, "")


def test_shares_of_an_epoch_add_up_to_all_rows():
    assert rows_per_epoch([10, 20, 30], [None] * 3).tolist() == [10, 20, 30]
    assert rows_per_epoch([10, 20, 30], [1, 1, 2]).tolist() == [15, 15, 30]
    assert rows_per_epoch([3, 4], [0.7, 0.3]).tolist() == [5, 2]
    dice = np.random.default_rng(0)
    for _ in range(50):
        sizes, weights = dice.integers(1, 99, 4), dice.random(4).tolist()
        counts, exact = rows_per_epoch(sizes, weights), np.array(weights) / sum(weights) * sizes.sum()
        assert counts.sum() == sizes.sum()
        assert (abs(counts - exact) < 1).all()


def documents_of(start, lengths):
    return [(list(range(start, start + length)), [True] * length) for length in lengths]


@pytest.fixture
def parts():
    """Rows of two sets, of 4 and 6 rows, whose tokens are below 100 and above."""
    return [lay_out(documents_of(10, [5, 3, 4, 2, 5]), 5), lay_out(documents_of(100, [5, 1, 4, 5, 5, 3, 3]), 5)]


def test_blended_rows_are_those_of_the_sets(parts):
    first, second = parts
    blended, before, total = BlendedRows(parts, np.array([5, 5])), len(first), len(first) + len(second)
    assert len(blended) == total
    everything = blended.select(slice(None))
    one, two = (part.select(slice(None)) for part in parts)
    for name in ("input_ids", "position_ids", "supervised"):
        assert torch.equal(getattr(everything, name), torch.cat([getattr(one, name), getattr(two, name)]))
    ids = two.document_ids
    assert torch.equal(everything.document_ids, torch.cat([one.document_ids, ids.where(ids < 0, ids + 5)]))
    some = [total - 1, 0, before, 2, before - 1]
    assert torch.equal(blended.select(some).input_ids, everything.input_ids[some])
    assert blended.count_tokens(some) == int((everything.document_ids[some] >= 0).sum())
    assert torch.equal(torch.cat([block.input_ids for block in blended.blocks()]), everything.input_ids)
    documents = [len(set(row[row >= 0].tolist())) for row in everything.document_ids]
    busiest, longest = blended.busiest()
    assert documents[busiest] == max(documents)
    assert everything.position_ids[longest].max() == everything.position_ids.max()
    assert fingerprint(blended) != fingerprint(BlendedRows(parts, np.array([4, 6])))
    assert fingerprint(blended) != fingerprint(BlendedRows(parts[::-1], np.array([5, 5])))


def test_each_epoch_has_the_shares_and_goes_on_in_larger_sets(parts):
    sizes = [len(part) for part in parts]
    blended, total = BlendedRows(parts, rows_per_epoch(sizes, [3, 1])), sum(sizes)
    counts = blended.counts.tolist()
    fed = [row for step in range(3 * total) for row in rows_of_step(step, 4, blended, seed=1)]
    epochs = [fed[start : start + total] for start in range(0, len(fed), total)]
    taken = [0] * total
    for number, epoch in enumerate(epochs):
        assert sum(row < sizes[0] for row in epoch) == counts[0]
        for row in epoch:
            taken[row] += 1
        for start, size in ((0, sizes[0]), (sizes[0], sizes[1])):  # of a set, no row comes twice more than another
            assert max(taken[start : start + size]) - min(taken[start : start + size]) <= 1, number
    assert epochs[0] != epochs[1]


def test_one_set_alone_is_fed_as_ever(parts):
    alone, blended = ROWS[20], BlendedRows([ROWS[20]], np.array([20]))
    for step in range(12):
        assert rows_of_step(step, 7, alone, 3).tolist() == rows_of_step(step, 7, blended, 3).tolist()


@pytest.fixture
def two(conversations, tmp_path):
    """Files of 20 and of 40 conversations."""
    loaded, paths = load_conversations(conversations), [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, some in zip(paths, (loaded[:20], loaded[20:])):
        write_conversations(path, some)
    return list(map(str, paths))


def packed_folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "packed").iterdir() if path.is_dir())


def test_each_set_is_packed_once_for_all_weights_and_alone(recipe, load, two, tmp_path):
    a, b = two
    alone = [load(recipe(data=one))[0] for one in two]
    before = packed_folders(tmp_path)
    assert len(before) == 2
    built = []
    for weights in ((1, 1), (3, 1)):
        data = f"{a}:{weights[0]},{b}:{weights[1]}"
        documents, held_out, _ = load(recipe(data=data))
        assert documents.sets == tuple(alone)
        in_memory, held_out_in_memory, _ = load(recipe(data=data, packed_data="memory"))
        assert in_memory.sets == tuple(alone)
        assert held_out == held_out_in_memory
        told = []
        built += [build_rows(some, 24, 0, told.append) for some in (documents, in_memory)]
        (one, labels), (other, _) = built[-2:]
        assert fingerprint(one) == fingerprint(other)
        assert labels.tolist() == [n for part in one.parts for n in part.count_labels()]
        share = one.counts[0] / len(one)
        assert abs(share - weights[0] / sum(weights)) < 1 / len(one)
        assert f"{a}: {one.counts[0]} of the {len(one)} rows of an epoch ({share:.1%})" in told[2]
    assert packed_folders(tmp_path) == before
    assert fingerprint(built[0][0]) != fingerprint(built[2][0])
    with pytest.raises(
        ValueError, match=r"the weight of .*b\.jsonl gives it none of the \d+ rows of an epoch: raise it"
    ):
        build_rows(load(recipe(data=f"{a}:1,{b}:1e-9"))[0], 24, 0, print)


def test_what_is_held_out_comes_from_all_sets_and_is_trained_on_in_none(recipe, load, two, tmp_path):
    loaded = [load_conversations(one) for one in two]
    (held_a, held_b) = (load(recipe(data=one, eval_prompts=6))[1] for one in two)
    _, held_out, _ = load(recipe(data=",".join(two), eval_prompts=6))
    assert held_out == [one for pair in zip(held_a, held_b) for one in pair][:6]
    # The second set also has what the first one holds out, among much else of other hashes.
    write_conversations(tmp_path / "c.jsonl", [*loaded[1], *held_a[:4]])
    _, held_out, told = load(recipe(data=f"{two[0]},{tmp_path / 'c.jsonl'}", eval_prompts=6))
    documents = load(recipe(data=str(tmp_path / "c.jsonl"), eval_prompts=6))[0]
    trained = list(documents)
    encoded = encode_conversations(load.tokenizer, held_out)
    assert not [one for one in encoded if one in trained]
    both = [one for one in encode_conversations(load.tokenizer, held_a) if one in trained]
    assert 0 < len(both) <= 4
    assert f"{len(both)} conversations held out of one data set are in another, and are not measured on" in told


def test_evaluation_data_are_in_none_of_the_sets(recipe, load, two, tmp_path):
    (a, b), data = map(load_conversations, two), ",".join(two)
    other = [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]]
    write_conversations(tmp_path / "e.jsonl", [a[0], *other, b[0]])
    assert load(recipe(data=data, eval_data=str(tmp_path / "e.jsonl")))[1] == other
    write_conversations(tmp_path / "f.jsonl", [a[0], b[0]])
    with pytest.raises(ValueError, match="all conversations to measure on are trained on in one of the sets"):
        load(recipe(data=data, eval_data=str(tmp_path / "f.jsonl")))
    named = f"free={tmp_path / 'e.jsonl'},taken={tmp_path / 'f.jsonl'}"
    with pytest.raises(ValueError, match="each conversation of eval_data taken is trained on in one of the sets of"):
        load(recipe(data=data, eval_data=named))
    assert hash_of_conversation(a[0]) != hash_of_conversation(b[0])


def test_as_many_are_measured_on_as_are_in_no_set(recipe, load, two, tmp_path):
    """Though the first ones of the file are in one set or the other, and each set alone leaves others out."""
    (a, b), data = map(load_conversations, two), ",".join(two)
    other = [[{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w2 w3"}] for i in range(5)]
    write_conversations(tmp_path / "e.jsonl", [*a[:3], *b[:3], *other])
    write_conversations(tmp_path / "f.jsonl", [b[4], other[4]])
    for prompts in (2, 4):
        _, held_out, said = load(recipe(data=data, eval_data=str(tmp_path / "e.jsonl"), eval_prompts=prompts))
        assert held_out == other[:prompts]
        left_out = "3 of 11 conversations are also in the training data and are left out"
        assert [text for text in said if left_out in text] == [f"{one}: eval_data: {left_out}" for one in two]
    named = f"many={tmp_path / 'e.jsonl'},few={tmp_path / 'f.jsonl'}"
    _, held_out, _ = load(recipe(data=data, eval_data=named, eval_prompts=2))
    assert [(one[0]["set"], one[0]["content"]) for one in held_out] == [("many", "w0"), ("many", "w1"), ("few", "w4")]
    assert load(recipe(data=data, eval_data=named, eval_prompts=0, packed_data="memory"))[1] == []


def test_named_set_that_the_template_refuses_does_not_vanish(recipe, load, two, tmp_path):
    for name, word in (("good", "w1"), ("bad", "no")):
        messages = [{"role": "user", "content": word}, {"role": "assistant", "content": "w2 w3"}]
        write_conversations(tmp_path / f"{name}.jsonl", [messages])
    named, tokenizer = f"good={tmp_path / 'good.jsonl'},bad={tmp_path / 'bad.jsonl'}", copy.deepcopy(load.tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template
    )
    for data in (two[0], ",".join(two)):
        with pytest.raises(ValueError, match="the chat template takes none of the conversations of eval_data bad"):
            load(recipe(data=data, eval_data=named), tokenizer)


def test_a_run_on_several_sets_resumes_with_the_same_bits(trainer, two, tmp_path):
    a, b = two
    keys = dict(
        data=f"{a}:3,{b}:1", checkpoint_every=2, max_steps=6, eval_prompts=2, eval_tokens=5, cache_features=True
    )
    whole = trainer.run(**keys, output=tmp_path / "whole")
    with in_step(3, terminate):
        trainer.main(**keys)
    assert_same_run(whole, trainer.run(**keys, resume=True))
    config = yaml.safe_load((whole / "config.yaml").read_text())
    assert config["data"] == keys["data"]
    with pytest.raises(ValueError, match="data"):
        trainer.main(**keys | {"data": f"{a}:1,{b}:1"}, resume=True)


def test_stage_2_takes_no_weights(trainers, two):
    with pytest.raises(ValueError, match="leave the weights out of `data`"):
        trainers["stage 2"].main(data=f"{two[0]}:1,{two[1]}:2")
    assert trainers["stage 2"].run(data=",".join(two), max_steps=1)


def test_all_tokens_of_several_sets_are_supervised_where_a_recipe_says_so(trainers, two, capsys):
    trainers["mlp_speculator"].run(data=f"{two[0]}:1,{two[1]}:2", supervise="all", max_steps=1)
    told = capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(trainers["mlp_speculator"].given["target"])
    for path in two:
        labels = sum(len(ids) - 2 for ids, _ in encode_conversations(tokenizer, load_conversations(path)))
        assert f"{path}: {20 if path == two[0] else 40} documents in" in told
        assert f", {labels} labels;" in told


def test_the_survey_tells_the_share_of_each(two, word_target, capsys):
    data = f"{two[0]}:3,{two[1]}:1"
    assert main(["data", data, "--json"]) == 0
    assert [one["epoch"] for one in json.loads(capsys.readouterr().out)["sets"]] == [{"share": 0.75}, {"share": 0.25}]
    words = ["data", data, "--tokenizer", word_target, "--row-length", "24"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]
    sizes = [one["rows"]["rows"] for one in found]
    counts = rows_per_epoch(sizes, [3, 1]).tolist()
    assert [one["epoch"]["rows"] for one in found] == counts
    assert found[0]["epoch"]["passes"] == round(counts[0] / sizes[0], 2) > 1
    assert main(words) == 0
    assert f"{two[0]}: {counts[0] / sum(sizes):.1%} of an epoch, {counts[0]} rows" in capsys.readouterr().out


def test_copies_of_a_file_are_other_sets(recipe, load, two, tmp_path):
    """Held out of one by the same hashes as of the other: nothing is lost."""
    shutil.copy(two[0], tmp_path / "copy.jsonl")
    _, held_out, told = load(recipe(data=f"{two[0]},{tmp_path / 'copy.jsonl'}"))
    assert len(held_out) == 4
    assert not any("held out of one data set" in text for text in told)
