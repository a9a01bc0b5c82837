"""Stage 2, on text that the target writes; and MLP speculator runs that are stopped and resumed, in both stages."""

import json
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from headstart.heads.checkpoint import save_head
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.inference.open_batch import OpenBatch
from headstart.tests.train.conftest import all_lines, assert_rates_are_those_of_their_step
from headstart.train import mlp_speculator
from headstart.train.data import generated_text, rows
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.generated_text import cut_prompts, generated_documents
from headstart.train.run import loop
from headstart.train.run.checkpointing import list_checkpoints
from headstart.train.teacher import sharded_target

STEPS = {"max_steps": 7, "checkpoint_every": 2, "eval_every": 3, "eval_prompts": 3, "eval_tokens": 8}
STAGE_2 = {"stage": 2, "prompt_tokens": 5, "answer_tokens": 9, "num_prompts": 20, "loss": "hard"}


def run(arguments, **keys):
    assert mlp_speculator.main(arguments(**keys)) == 0


@pytest.fixture
def start(tmp_path):
    torch.manual_seed(5)
    save_head(MLPSpeculator(MLPSpeculatorConfig(32, 48, 24, 3)), tmp_path / "start")
    return tmp_path / "start"


def texts(folder):
    """(made from, [(prompt ids, answer ids)]) of a run's generated.jsonl."""
    first, *lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    return first["made_from"], [(line["ids"][: line["prompt"]], line["ids"][line["prompt"] :]) for line in lines]


def assert_same_run(one, other):
    assert all_lines(one) == all_lines(other)
    heads = [load_file(folder / "head" / "model.safetensors") for folder in (one, other)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    states = [torch.load(list_checkpoints(folder)[-1] / "optimizer.pt", weights_only=True) for folder in (one, other)]
    for index, entry in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][name]) for name, value in entry.items())


def stop_in_step(monkeypatch, step):
    calls, finish_step = [], loop.finish_step

    def finish_and_signal(*given, **named):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return finish_step(*given, **named)

    monkeypatch.setattr(loop, "finish_step", finish_and_signal)


@pytest.mark.parametrize(
    ("step", "keys"),
    [(3, {"cache_features": True, "accumulate": 2, "loss": "lk"}), (5, {"tie_weights": False}), (4, STAGE_2)],
)
def test_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(
    speculator_arguments, tmp_path, monkeypatch, start, step, keys
):
    """And needs nothing of the run that it started from."""
    keys = STEPS | keys | ({"start_from": start} if keys is STAGE_2 else {})
    run(speculator_arguments, **keys)
    stop_in_step(monkeypatch, step)
    assert mlp_speculator.main(speculator_arguments(**keys, output=tmp_path / "stopped")) == 128 + signal.SIGTERM
    assert list_checkpoints(tmp_path / "stopped")[-1].name == f"step-{step:06d}"
    monkeypatch.undo()
    shutil.rmtree(start)
    run(speculator_arguments, **keys, output=tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "stopped")
    assert [line["step"] for line in all_lines(tmp_path / "stopped") if line["kind"] == "acceptance"] == [3, 6, 7]
    if keys.get("loss") == "lk":
        assert_rates_are_those_of_their_step(tmp_path / "stopped")


def test_stage_2_learns_from_what_the_engine_draws_from_pieces_of_the_data(
    speculator_arguments, tmp_path, start, word_target, conversations, capsys
):
    run(speculator_arguments, **STAGE_2, start_from=start)
    made_from, found = texts(tmp_path / "run")
    assert (made_from["num_prompts"], made_from["answer_tokens"], made_from["top_k"]) == (20, 9, 10)
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_target)
    encoded = encode_conversations(tokenizer, load_conversations(conversations))
    pieces = {tuple(ids[i : i + 5]) for ids, _ in encoded for i in range(0, len(ids) - 4, 5)}
    assert all(tuple(prompt) in pieces for prompt, _ in found)
    # Every answer is one that the target's distribution at temperature 1, cut to its 10 likeliest, can give, and they are not its
    # best.
    model, likeliest = transformers.AutoModelForCausalLM.from_pretrained(word_target), 0
    for prompt, answer in found:
        assert len(answer) == 9 or answer[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        ranks = (logits > logits.gather(-1, torch.tensor(answer)[:, None])).sum(-1)
        assert ranks.max() < 10
        likeliest += int((ranks == 0).sum())
    total = sum(len(answer) for _, answer in found)
    assert 0.05 * total < likeliest < 0.8 * total
    # The answers are the labels, whole: a prompt of five tokens leaves room for a root before each.
    labels = int(capsys.readouterr().err.split("20 generated texts in ")[1].split(" tokens, ")[1].split(" labels")[0])
    assert labels == total


def test_generated_text_is_kept_and_read_again(speculator_arguments, tmp_path, start, monkeypatch, capsys):
    keys = STAGE_2 | {"start_from": start, "max_steps": 2}

    def die(*given, **named):
        raise KeyboardInterrupt

    # Killed after the generation and before the first checkpoint.
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish_step", die)
        with pytest.raises(KeyboardInterrupt):
            mlp_speculator.main(speculator_arguments(**keys))
    before = (tmp_path / "run" / "generated.jsonl").read_bytes()
    # As a kill between the renaming of the file and the removal of its parts leaves it.
    (tmp_path / "run" / "generated.jsonl.partial").mkdir()
    (tmp_path / "run" / "generated.jsonl.partial" / "part-00000.jsonl").touch()
    with monkeypatch.context() as patch:
        patch.setattr(OpenBatch, "add", lambda *a, **k: pytest.fail("it generates again"))
        run(speculator_arguments, **keys, resume=True)
        run(speculator_arguments, **keys, resume=True)
    assert "the target's texts are those of" in capsys.readouterr().err
    assert (tmp_path / "run" / "generated.jsonl").read_bytes() == before
    run(speculator_arguments, **keys, output=tmp_path / "other")
    assert_same_run(tmp_path / "run", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.glob("run/*generated*")) == ["generated.jsonl"]


def test_run_killed_while_it_generates_goes_on_behind_the_texts_that_had_ended(
    speculator_arguments, tmp_path, start, monkeypatch
):
    keys = STAGE_2 | {"start_from": start, "max_steps": 2}
    run(speculator_arguments, **keys, output=tmp_path / "whole")
    added, ended = [], 0

    def die_in_the_middle(batch, step=OpenBatch.step):
        nonlocal ended
        if ended > 4:
            raise KeyboardInterrupt
        found = step(batch)
        ended += len(found)
        return found

    def note_and_add(batch, *arguments, tag, add=OpenBatch.add):
        added.append(tag)
        add(batch, *arguments, tag=tag)

    monkeypatch.setattr(generated_text, "AT_ONCE", 3)
    with monkeypatch.context() as patch:
        patch.setattr(OpenBatch, "step", die_in_the_middle)
        with pytest.raises(KeyboardInterrupt):
            mlp_speculator.main(speculator_arguments(**keys))
    assert not (tmp_path / "run" / "generated.jsonl").exists()
    with monkeypatch.context() as patch:
        patch.setattr(OpenBatch, "add", note_and_add)
        run(speculator_arguments, **keys, resume=True)
    assert 4 < ended < 20
    assert len(added) == 20 - ended
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_text_made_from_something_else_is_not_taken(speculator_arguments, tmp_path, start):
    keys = STAGE_2 | {"start_from": start, "max_steps": 1}
    run(speculator_arguments, **keys)
    for name in ("checkpoints", "head"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(ValueError, match=r"generated\.jsonl was made from .*'answer_tokens': 9.* name a new output"):
        mlp_speculator.main(speculator_arguments(**(keys | {"answer_tokens": 8}), resume=True))


@pytest.mark.parametrize(
    ("name", "value"), [("prompt_tokens", 4), ("answer_tokens", 8), ("num_prompts", 18), ("seed", 1)]
)
def test_keys_of_the_generation_change_it(speculator_arguments, tmp_path, start, name, value):
    keys = STAGE_2 | {"start_from": start, "max_steps": 1}
    run(speculator_arguments, **keys)
    run(speculator_arguments, **(keys | {name: value}), output=tmp_path / "changed")
    assert texts(tmp_path / "changed")[1] != texts(tmp_path / "run")[1]
    assert all_lines(tmp_path / "changed") != all_lines(tmp_path / "run")


# ---- refusals ----


def test_stage_2_on_a_divided_target_is_refused_before_it_is_loaded(speculator_arguments, tmp_path, start, monkeypatch):
    monkeypatch.setattr(sharded_target, "wants_sharded_target", lambda: True)
    monkeypatch.setattr(mlp_speculator, "load_target", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"stage 2, .* needs the whole target in every process: .*ddp\.yaml"):
        mlp_speculator.main(speculator_arguments(**STAGE_2, start_from=start))
    assert not (tmp_path / "run").exists()


def test_stage_2_without_a_generator_is_refused_before_any_work(
    speculator_arguments, tmp_path, start, word_target, monkeypatch
):
    config = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": 2}
    folder = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=2)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(word_target).save_pretrained(folder)
    monkeypatch.setattr(rows, "load_conversations", lambda *_, **__: pytest.fail("the data were read"))
    with pytest.raises(
        ValueError, match=r"stage 2 without a generator: .*does not run model type 'gpt2'.*Train stage 1"
    ):
        mlp_speculator.main(speculator_arguments(**STAGE_2, target=folder, start_from=start))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"start_from": ""}, "stage 2 goes on with the head of stage 1: give its run or folder as start_from"),
        ({"answer_tokens": 60}, "prompt_tokens 5 and answer_tokens 60 do not fit into row_length 64"),
        ({"prompt_tokens": 50}, "prompt_tokens is 50 and the longest of 60 conversations has .* tokens: lower it"),
        ({"stage": 3}, "stage must be at most 2"),
        ({"supervise": "user"}, "supervise must be one of assistant, all"),
    ],
)
def test_bad_stages_are_refused(speculator_arguments, tmp_path, start, keys, message):
    with pytest.raises(ValueError, match=message):
        mlp_speculator.main(speculator_arguments(**({"start_from": start} | STAGE_2 | keys)))
    assert not (tmp_path / "run" / "generated.jsonl").exists()


# ---- prompts, and ranks that share the work ----


def test_prompts_are_consecutive_pieces_in_an_order_of_the_seed():
    documents = [(list(range(11)), []), ([50, 51], []), (list(range(20, 26)), [])]
    pieces = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [20, 21, 22], [23, 24, 25]]
    everything = cut_prompts(documents, 3, 0, seed=0)
    assert sorted(everything) == pieces
    assert cut_prompts(documents, 3, 2, seed=0) == everything[:2]
    assert any(cut_prompts(documents, 3, 0, seed=seed) != everything for seed in range(1, 5))


def test_what_is_generated_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    class FakeBatch(dict):
        """Answers with the seed and the prompt's first token, the last prompt first."""

        def __init__(self, llm):
            assert llm == "engine"

        def add(self, prompt, params, tag):
            answer = SimpleNamespace(token_ids=[prompt[0] % 50, params.seed % 50])
            self[tag] = SimpleNamespace(prompt_token_ids=prompt, outputs=[answer])

        def step(self):
            return [self.popitem()]

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            assert not self

    monkeypatch.setattr(generated_text, "OpenBatch", FakeBatch)

    def generate(folder, world):
        folder.mkdir()
        barrier, results = threading.Barrier(world, timeout=20), [None] * world

        def work(rank):
            ranks = SimpleNamespace(process_index=rank, num_processes=world, is_main_process=rank == 0)
            ranks.wait_for_everyone = barrier.wait
            prompts = [[10 * i, 10 * i + 1] for i in range(7)]
            given = {"prompts": prompts, "answer_tokens": 2, "seed": 3, "accelerator": ranks, "note": lambda text: None}
            results[rank] = generated_documents(folder, "engine", "target", **given)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result == results[0] for result in results)
        assert [path.name for path in folder.iterdir()] == ["generated.jsonl"]
        return results[0]

    alone = generate(tmp_path / "one", 1)
    assert generate(tmp_path / "three", 3) == alone
    assert [ids[0] for ids, _ in alone] == [10 * i for i in range(7)]
    assert len({ids[3] for ids, _ in alone}) == 7  # every text has a seed of its own
    assert alone[0][1] == [False, False, True, True]
