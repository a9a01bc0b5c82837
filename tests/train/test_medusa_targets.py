"""Which targets can be trained on, what is refused, and what the data and the command line may not be."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from headstart.train import medusa
from headstart.train.data.conversations import BUILT_IN, load_conversations
from headstart.train.data.packing import pack
from headstart.train.data.rows import build_rows, choose_documents, count_labels, rows_of_step
from headstart.train.run.checkpointing import check_output
from headstart.train.teacher.features import FrozenTarget

SMALL = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}
GPT2 = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


def save(folder, word_target, config, **keys):
    """A random model of this config, with the tiny target's tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**keys))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(word_target).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (transformers.GPT2Config, GPT2),
        (transformers.GPTNeoXConfig, SMALL | {"intermediate_size": 64}),
        (transformers.Qwen3Config, SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}),
        (transformers.OPTConfig, SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    ],
)
def test_other_families_train(arguments, tmp_path, word_target, read_metrics, config, keys):
    folder = save(tmp_path / "target", word_target, config, **keys)
    assert medusa.main(arguments(target=folder, max_steps=20, eval_prompts=3, eval_tokens=6, lr=0.01)) == 0
    lines = read_metrics()
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_target_that_the_engine_does_not_run_is_measured_teacher_forced(
    arguments, tmp_path, word_target, read_metrics, capsys
):
    folder = save(tmp_path / "target", word_target, transformers.GPT2Config, **GPT2)
    # Against the text, so let the heads learn the text: its answers count upwards.
    keys = {"loss": "hard", "lr": 0.05, "num_epochs": 12, "max_steps": 0, "head_weight_decay": 1}
    assert medusa.main(arguments(target=folder, eval_prompts=6, eval_tokens=6, **keys)) == 0
    assert "acceptance is teacher-forced on the held-out text, not the engine's" in capsys.readouterr().err
    (line,) = read_metrics("acceptance")
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert line["source"] == saved["source"] == "teacher_forced"
    assert line["acceptance_length"] == pytest.approx(1 + sum(line["per_position"]))
    assert line["acceptance_length"] > 1.3
    assert line["per_position"] == sorted(line["per_position"], reverse=True)
    assert len(saved["samples"]) == 2
    assert saved["samples"][0]["prompt"].startswith("<|user|>")


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (
            transformers.Gemma2Config,
            SMALL
            | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
            | {"final_logit_softcapping": 0.01, "layer_types": ["full_attention"] * 2},
            r"logits of Gemma2ForCausalLM are not lm_head\(last hidden state\)",
        ),
        (
            transformers.BloomConfig,
            {"vocab_size": 48, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            "takes no position_ids",
        ),
        (
            transformers.MistralConfig,
            SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 5},
            "its sliding window is shorter",
        ),
    ],
)
def test_targets_whose_distribution_is_not_in_the_features_are_refused(
    arguments, tmp_path, word_target, config, keys, message
):
    folder = save(tmp_path / "target", word_target, config, **keys)
    with pytest.raises(ValueError, match=message):
        medusa.main(arguments(target=folder))
    assert not (tmp_path / "run").exists()


def test_features_of_a_packed_row_are_those_of_its_documents_alone(word_target):
    target = FrozenTarget(transformers.AutoModelForCausalLM.from_pretrained(word_target).eval())
    documents = [torch.randint(0, 48, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 1, 14)]
    packed = pack([(d.tolist(), [True] * len(d)) for d in documents], 29)
    features = target.features(packed.input_ids, packed.position_ids, packed.document_ids)
    assert features.isfinite().all()
    for i, document in enumerate(documents):
        alone = target.model.model(input_ids=document[None]).last_hidden_state[0]
        torch.testing.assert_close(features[packed.document_ids == i], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target": "/no/such/folder"}, "'/no/such/folder': there is no such folder"),
        ({"target": "./gone"}, "there is no such folder"),
        ({"target": "models/llama/tiny"}, "'models/llama/tiny': there is no such folder"),
        ({"target": "nobody/no-such-model"}, "neither a model folder here nor a model on the Hub"),
        ({"row_length": 300}, "row_length 300 is more than the target's 256 positions"),
        ({"data": "missing.jsonl"}, r"missing\.jsonl cannot be read"),
        ({"eval_prompts": 60}, "nothing is left; give more data"),
        ({"eval_tokens": 200, "eval_prompts": 2}, "no held-out prompt leaves room for 200 new tokens"),
        ({"row_length": 4}, "no assistant token of 60 conversations lies within row_length 4"),
        ({"max_stesp": 3}, "unknown key 'max_stesp'; did you mean 'max_steps'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, tmp_path, monkeypatch, keys, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        medusa.main(arguments(**keys))
    assert not list(tmp_path.iterdir())


def test_target_whose_weights_are_cut_in_half_is_named(arguments, tmp_path, word_target):
    folder = shutil.copytree(word_target, tmp_path / "target")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"the weights of the target '{folder}' cannot be read: .*copy or download"):
        medusa.main(arguments(target=folder))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("place", "reason"), [("file/run", "Not a directory"), ("/proc/x/run", "No such file")])
def test_output_that_cannot_be_written_is_refused_before_the_target_is_read(
    arguments, tmp_path, monkeypatch, place, reason
):
    monkeypatch.setattr(medusa, "load_target", lambda *a: pytest.fail("the target was read"))
    (tmp_path / "file").write_text("")
    output = tmp_path / place
    with pytest.raises(ValueError, match=rf"output '{output}' cannot be written: .*{reason}.*name a folder"):
        medusa.main(arguments(output=output))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trial_of_the_output_leaves_nothing_behind(tmp_path):
    check_output(tmp_path / "new" / "run", resume=False, resume_from="")
    assert not list(tmp_path.iterdir())


def test_command_says_what_is_wrong_without_a_traceback(arguments, run_script):
    status, said = run_script(arguments(lr="fast"))
    assert status == 2
    assert said.strip().splitlines()[-1] == "medusa.py: error: --lr must be a number, got 'fast'"


# ---- rows ----


def test_max_tokens_picks_whole_conversations_at_random(word_target, conversations):
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_target)
    loaded = load_conversations(conversations)

    def rows(max_tokens, seed):
        documents = choose_documents(tokenizer, loaded, 64, max_tokens, seed)
        return build_rows(documents, 64, tokenizer.pad_token_id, note=lambda text: None)

    everything, _ = rows(0, 0)
    some, counts = rows(400, 0)
    others, _ = rows(400, 1)
    tokens = int((some.document_ids >= 0).sum())
    assert 370 < tokens <= 400 < int((everything.document_ids >= 0).sum())
    assert some.input_ids.tolist() != others.input_ids.tolist()
    assert torch.equal(torch.from_numpy(counts), count_labels(some))


def test_labels_per_row_count_what_the_first_head_predicts():
    marks = [False, False, True, True]
    packed = pack([([1, 2, 3, 4], marks), ([5, 6], [True, True]), ([7, 8, 9], [True] * 3)], 6)
    assert sorted(count_labels(packed).tolist()) == [1, 2]


def test_every_epoch_feeds_every_row_once_in_an_order_of_its_own():
    fed = [row for step in range(15) for row in rows_of_step(step, 4, 20, seed=3)]
    epochs = [fed[:20], fed[20:40], fed[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert fed[:4] != rows_of_step(0, 4, 20, seed=4).tolist()


def test_a_run_keeps_the_conversations_it_held_out(arguments, conversations, tmp_path):
    assert medusa.main(arguments(eval_prompts=5, eval_tokens=8, max_steps=1)) == 0
    held_out = load_conversations(str(tmp_path / "run" / "heldout.jsonl"))
    everything = load_conversations(conversations)
    assert len(held_out) == 5
    assert all(conversation in everything for conversation in held_out)


def test_a_run_on_a_built_in_set_keeps_what_its_target_does_not_ship(arguments, conversations, tmp_path, monkeypatch):
    examples = load_conversations(conversations)
    pairs = {"train": examples[:8], "heldout": examples[8:10]}
    built_in = [SimpleNamespace(conversation=lambda one=one: one) for one in pairs["train"]]
    held_out = [SimpleNamespace(conversation=lambda one=one: one) for one in pairs["heldout"]]
    monkeypatch.setitem(BUILT_IN, "tiny", lambda split: built_in if split == "train" else held_out)
    given = arguments(data="tiny", eval_prompts=2, eval_tokens=8, max_steps=1)
    target = shutil.copytree(given[given.index("--target") + 1], tmp_path / "target")
    given[given.index("--target") + 1] = str(target)
    path, kept = tmp_path / "eval.jsonl", tmp_path / "run" / "heldout.jsonl"
    path.write_text("\n".join(json.dumps({"messages": one}) for one in examples[20:22]))
    assert medusa.main(given) == 0
    assert load_conversations(str(kept)) == pairs["heldout"]
    assert medusa.main([*given, "--resume", "--max_steps", "2", "--eval_data", str(path)]) == 0
    assert load_conversations(str(kept)) == examples[20:22]
    (target / "heldout.jsonl").write_text(path.read_text())
    assert medusa.main([*given, "--resume", "--max_steps", "3"]) == 0
    assert not kept.exists(), "what the target ships is read there"
