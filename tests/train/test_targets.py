"""Which targets can be trained on, which are refused, and what target, data and output on the command line may not be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from headstart import LLM, SamplingParams
from headstart.heads.checkpoint import load_head
from headstart.hub_export import export
from headstart.train.data.packed.packing import pack
from headstart.train.run.checkpointing import check_output
from headstart.train.teacher import sharded_target
from headstart.train.teacher.features import FrozenTarget

ROOT = Path(__file__).resolve().parents[2]
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

GEMMA3 = SMALL | {
    "initializer_range": 0.3,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA3 |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA3 |= {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
    }
}
TWO_DIMENSIONS = GEMMA3 | {"global_head_dim": 16, "vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 8}


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
    ],
)
def test_other_architectures_train(trainer, tmp_path, word_target, read_metrics, config, keys):
    folder = save(tmp_path / "target", word_target, config, **keys)
    trainer.run(target=folder, max_steps=12, eval_prompts=3, eval_tokens=6)
    first, *_, last = read_metrics()
    assert last["loss"] < first["loss"]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (transformers.OPTConfig, SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        (
            transformers.MixtralConfig,
            SMALL
            | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
        ),
    ],
    ids=["opt", "mixtral"],
)
def test_the_recipe_trains_heads_that_export_and_decode(trainer, tmp_path, word_target, config, keys):
    """configs/medusa.yaml, but for its sizes, on targets that run as their own modules."""
    folder = save(tmp_path / "target", word_target, config, **keys | {"initializer_range": 0.2})
    recipe = {"config": ROOT / "configs" / "medusa.yaml", "accumulate": 1, "num_epochs": 2, "max_steps": 60}
    run = trainer.run(target=folder, **recipe, loss="hard", eval_every=30, eval_prompts=4, eval_tokens=8, lr=0.03)
    measured = json.loads((run / "acceptance.json").read_text())
    assert measured["source"] == "engine"
    output = tmp_path / "export"
    assert export.main([str(run), "--format", "medusa", "--output", str(output)]) == 0
    prompts = [[5, 6, 7], [1], list(range(3, 30))]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=30, ignore_eos=True)
    plain = LLM(str(folder), dtype="float32", max_num_seqs=3)
    drafting = LLM(plain, speculative_config={"model": str(output), "num_speculative_tokens": 3})
    found = [[answer.outputs[0].token_ids for answer in llm.generate(prompts, params)] for llm in (plain, drafting)]
    assert found[0] == found[1]
    assert drafting.get_stats()["num_spec_steps"] > 0


@pytest.mark.parametrize(
    ("family", "keys", "least"),
    [("medusa", {"lr": 0.05, "head_weight_decay": 1}, 1.3), ("mlp_speculator", {"lr": 0.02}, 2)],
)
def test_target_that_the_engine_does_not_run_is_measured_teacher_forced(
    trainers, tmp_path, word_target, read_metrics, capsys, family, keys, least
):
    folder = save(tmp_path / "target", word_target, transformers.Gemma4TextConfig, **TWO_DIMENSIONS)
    # Against the text, so let the heads learn the text: its answers count upwards.
    keys = keys | {"loss": "hard", "num_epochs": 12, "max_steps": 0, "batch_rows": 4, "log_every": 50}
    run = trainers[family].run(target=folder, eval_prompts=6, eval_tokens=6, **keys)
    assert "acceptance is teacher-forced on the held-out text, not the engine's" in capsys.readouterr().err
    (line,) = read_metrics("acceptance")
    saved = json.loads((run / "acceptance.json").read_text())
    assert line["source"] == saved["source"] == "teacher_forced"
    assert line["acceptance_length"] == pytest.approx(1 + sum(line["per_position"]))
    assert line["acceptance_length"] > least
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
            transformers.OpenAIGPTConfig,
            {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
            "OpenAIGPTLMHeadModel fails on a packed row",
        ),
        (
            transformers.RemBertConfig,
            SMALL
            | {"input_embedding_size": 32, "intermediate_size": 32, "output_embedding_size": 40, "is_decoder": True},
            "RemBertForCausalLM takes 40 features and its last hidden state has 32",
        ),
    ],
)
def test_targets_whose_distribution_is_not_in_the_features_are_refused(
    trainer, tmp_path, word_target, config, keys, message
):
    folder = save(tmp_path / "target", word_target, config, **keys)
    with pytest.raises(ValueError, match=message):
        trainer.main(target=folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["medusa", "mlp_speculator", "eagle", "eagle3"])
def test_a_target_with_windows_and_two_ropes_trains_every_head(trainers, tmp_path, word_target, read_metrics, family):
    folder = save(tmp_path / "target", word_target, transformers.Gemma3TextConfig, **GEMMA3)
    run = trainers[family].run(target=folder, max_steps=12, eval_prompts=3, eval_tokens=6)
    first, *_, last = read_metrics()
    assert last["loss"] < first["loss"]
    if family.startswith("eagle"):
        assert load_head(run / "head").config.rope_theta == 1e6  # of the layers that see whole documents


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_targets_without_a_rope_train_heads_with_one_of_their_own(
    trainers, tmp_path, word_target, read_metrics, family
):
    folder = save(tmp_path / "target", word_target, transformers.GPT2Config, **GPT2)
    run = trainers[family].run(target=folder, max_steps=12, eval_prompts=3, eval_tokens=6)
    first, *_, last = read_metrics()
    assert last["loss"] < first["loss"]
    assert json.loads((run / "acceptance.json").read_text())["source"] != "teacher_forced"
    assert load_head(run / "head").config.rope_theta == 1e4


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("eagle", r"those of a gemma4_text target differ \(.*train Medusa"),
        ("eagle3", r"those of a gemma4_text target differ \(.*train Medusa"),
        ("stage 2", r"stage 2 without a generator: .*gemma4_text models.*caches of different shapes.*Train stage 1"),
    ],
)
def test_target_of_another_kind_is_refused_before_the_data_are_read(trainers, tmp_path, word_target, training, message):
    folder = save(tmp_path / "target", word_target, transformers.Gemma4TextConfig, **TWO_DIMENSIONS)
    with pytest.raises(ValueError, match=message):
        trainers[training].main(target=folder, data="missing.jsonl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("training", "message"),
    [("joint", "stage joint needs"), ("stage 2", "stage 2, .* needs")],
    ids=["joint", "stage 2"],
)
def test_divided_target_is_refused_by_second_stages_before_it_is_loaded(
    trainers, tmp_path, monkeypatch, training, message
):
    monkeypatch.setattr(sharded_target, "wants_sharded_target", lambda: True)
    with pytest.raises(ValueError, match=rf"{message} the whole target in every process: .*ddp\.yaml"):
        trainers[training].main(target="/no/such/folder")
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
        ({"row_length": 4}, "no assistant token of 60 documents lies within row_length 4"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(trainer, tmp_path, monkeypatch, keys, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        trainer.main(**keys)
    assert not list(tmp_path.iterdir())


def test_target_whose_weights_are_cut_in_half_is_named(trainer, tmp_path, word_target):
    folder = shutil.copytree(word_target, tmp_path / "target")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"the weights of the target '{folder}' cannot be read: .*copy or download"):
        trainer.main(target=folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("place", "reason"), [("file/run", "Not a directory"), ("/proc/x/run", "No such file")])
def test_output_that_cannot_be_written_is_refused_before_the_target_is_read(trainer, tmp_path, place, reason):
    (tmp_path / "file").write_text("")
    output = tmp_path / place
    with pytest.raises(ValueError, match=rf"output '{output}' cannot be written: .*{reason}.*name a folder"):
        trainer.main(target="/no/such/folder", output=output)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_trial_of_the_output_leaves_nothing_behind(tmp_path):
    check_output(tmp_path / "new" / "run", resume=False, resume_from="")
    assert not list(tmp_path.iterdir())


def test_command_says_what_is_wrong_without_a_traceback(arguments, run_script):
    status, said = run_script(arguments(lr="fast"))
    assert status == 2
    assert said.strip().splitlines()[-1] == "medusa.py: error: --lr must be a number, got 'fast'"
