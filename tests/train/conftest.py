"""A tiny target on disk, a file of conversations and the scripts on both: what the trainers' tests run on."""

import json
import os
import random
import runpy
import shutil
import socket
import struct
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.tests.train.tiny_runs import Trainer, all_lines, save_start
from headstart.tests.train.trainings import TRAININGS
from headstart.train import medusa
from headstart.train.data import stdlib_pairs

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [f"w{i}" for i in range(44)]


def word_tokenizer():
    """One token per word, and the three special ones: a vocabulary of 48."""
    vocabulary = {word: i for i, word in enumerate(["<|user|>", "<|assistant|>", "<|end|>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def save_target(folder, model):
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def small_llama(initializer_range):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if torch.cuda.is_available() else 8,  # FlexAttention, which trains on GPUs alone, takes 16 at least
        max_position_embeddings=256,
        initializer_range=initializer_range,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def word_target(tmp_path_factory):
    """Folder of a random Llama: hidden 32, 2 layers, vocabulary 48."""
    return save_target(tmp_path_factory.mktemp("target"), small_llama(0.3))  # a distribution with some shape


@pytest.fixture(scope="session")
def counting_target(tmp_path_factory):
    """Folder of the same Llama, which has learned to count upwards, as the answers of `conversations` do."""
    model, end = small_llama(0.02), 4 + len(WORDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        starts, step = torch.randint(0, len(WORDS), (8, 1)), torch.arange(24)
        counting = 4 + (starts + step) % len(WORDS)
        counting[:, :5] = torch.randint(4, end, (8, 5))  # what was asked
        counting[:, 5] = 1
        optimizer.zero_grad()
        model(input_ids=counting, labels=counting.where(step > 6, -100)).loss.backward()
        optimizer.step()
    return save_target(tmp_path_factory.mktemp("counting"), model)


@pytest.fixture(scope="session")
def conversations(tmp_path_factory):
    """A .jsonl of 60 conversations whose answers count upwards, so that there is something to learn."""
    rng = random.Random(0)
    lines = []
    for _ in range(60):
        start, length = rng.randrange(44), rng.randint(4, 14)
        question = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6)))
        answer = " ".join(WORDS[(start + i) % 44] for i in range(length))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def stdlib_source():
    """All pairs of this interpreter's standard library, whose source takes seconds to parse."""
    return stdlib_pairs.stdlib_source_pairs()


@pytest.fixture(scope="session")
def stdlib_splits(stdlib_source):
    """{split: pairs} as stdlib_pairs gives them."""
    return dict(zip(stdlib_pairs.SPLITS, stdlib_pairs.split_pairs(stdlib_source)))


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """start(family, **config) -> folder of heads to start from, which nobody writes into."""
    made = {}

    def start(family, **config):
        name = family, *sorted(config.items())
        if name not in made:
            made[name] = save_start(tmp_path_factory.mktemp("start") / "head", family, **config)
        return made[name]

    return start


@pytest.fixture(scope="session")
def make_trainers(word_target, conversations, start):
    """make_trainers(folder) -> {name of TRAININGS: Trainer}, whose runs lie in the folder."""
    given = {"target": word_target, "data": conversations, "start": start}
    return lambda folder: {name: Trainer(one, folder=folder, **given) for name, one in TRAININGS.items()}


@pytest.fixture
def trainers(make_trainers, tmp_path):
    """{name of TRAININGS: Trainer}, whose runs lie in tmp_path."""
    return make_trainers(tmp_path)


@pytest.fixture
def trainer(trainers):
    """The Trainer of Medusa heads, for what does not hang on the family."""
    return trainers["medusa"]


@pytest.fixture
def arguments(trainer):
    """arguments(lr=0.1, ...) -> its command line."""
    return trainer.arguments


@pytest.fixture(scope="session")
def finished(make_trainers, tmp_path_factory):
    """finished(name of TRAININGS, **keys) -> folder of that run, made once for all tests, which only read it.

    A test asks for it before it patches anything.
    """
    made = {}

    def finished(training, **keys):
        name = training, *sorted((key, str(value)) for key, value in keys.items())
        if name not in made:
            made[name] = make_trainers(tmp_path_factory.mktemp("finished"))[training].run(**keys)
        return made[name]

    return finished


@pytest.fixture
def copied(finished, tmp_path):
    """copied(name of TRAININGS, **keys) -> a copy of that run, which the test may change."""
    return lambda training, **keys: shutil.copytree(finished(training, **keys), tmp_path / "copied")


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(argv) -> (status, what it says on stderr) of train/medusa.py as a script, without a process of its own."""

    def run(words):
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)  # no launcher to leave with
        monkeypatch.setattr(sys, "argv", [medusa.__file__, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(medusa.__file__, run_name="__main__")
        return end.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def read_metrics(tmp_path):
    """read_metrics(kind="train", run="run") -> that run's lines of this kind, without what the clock and the memory decide."""

    return lambda kind="train", run="run": all_lines(tmp_path / run, kind)


def wandb_records(path):
    """Protobuf records of a .wandb file: a 7-byte header, then LevelDB log blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


@pytest.fixture
def read_records():
    """read_records(path) -> what a .wandb file holds."""
    return wandb_records


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """A machine that is not logged in and has an empty home."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def find_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def free_port():
    """free_port() -> a port on which several processes can meet."""
    return find_port


@pytest.fixture(scope="session")
def launch_nodes():
    """benchmarks/training/launch_nodes.py's launch, without its folder on the path."""
    found = spec_from_file_location(
        "launch_nodes", Path(__file__).resolve().parents[2] / "benchmarks" / "training" / "launch_nodes.py"
    )
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module.launch


def run_rank(rank, world, port, failures, check, given):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        check(rank, world, *given)
        dist.destroy_process_group()
    except BaseException:
        failures.put(f"rank {rank}: {traceback.format_exc()}")


@pytest.fixture
def assert_on_ranks():
    """assert_on_ranks(world, check, *given): check(rank, world, *given) on every rank of a gloo group, none of which may raise.

    They are forked off this process, which costs no start of Python; no backward pass works in them.
    """
    if torch.cuda.is_available():
        pytest.skip("forks, which CUDA does not survive; tests/train/test_many_gpus.py starts processes there")

    def run(world, check, *given):
        context = mp.get_context("fork")
        failures, port = context.Queue(), find_port()
        arguments = world, port, failures, check, given
        processes = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        said = [failures.get() for _ in range(failures.qsize())]
        assert not said, said[0]
        assert [process.exitcode for process in processes] == [0] * world

    return run
