"""Stage 2 of train/mlp_speculator.py, on text that the target writes: train/data/generated_text.py."""

import gc
import json
import shutil
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers

from headstart.inference.open_batch import OpenBatch
from headstart.tests.train.tiny_runs import Killed, assert_same_run, die, in_step
from headstart.tests.train.trainings import CHEAP
from headstart.train import mlp_speculator
from headstart.train.data import generated_text
from headstart.train.data.conversations import load_conversations
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.generated_text import cut_prompts, generated_documents


@pytest.fixture
def stage_2(trainers):
    """Stage 2 on 20 prompts of 5 tokens, and answers of 9."""
    return trainers["stage 2"]


def texts(folder):
    """(made from, [(prompt ids, answer ids)]) of a run's generated.jsonl."""
    first, *lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    return first["made_from"], [(line["ids"][: line["prompt"]], line["ids"][line["prompt"] :]) for line in lines]


def test_stage_2_learns_from_what_the_engine_draws_from_pieces_of_the_data(stage_2, word_target, conversations, capsys):
    made_from, found = texts(stage_2.run(**CHEAP))
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


def test_dry_run_counts_the_texts_that_the_run_would_generate_and_frees_the_generator(stage_2, monkeypatch, capsys):
    """20 texts of 5 + 9 tokens, four in a row: 5 rows, and 8 steps of 2 rows for 3 epochs."""
    built, lives, build_rows = [], [], mlp_speculator.build_rows

    def build(*given):
        llm = generated_text.build_generator(*given)
        built.append(weakref.ref(llm))
        return llm

    def count(*given):
        gc.collect()
        lives.append(built[0]() is not None)
        return build_rows(*given)

    monkeypatch.setattr(mlp_speculator, "build_generator", build)
    monkeypatch.setattr(mlp_speculator, "build_rows", count)
    assert stage_2.main(dry_run=True, max_steps=0, num_epochs=3) == 0
    said = capsys.readouterr().err
    assert "dry run: no text is generated; 20 of full length, made of the data, stand for it" in said
    assert f"20 generated texts in 5 rows of 64 tokens, {20 * 9} labels;" in said
    assert "dry run: 8 steps would take about" in said
    assert lives == [False]
    with pytest.raises(ValueError, match="prompt_tokens is 40 and the longest of 60 conversations has"):
        stage_2.main(dry_run=True, prompt_tokens=40)


def test_generated_text_is_kept_and_read_again(stage_2, finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    # Killed after the generation and before the first checkpoint.
    with in_step(1, die), pytest.raises(Killed):
        stage_2.main(**CHEAP)
    before = (run / "generated.jsonl").read_bytes()
    # As a kill between the renaming of the file and the removal of its parts leaves it.
    (run / "generated.jsonl.partial").mkdir()
    (run / "generated.jsonl.partial" / "part-00000.jsonl").touch()
    monkeypatch.setattr(OpenBatch, "add", lambda *a, **k: pytest.fail("it generates again"))
    stage_2.run(**CHEAP, resume=True)
    stage_2.run(**CHEAP, resume=True)
    monkeypatch.undo()
    assert "the target's texts are those of" in capsys.readouterr().err
    assert (run / "generated.jsonl").read_bytes() == before
    assert_same_run(run, finished("stage 2", **CHEAP))
    assert sorted(path.name for path in run.glob("*generated*")) == ["generated.jsonl"]


def test_run_killed_while_it_generates_goes_on_after_the_texts_that_had_ended(stage_2, finished, tmp_path, monkeypatch):
    whole, added, ended = finished("stage 2", **CHEAP), [], 0

    def die_in_the_middle(batch, step=OpenBatch.step):
        nonlocal ended
        if ended > 4:
            raise Killed
        found = step(batch)
        ended += len(found)
        return found

    def note_and_add(batch, *arguments, tag, add=OpenBatch.add):
        added.append(tag)
        add(batch, *arguments, tag=tag)

    monkeypatch.setattr(generated_text, "AT_ONCE", 3)
    with monkeypatch.context() as patch:
        patch.setattr(OpenBatch, "step", die_in_the_middle)
        with pytest.raises(Killed):
            stage_2.main(**CHEAP)
    assert not (tmp_path / "run" / "generated.jsonl").exists()
    monkeypatch.setattr(OpenBatch, "add", note_and_add)
    run = stage_2.run(**CHEAP, resume=True)
    assert 4 < ended < 20
    assert len(added) == 20 - ended
    assert_same_run(whole, run)


def test_text_made_from_something_else_is_not_taken(stage_2, copied):
    run = copied("stage 2", **CHEAP)
    for name in ("checkpoints", "head"):
        shutil.rmtree(run / name)
    with pytest.raises(ValueError, match=r"generated\.jsonl was made from .*'answer_tokens': 9.* name a new output"):
        stage_2.main(**CHEAP, answer_tokens=8, output=run, resume=True)


def test_data_without_a_prompt_of_that_length_are_refused(stage_2, tmp_path):
    message = "prompt_tokens is 50 and the longest of 60 conversations has .* tokens: lower it"
    with pytest.raises(ValueError, match=message):
        stage_2.main(prompt_tokens=50)
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
