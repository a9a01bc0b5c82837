"""`headstart regenerate` on our engine: its answers, that nothing but data, model and settings decides them, and its files."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from headstart.cli import main
from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.inference.llm import LLM
from headstart.inference.models.adapter import fingerprint
from headstart.inference.open_batch import OpenBatch
from headstart.inference.sampling_params import SamplingParams
from headstart.train import medusa, regenerate
from headstart.train.data.conversations import load_conversations
from headstart.train.data.dialogue import Dialogue
from headstart.train.data.encoding import encode_conversations
from headstart.train.data.part_files import PartFiles

ON_CPU = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "32"]
END = 2  # <|end|>


@pytest.fixture(scope="session")
def dialogues(tmp_path_factory):
    """A .jsonl of 24 conversations of one to three turns."""
    lines = []
    for i in range(24):
        turns = [{"role": "system", "content": "w1 w2"}] if i % 4 == 0 else []
        for turn in range(1 + i % 3):
            turns.append({"role": "user", "content": f"w{i} w{3 * turn} w7"})
            turns.append({"role": "assistant", "content": "w0"})
        lines.append(json.dumps({"messages": turns}))
    path = tmp_path_factory.mktemp("dialogues") / "dialogues.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def words(dialogues, word_target, tmp_path):
    """words("out.jsonl", "--seed", 1) -> the command's arguments."""

    def build(output="out.jsonl", *more, data=dialogues):
        return [data, "--model", word_target, "--output", str(tmp_path / output), *ON_CPU, *map(str, more)]

    return build


@pytest.fixture
def run(words, capsys):
    """run("out.jsonl", ...) -> (status, what it said), in this process."""

    def start(*arguments, **keys):
        return main(["regenerate", *words(*arguments, **keys)]), capsys.readouterr().err

    return start


@pytest.fixture(scope="session")
def reference(dialogues, word_target, tmp_path_factory):
    """The file of an uninterrupted run of one process, one conversation after the other, as bytes."""
    path = tmp_path_factory.mktemp("reference") / "out.jsonl"
    arguments = ["regenerate", dialogues, "--model", word_target, "--output", str(path), *ON_CPU]
    assert main([*arguments, "--concurrency", "1"]) == 0
    return path.read_bytes()


def lines_of(content):
    return [json.loads(line) for line in content.splitlines()]


def test_every_turn_is_the_targets_own_answer_behind_its_earlier_ones(reference, dialogues, word_target):
    llm = LLM(word_target, device="cpu", dtype="float32")
    data, lines = load_conversations(dialogues), lines_of(reference)
    several, cut = 0, 0
    for line in lines:
        seeds = Dialogue(line["conversation"], data[line["conversation"]], 0)
        for place, message in enumerate(line["messages"]):
            if message["role"] != "assistant":
                assert message == data[line["conversation"]][place]
                continue
            before = [{"role": one["role"], "content": one["content"]} for one in line["messages"][:place]]
            params = SamplingParams(temperature=1.0, max_tokens=32, seed=seeds.next_seed)
            (output,) = llm.chat(before, params)
            (one,) = output.outputs
            assert message == {"role": "assistant", "content": one.text, "finish_reason": one.finish_reason}
            seeds.answers.append(one)
            several += place > 2
            cut += one.finish_reason == "length"
    assert len(lines) > 15
    assert several > 5
    assert 0 < cut < len(lines)


def test_company_head_and_choice_change_nothing(reference, run, tmp_path):
    torch.manual_seed(5)
    save_head(MLPSpeculator(MLPSpeculatorConfig(32, 48, 24, 3)), tmp_path / "head")
    status, said = run("out.jsonl", "--head", tmp_path / "head", "--concurrency", 7)
    assert (status, "tokens per step" in said) == (0, True)
    assert (tmp_path / "out.jsonl").read_bytes() == reference
    facts = json.loads((tmp_path / "out.jsonl.made_from.json").read_text())
    assert facts["summary"]["acceptance_length"] >= 1
    assert facts["begun_with"]["dtype"] == "float32"
    whole = {line["conversation"]: line for line in lines_of(reference)}
    chosen = set()
    for count in (5, 9):
        assert run(f"{count}.jsonl", "--num-conversations", count)[0] == 0
        lines = lines_of((tmp_path / f"{count}.jsonl").read_bytes())
        assert all(line == whole[line["conversation"]] for line in lines)
        places = [line["conversation"] for line in lines]
        assert places == sorted(places)
        assert chosen < set(places)
        chosen = set(places)
    assert chosen != set(range(len(chosen)))
    assert run("other.jsonl", "--seed", 1)[0] == 0
    assert lines_of((tmp_path / "other.jsonl").read_bytes()) != lines_of(reference)


def test_adapter_answers_and_belongs_to_what_the_file_was_made_from(reference, run, word_target, tmp_path):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(word_target)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    head = Medusa(MedusaConfig(32, 48, 2, 1, True, word_target, fingerprint(tmp_path / "adapter")))
    save_head(head, tmp_path / "head")
    shutil.move(tmp_path / "adapter", tmp_path / "head" / "adapter")
    few = ["--num-conversations", 6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("out.jsonl", "--adapter", tmp_path / "head", "--head", tmp_path / "head", *few)[0] == 0
    facts = json.loads((tmp_path / "out.jsonl.made_from.json").read_text())
    assert facts["made_from"]["adapter"] == head.config.adapter
    llm = LLM(word_target, adapter=tmp_path / "head", device="cpu", dtype="float32")
    lines, frozen = (lines_of(content) for content in ((tmp_path / "out.jsonl").read_bytes(), reference))
    for line in lines:
        end = next(place for place, one in enumerate(line["messages"]) if one["role"] == "assistant")
        params = SamplingParams(temperature=1.0, max_tokens=32, seed=Dialogue(line["conversation"], [], 0).next_seed)
        (output,) = llm.chat(line["messages"][:end], params)
        assert line["messages"][end]["content"] == output.outputs[0].text
    assert all(line not in frozen for line in lines)
    status, said = run("out.jsonl", *few)
    assert status == 2
    assert f"(adapter: '{head.config.adapter}', now None)" in said


@pytest.mark.gpu
def test_company_and_head_change_nothing_on_a_gpu(run, tmp_path):
    torch.manual_seed(5)
    save_head(MLPSpeculator(MLPSpeculatorConfig(32, 48, 24, 3)), tmp_path / "head")
    for name, more in (("alone", []), ("many", ["--head", tmp_path / "head"])):
        concurrency = 1 if name == "alone" else 9
        assert run(f"{name}.jsonl", "--device", "cuda", "--concurrency", concurrency, *more)[0] == 0
    alone = (tmp_path / "alone.jsonl").read_bytes()
    assert len(lines_of(alone)) > 15
    assert (tmp_path / "many.jsonl").read_bytes() == alone


def start(words, rank=0, processes=1, port=0):
    """train/regenerate.py as `accelerate launch` starts one of its processes on a CPU."""
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    if processes > 1:
        shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "RANK": str(rank)}
        shared |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, regenerate.__file__, *words]
    return subprocess.Popen(command, env=os.environ | shared, stderr=subprocess.PIPE, text=True)


def kill_when(process, ready):
    """SIGKILL as soon as ready()."""
    deadline = time.monotonic() + 120
    try:
        while not ready():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow  # three processes that import everything
def test_killed_run_goes_on_in_two_processes_to_the_same_file(reference, words, run, tmp_path):
    part = tmp_path / "out.jsonl.partial" / "part-00000.jsonl"
    process = start(words("out.jsonl", "--concurrency", 1))
    kill_when(process, lambda: part.exists() and part.read_bytes().count(b"\n") > 3)
    assert not (tmp_path / "out.jsonl").exists()
    kept = part.read_bytes().count(b"\n")
    with open(part, "ab") as file:
        file.write(b'[23, {"messages": [{"role": "us')  # as a kill within a write leaves it
    status, said = run("out.jsonl", "--temperature", "0.5")
    assert status == 2
    assert "out.jsonl.partial was begun with other settings (temperature: 1.0, now 0.5): go on with those" in said
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(words("out.jsonl"), rank, 2, port) for rank in range(2)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert f"24 conversations, {kept} of them done before, 2 process(es)" in said[0]
    assert (tmp_path / "out.jsonl").read_bytes() == reference
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.made_from.json"}


def test_sigterm_leaves_a_run_that_goes_on(reference, run, tmp_path, monkeypatch):
    ended = []

    def step_and_signal(batch, step=OpenBatch.step):
        found = step(batch)
        ended.extend(found)
        if len(ended) > 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(OpenBatch, "step", step_and_signal)
        status, said = run("out.jsonl", "--concurrency", 4)
    assert status == 128 + signal.SIGTERM
    assert "the same command goes on" in said
    assert not (tmp_path / "out.jsonl").exists()
    status, said = run()
    assert status == 0
    assert "24 conversations, 0 of them" not in said
    assert (tmp_path / "out.jsonl").read_bytes() == reference


def test_finished_file_is_never_written_again(reference, run, tmp_path):
    (tmp_path / "out.jsonl").write_bytes(b"precious")
    status, said = run()
    assert (status, "says nowhere what it was made from" in said) == (2, True)
    assert (tmp_path / "out.jsonl").read_bytes() == b"precious"
    (tmp_path / "out.jsonl").unlink()
    assert run()[0] == 0
    before = (tmp_path / "out.jsonl").stat()
    status, said = run()
    assert (status, "is finished already" in said) == (0, True)
    status, said = run("out.jsonl", "--seed", 3)
    assert status == 2
    assert "made with other settings (seed: 0, now 3)" in said
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == before.st_mtime_ns


def test_a_target_of_other_weights_by_the_same_name_is_another_run(dialogues, word_target, tmp_path, capsys):
    target = tmp_path / "target"
    shutil.copytree(word_target, target)
    command = ["regenerate", dialogues, "--model", str(target), "--output", str(tmp_path / "out.jsonl"), *ON_CPU]
    command += ["--num-conversations", "2"]
    assert main(command) == main(command) == 0
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    assert main(command) == 2
    assert "weights_checksum" in capsys.readouterr().err


def test_changed_data_is_another_run(run, dialogues, tmp_path):
    data = tmp_path / "data.jsonl"
    lines = Path(dialogues).read_text().splitlines()
    data.write_text("\n".join(lines[:6]))
    assert run(data=str(data))[0] == 0
    data.write_text("\n".join([*lines[:5], lines[7]]))
    status, said = run(data=str(data))
    assert (status, "checksum" in said) == (2, True)


def test_what_cannot_be_answered_is_counted(run, tmp_path):
    user, assistant = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    long = {"role": "user", "content": "w3 " * 260}
    conversations = [[user, assistant], [assistant], [long, assistant], [user, assistant, long, assistant], [user]]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": one}) for one in conversations))
    # Greedy answers of some length: none is empty or ends its conversation.
    status, said = run("out.jsonl", "--temperature", 0, "--max-tokens", 60, data=str(data))
    lines = lines_of((tmp_path / "out.jsonl").read_bytes())
    assert status == 0
    assert [line["conversation"] for line in lines] == [0, 3, 4]
    assert "3 of 5 conversations answered" in said
    assert "1 no user turn" in said
    assert "1 too long for the model (one says: 262 tokens leave no room within 256)" in said
    summary = json.loads((tmp_path / "out.jsonl.made_from.json").read_text())["summary"]
    assert summary["not_answered"] == {"no user turn": 1, "too long for the model": 1}
    assert summary["answers"] == 3
    assert sum(summary["ended_early"].values()) == 1
    assert summary["turns_left_out"] == 1


def test_trainers_take_the_file_and_learn_no_end_of_answers_cut_off(reference, word_target, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(reference)
    tokenizer = transformers.AutoTokenizer.from_pretrained(word_target)
    lines = lines_of(reference)
    encoded = encode_conversations(tokenizer, load_conversations(str(path)))
    ends = {"stop": 0, "length": 0}
    for line, (ids, supervised) in zip(lines, encoded, strict=True):
        reasons = [one["finish_reason"] for one in line["messages"] if one["role"] == "assistant"]
        marks = [mark for token, mark in zip(ids, supervised) if token == END]
        assert marks == [reason == "stop" for reason in reasons]
        for reason in reasons:
            ends[reason] += 1
    assert min(ends.values()) > 3
    keys = {"target": word_target, "data": path, "output": tmp_path / "run", "row_length": 128, "max_steps": 2}
    keys |= {"batch_rows": 2, "eval_prompts": 2, "eval_tokens": 8, "tracker": "none", "autocast": "no", "num_heads": 2}
    assert medusa.main([word for name, value in keys.items() for word in (f"--{name}", str(value))]) == 0
    assert len(load_conversations(str(tmp_path / "run" / "heldout.jsonl"))) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "-1"], "temperature must be 0"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--num-conversations", "0"], "--num-conversations must be at least 1"),
        (["--max-model-len", "999"], "--max-model-len must be from 2 to the model's own limit of 256"),
        (["--head", "/no/such/head"], "/no/such/head"),
        (["--adapter", "/no/such/adapter"], "/no/such/adapter"),
        (["--output", "out.txt"], "--output must end in .jsonl"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(run, tmp_path, more, message):
    status, said = run("out.jsonl", *more)
    assert (status, message in said) == (2, True), said
    assert not list(tmp_path.iterdir())


def test_target_that_the_engine_does_not_run_is_sent_to_an_endpoint(run, tmp_path, word_target):
    config = transformers.BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4)
    config.save_pretrained(tmp_path / "bloom")
    status, said = run("out.jsonl", "--model", tmp_path / "bloom")
    assert (status, "--endpoint URL" in said) == (2, True)


# ---- parts ----


class Alone:
    process_index, num_processes, is_main_process = 0, 1, True

    def wait_for_everyone(self):
        pass


def test_damaged_part_is_named(tmp_path):
    parts = PartFiles(tmp_path / "out.jsonl", {"a": 1}, {}, Alone())
    for index in range(3):
        parts.append(index, {"text": "x" * index})
    path = tmp_path / "out.jsonl.partial" / "part-00000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'[1, {"te', b'[1, {"\x00\x00'))
    with pytest.raises(ValueError, match=r"part-00000\.jsonl, line 2 is damaged: .*remove the line"):
        PartFiles(tmp_path / "out.jsonl", {"a": 1}, {}, Alone())


def test_parts_of_any_number_of_processes_make_one_file(tmp_path):
    for rank in (2, 0):
        one = Alone()
        one.process_index, one.num_processes, one.is_main_process = rank, 3, rank == 0
        if not (tmp_path / "out.jsonl.partial").exists():
            PartFiles(tmp_path / "out.jsonl", {"a": 1}, {"once": 1}, Alone())
        parts = PartFiles(tmp_path / "out.jsonl", {"a": 1}, {"once": rank}, one)
        for index in parts.share(range(8)):
            parts.append(index, {"by": rank})
    parts = PartFiles(tmp_path / "out.jsonl", {"a": 1}, {"once": 9}, Alone())
    missing = parts.share(range(8))
    for index in missing:
        parts.append(index, {"by": "alone"})
    records = parts.collect()
    assert sorted(records) == list(range(8))
    assert 0 < len(missing) < 8
    assert {record["by"] for record in records.values()} == {2, 0, "alone"}
    parts.finish(json.dumps(records[index]) for index in range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8
