"""The keys of every script: each does something, equal ones give equal runs, and bad ones are refused before any work."""

import json

import pytest
from transformers import AutoTokenizer

from headstart.tests.train.tiny_runs import all_lines, head_tensors
from headstart.tests.train.trainings import EVERYTHING, HEADS, TRAININGS
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.run.run_recipe import RunRecipe

# ---- every key does something ----

CHANGES = [
    (training, base, key, value)
    for training, one in TRAININGS.items()
    for base, changes in one.changes
    for key, value in changes.items()
]


def observe(folder):
    """All that a run leaves behind, apart from what the clock and the memory decide and from the recipe itself."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    weights = {name: tensor.tolist() for name, tensor in head_tensors(folder).items()}
    written = folder / "generated.jsonl"
    return all_lines(folder), files, weights, written.read_text() if written.exists() else ""


@pytest.mark.parametrize(
    ("training", "base", "key", "value"), CHANGES, ids=[f"{training}-{key}" for training, _, key, _ in CHANGES]
)
def test_key_changes_the_run(trainers, finished, training, base, key, value):
    one, other = finished(training, **base), trainers[training].run(**(base | {key: value}))
    assert observe(one) != observe(other)
    if training == "stage 2":  # whatever else it changes, it changes the texts
        texts = [(folder / "generated.jsonl").read_text().splitlines()[1:] for folder in (one, other)]
        assert texts[0] != texts[1]
        assert all_lines(one) != all_lines(other)


@pytest.mark.parametrize(
    ("training", "keys"), [("medusa", EVERYTHING), *((name, one.changes[0][0]) for name, one in TRAININGS.items())]
)
def test_equal_recipes_give_equal_runs(trainers, finished, training, keys):
    """After the test above: what is left of other runs in this process changes nothing, so its keys do."""
    assert observe(trainers[training].run(**keys)) == observe(finished(training, **keys))


def test_every_loss_trains_its_own_way(trainer, tmp_path):
    runs = [
        trainer.run(loss=loss, max_steps=2, output=tmp_path / loss)
        for loss in ("hard", "lk-log", "lk", "tv", "hard-l1")
    ]
    seen = [observe(run)[2] for run in runs]
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


def test_num_epochs_decides_where_max_steps_does_not(trainer, tmp_path):
    short, long = (
        all_lines(trainer.run(max_steps=0, num_epochs=epochs, output=tmp_path / str(epochs))) for epochs in (0.25, 0.5)
    )
    assert len(long) > len(short)


def test_eval_data_replaces_the_split(trainer, tmp_path, capsys):
    other = tmp_path / "held_out.jsonl"
    messages = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5 w6 w7 w8"}]
    other.write_text(json.dumps({"messages": messages}))
    run = trainer.run(max_steps=1, eval_prompts=4, eval_tokens=8, eval_data=other)
    samples = json.loads((run / "acceptance.json").read_text())["samples"]
    assert [sample["prompt"] for sample in samples] == ["<|user|> w1 w2 w3 <|assistant|>"]
    assert " 60 documents in " in capsys.readouterr().err  # nothing was taken out of the training data for it


def test_all_tokens_are_supervised_if_the_recipe_says_so(trainers, tmp_path, word_target, conversations, capsys):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    encoded = encode_conversations(tokenizer, load_conversations(conversations))
    counted = {}
    for supervise in ("assistant", "all"):
        trainers["mlp_speculator"].run(max_steps=1, supervise=supervise, output=tmp_path / supervise)
        counted[supervise] = int(capsys.readouterr().err.split(" tokens, ")[1].split(" labels")[0])
    assert counted["all"] == sum(len(ids) - 2 for ids, _ in encoded)
    assert counted["assistant"] == sum(sum(marks[2:]) for _, marks in encoded) < counted["all"]


# ---- every key is accounted for ----


def test_every_key_is_accounted_for():
    """Those of all scripts by the runs of Medusa heads, a script's own by its own."""
    of_all = set(RunRecipe.__dataclass_fields__)
    for family in HEADS:
        one = TRAININGS[family]
        changed = {key for _, changes in one.changes for key in changes}
        assert changed | one.elsewhere <= one.keys, family
        expected = one.keys if family == "medusa" else one.keys - of_all
        assert expected <= changed | one.elsewhere, family
    for second, first in (("joint", "medusa"), ("stage 2", "mlp_speculator")):
        assert TRAININGS[second].changes[0][1].keys() - {"seed"} <= TRAININGS[first].elsewhere


@pytest.mark.parametrize("family", HEADS)
def test_every_field_is_read_by_the_run(trainers, family, monkeypatch):
    """Saving and checking the recipe go around attribute access, so what is seen here is what the runs of the script ask for."""
    script, names, seen = TRAININGS[family].script, TRAININGS[family].keys, set()

    class Watched(script.Recipe):
        def __getattribute__(self, name):
            if name in names:
                seen.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(script, "Recipe", Watched)
    for training in (name for name, one in TRAININGS.items() if one.family == family):
        keys = TRAININGS[training].everything | {"max_steps": 0, "num_epochs": 0.2}
        output = trainers[training].run(**keys, output=trainers[training].folder / training)
        if training == family:
            trainers[training].run(**keys, output=output, resume=True)
    assert names - seen == set()


# ---- what is refused ----

REFUSED = [
    ("eagle", {"num_steps": 9}, "num_steps must be at most 8, got 9"),
    ("eagle", {"max_grad_norm": 1}, r"max_grad_norm 1\.0 and max_grad_value 0\.5 both cut the gradient"),
    ("eagle", {"token_weight": 0, "feature_weight": 0}, "both 0: nothing would be learned"),
    ("eagle", {"loss": "ce"}, "loss must be one of hard, kl, lk, lk-log, hard-l1"),
    ("eagle3", {"num_steps": 9}, "num_steps must be at most 8, got 9"),
    ("eagle3", {"num_speculative_tokens": 9}, "num_speculative_tokens must be at most 8, got 9"),
    (
        "eagle3",
        {"aux_layers": "0,1,3"},
        r"to at most 2 \(after the last layer of this target\), got \[0, 1, 3\]",
    ),
    ("eagle3", {"aux_layers": "1,0"}, r"layer ids must rise .*got \[1, 0\]"),
    (
        "eagle3",
        {"aux_layers": "1;2"},
        "aux_layers must be layer numbers with commas between them, as 2,16,29, got '1;2'",
    ),
    (
        "eagle3",
        {"aux_layers": ""},
        "a target of 2 layers has no default aux layers .*: in a recipe aux_layers, as 1,4",
    ),
    ("eagle3", {"draft_vocab_size": 49}, "draft_vocab_size must be from 2 to the vocab_size 48, got 49"),
    ("eagle3", {"draft_vocab_size": 1}, "draft_vocab_size must be from 2 to the vocab_size 48, got 1"),
    (
        "eagle3",
        {"hidden_size": 15},
        "hidden_size 15: a head is at most as wide as its target, here 32, .* a multiple of 8",
    ),
    ("eagle3", {"hidden_size": 64}, "hidden_size 64: a head is at most as wide as its target, here 32"),
    ("block", {"block_size": 1}, "block_size must be at least 2, got 1"),
    ("block", {"depth_weights": "dpace"}, "depth_weights dpace weighs the loss hard, got loss 'kl': set loss to hard"),
    ("block", {"aux_layers": "1,0"}, r"layer ids must rise .*got \[1, 0\]"),
    ("block", {"aux_layers": "0,2"}, r"aux_layers must be below the target's 2 layers, got 0,2"),
    ("block", {"mask_token_id": 48}, "mask_token_id must be below the vocab_size 48, got 48"),
    ("joint", {"start_from": ""}, "stage joint continues .*: name their run or folder with start_from"),
    ("joint", {"cache_features": True}, "set cache_features to false"),
    ("joint", {"lr": 0}, "lr and lora_alpha above 0"),
    ("joint", {"target_loss": "lk"}, "target_loss must be one of kl, hard"),
    (
        "stage 2",
        {"start_from": ""},
        "stage 2 goes on with the head of stage 1: give its run or folder as start_from",
    ),
    (
        "stage 2",
        {"answer_tokens": 60},
        "prompt_tokens 5 and answer_tokens 60 do not fit into row_length 64",
    ),
    ("stage 2", {"stage": 3}, "stage must be at most 2"),
    ("stage 2", {"supervise": "user"}, "supervise must be one of assistant, all"),
    ("medusa", {"max_stesp": 3}, "unknown key 'max_stesp'; did you mean 'max_steps'"),
]


@pytest.mark.parametrize(("training", "keys", "message"), REFUSED)
def test_bad_recipes_are_refused_before_the_data_are_read(trainers, tmp_path, training, keys, message):
    with pytest.raises(ValueError, match=message):
        trainers[training].main(data="missing.jsonl", **keys)
    assert not list(tmp_path.iterdir())
