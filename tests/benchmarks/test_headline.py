"""benchmarks/headline/: every stage at the smallest size, on made-up source and sums; what is refused before long work starts."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headstart.benchmarks.headline import corpus, families, headline
from headstart.benchmarks.headline.heads import steps_within, words
from headstart.benchmarks.headline.replay import Replay
from headstart.benchmarks.headline.settings import Settings
from headstart.benchmarks.headline.target import load_make
from headstart.benchmarks.headline.work_folder import WorkFolder
from headstart.tests.train.trainings import TRAININGS
from headstart.train.data.packed.packing import pack
from headstart.train.data.stdlib_pairs import Pair, is_heldout
from headstart.train.run.recipe import parse_recipe

SMALLEST = {
    "max_pairs": 300, "math_test": 8, "heldout_pairs": 8, "vocab_size": 320, "width": 64, "draft_width": 64, "target_rows": 2,
    "target_minutes": 0.01, "head_minutes": 0.001, "trial_steps": 2, "num_answers": 12, "answer_tokens": 8, "rate_prompts": 1,
    "prompts": 2, "alone": 1, "batch": 2, "max_tokens": 6, "depth": 2, "nodes": 4, "speed_prompt": 8, "speed_tokens": 40,
    "speed_minutes": 9,
}  # fmt: skip


@pytest.fixture
def source(monkeypatch):
    """Made-up functions in place of the standard library's."""

    def pairs(further):
        return [
            Pair(
                f"module{i}",
                f"add_{i}",
                f"Write the Python function `add_{i}`: Add {i} to a number and return it.",
                f"def add_{i}(number):\n    if number is None:\n        return {i}\n    return number + {i}",
                True,
            )
            for i in range(400)
        ]

    monkeypatch.setattr(corpus, "stdlib_source_pairs", pairs)
    return pairs(True)


@pytest.fixture
def mathematics(tmp_path):
    """A JSONL of sums."""
    path = tmp_path / "sums.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and 2?"},
                {"role": "assistant", "content": f"#### {i + 2}"},
            ]
        }
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_stage_runs_and_a_second_call_goes_on_where_the_first_ended(
    source, mathematics, tmp_path, capsys, one_thread
):
    given = [word for name, value in SMALLEST.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    work, output = tmp_path / "work", tmp_path / "result.json"
    call = ["--scale", "tiny", "--math", mathematics, "--work", str(work), "--output", str(output), *given]
    call += ["--only", "Medusa; draft model; n-gram"]
    assert headline.main([*call, "--stage", "target,answers"]) == 0
    assert headline.main(call) == 0
    said = capsys.readouterr().out
    assert "target: finished before" in said
    assert "acceptance: 3 parts to do" in said
    result = json.loads(output.read_text())
    assert set(result["facts"]["target"]["bits_per_byte"]) == {"code", "mathematics"}
    assert result["facts"]["answers"]["answered"] == 12
    assert set(result["facts"]["heads"]) == {"medusa", "draft-model"}
    rows = [row for row in result["rows"] if row["table"] == "acceptance"]
    # two subjects, two temperatures, two batches, the chain at least, for each of three sources
    assert len(rows) >= 24
    assert not any(row["other_outputs"] for row in rows)
    assert {row["source"] for row in result["rows"] if row["table"] == "speed"} == {"Medusa", "draft model", "n-gram"}
    assert [row["depth"] for row in result["rows"] if row["table"] == "library"] == [2] * 4
    measured = set((work / "heldout-code.jsonl").read_text().splitlines())
    asked = (work / "prompts.jsonl").read_text()
    assert len(measured) == 3
    assert not any(json.loads(line)["messages"][0]["content"] in asked for line in measured)
    with pytest.raises(ValueError, match="was begun with width 64, not 128"):
        headline.main([*call, "--width", "128"])


def test_nothing_held_out_is_trained_on_and_all_seeds_hold_out_the_same(source, mathematics):
    found = []
    for seed in (0, 1):
        settings = Settings.at("tiny", math=mathematics, seed=seed, math_test=8)
        train, heldout, _ = corpus.read_code(settings, lambda pair: True)
        sums, held_sums = corpus.read_mathematics(settings, lambda pair: True)
        assert heldout
        assert all(is_heldout(pair.module) for pair in heldout)
        assert not any(is_heldout(pair.module) for pair in train)
        assert len(held_sums) == 8
        assert len(sums) == 32
        assert not {one.prompt for one in sums} & {one.prompt for one in held_sums}
        found.append((heldout, held_sums))
    assert found[0] == found[1]


def test_a_prompt_that_is_held_out_is_asked_in_no_training_pair_and_measured_once(source, monkeypatch):
    heldout = [pair for pair in source if is_heldout(pair.module)]
    taken = [pair for pair in source if not is_heldout(pair.module)]
    same_prompts = [
        Pair(taken[0].module, "copy", heldout[0].prompt, "def copy(number):\n    return number - 1_000_000", True),
        Pair(heldout[1].module, "copy", heldout[1].prompt, "def copy(number):\n    return number - 2_000_000", True),
    ]
    monkeypatch.setattr(corpus, "stdlib_source_pairs", lambda further: [*source, *same_prompts])
    train, measured, _ = corpus.read_code(Settings.at("tiny"), lambda pair: True)
    prompts = [pair.prompt for pair in measured]
    assert len(prompts) == len(set(prompts)) == len(heldout)
    assert not {pair.prompt for pair in train} & set(prompts)


def test_what_is_measured_has_the_dtypes_of_what_is_trained_on(source):
    """Another dtype of the numbers of documents compiles the loss again, within the minutes of training."""
    make, settings = load_make(), Settings.at("tiny")
    tokenizer = make.corpus.train_tokenizer(source, 320)
    measured = corpus.measure_size(source, tokenizer, settings, make).rows
    trained = make.run.on_device(pack(make.corpus.encode(tokenizer, source), 256), torch.device("cpu"))
    assert measured.document_ids.dtype == trained.document_ids.dtype


@pytest.mark.parametrize("name", [source.name for source in families.HEADS])
def test_the_trainer_of_a_family_takes_its_keys(name):
    (source,) = families.choose(name)
    script = next(one.script for one in TRAININGS.values() if one.family == source.trainer)
    keys = {"target": "t", "data": "d", "output": "o"} | source.recipe(Settings.at("full", depth=3))
    recipe = parse_recipe(script.Recipe, words(keys), "")
    depths = {
        getattr(recipe, one)
        for one in ("num_heads", "num_steps", "num_speculative_tokens", "num_depths")
        if hasattr(recipe, one)
    }
    assert 3 in depths
    assert recipe.loss == ("lk" if source.rival else "kl")


def test_a_step_that_compiles_late_in_the_trial_does_not_shorten_the_run():
    def line(step, speed):
        return {"step": step, "tokens": 1000 * step, "tokens_per_second": speed}

    speeds = (50, 1000, 4000, 4000, 4000, 3900, 4100, 4000, 90, 4000)
    lines = [line(6 * (i + 1), speed) for i, speed in enumerate(speeds)]
    assert steps_within(60, lines) == 240
    assert steps_within(0.001, [line(2, 100.0)]) == 2


def test_a_part_that_fails_does_not_end_the_others(mathematics, tmp_path, monkeypatch, capsys, one_thread):
    work = WorkFolder(tmp_path / "work", Settings.at("tiny", math=mathematics))

    def train(source, *given):
        if source.name == "EAGLE":
            raise RuntimeError("no such kernel")
        work.keep("heads", source.slug, {"name": source.name})

    monkeypatch.setattr(headline, "train_head", train)
    call = ["--work", str(work.folder), "--scale", "tiny", "--math", mathematics, "--stage", "heads"]
    with pytest.raises(ValueError, match="these parts failed: heads of EAGLE"):
        headline.main([*call, "--only", "Medusa; EAGLE; EAGLE-3"])
    assert set(work.all_figures("heads")) == {"medusa", "eagle-3"}
    assert "no such kernel" in capsys.readouterr().err
    assert set(json.loads((work.folder / "result.json").read_text())["facts"]["heads"]) == {"medusa", "eagle-3"}


def test_an_interrupt_writes_what_was_finished(mathematics, tmp_path, monkeypatch, one_thread):
    work = WorkFolder(tmp_path / "work", Settings.at("tiny", math=mathematics))
    only = "Medusa; n-gram"

    def train(source, *given):
        work.keep("heads", source.slug, {"name": source.name})
        raise KeyboardInterrupt

    monkeypatch.setattr(headline, "train_head", train)
    call = ["--work", str(work.folder), "--scale", "tiny", "--math", mathematics, "--stage", "heads", "--only", only]
    (work.folder / "result.json").write_text("of an earlier call")
    with pytest.raises(KeyboardInterrupt):
        headline.main(call)
    result = json.loads((work.folder / "result.unfinished.json").read_text())
    assert set(result["facts"]["heads"]) == {"medusa"}
    assert (work.folder / "result.json").read_text() == "of an earlier call"
    # The page shows the command as it can be pasted.
    assert f"--only '{only}'" in result["facts"]["commands"][0]


def test_a_process_that_fails_leaves_what_it_and_the_others_finished(mathematics, tmp_path, monkeypatch, capsys):
    settings = Settings.at("tiny", math=mathematics)
    work = WorkFolder(tmp_path, settings)

    class Child:
        """Finishes its first part, and fails at the second one."""

        def __init__(self, command, stdout, **others):
            names = [source.slug for source in families.choose(command[command.index("--only") + 1])]
            work.keep("heads", names[0], {})
            stdout.write("no such kernel\n")
            self.returncode = 2 if len(names) > 1 else 0

        def poll(self):
            return self.returncode

        wait = poll

    monkeypatch.setattr(headline.subprocess, "Popen", Child)
    sources = families.choose("Medusa; EAGLE; EAGLE-3")
    run = headline.Run(settings, work, torch.device("cpu"), sources, 2, ["--work", str(tmp_path)])
    run.stage("heads")
    assert run.failed == ["heads of eagle-3"]
    assert "no such kernel" in capsys.readouterr().out
    monkeypatch.setattr(work, "keep", lambda *given: None)
    with pytest.raises(ValueError, match="no part of acceptance was finished"):
        run.stage("acceptance")


CHILD = """
import time
from headstart.benchmarks.headline import headline
headline.Run.stage = lambda *given: (print("begun", flush=True), time.sleep(60))
headline.main({call!r})
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
while "begun" not in child.stdout.readline():
    pass
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_part_ends_with_the_process_that_divided_the_parts(mathematics, tmp_path):
    """Else the same command would find it still training into the folder."""
    call = ["--work", str(tmp_path / "work"), "--scale", "tiny", "--math", mathematics, "--stage", "heads", "--child"]
    parent = PARENT.format(child=CHILD.format(call=call))
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, timeout=120)
    deadline = time.monotonic() + 20
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid):
    """Whether there is such a process that has not ended; one without a parent may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_drafts_that_are_replayed_alone_have_one_seat():
    """An engine with a seat for each request of the batch would capture graphs that nothing runs."""
    replay, begun, kept = object.__new__(Replay), [], []
    ways = [dict(draft=draft, temperature=0.0, batch=64, depth=5) for draft in ("chain", "static tree", "grown tree")]
    found = {"rows": [way | {"acceptance_length": 2.0} for way in ways], "trees": {"0": "a tree"}}
    replay.work = SimpleNamespace(needs=lambda *given: found, keep=lambda stage, slug, figures: kept.append(figures))
    replay.settings = Settings.at("full", math="x", speed_minutes=1.0)
    replay.began, replay.plain, replay.device = time.perf_counter(), {}, torch.device("cpu")
    replay.speculation = lambda source: {}
    replay.engine = lambda config, seats: begun.append((config["tree"] == "chain", seats))
    replay.rows = lambda measured, llm, batch: [(measured[0]["draft"], batch)]
    replay.measure(families.choose("EAGLE-3")[0])
    assert begun == [(True, 64), (False, 1)]
    assert kept[0]["rows"] == [("chain", 1), ("chain", 64), ("static tree", 1)]


def test_what_is_wrong_is_said_before_long_work_starts(mathematics, tmp_path):
    work = ["--work", str(tmp_path / "work"), "--scale", "tiny"]
    for given, words_of_error in (
        (["--stage", "tarjet"], "'tarjet' is not known; stages are target"),
        (["--only", "EAGLE-4"], "'eagle-4' is not known; choose of Medusa"),
        ([], "--math must name a JSONL"),
        (["--math", "gone.jsonl"], "there is no file gone.jsonl"),
        (["--math", mathematics, "--width", "100"], "--width must be a multiple of 64, got 100"),
        (["--math", mathematics, "--gpus", "7"], "--gpus must be from 1 to the 1"),
        (["--math", mathematics, "--shape", "llama-4"], "llama-4"),
        (["--stage", "answers"], "holds no finished stage target"),
    ):
        with pytest.raises(ValueError, match=words_of_error):
            headline.main([*work, *given])


def test_a_folder_of_other_settings_is_refused_and_changeable_ones_are_not(tmp_path):
    settings = Settings.at("tiny")
    WorkFolder(tmp_path, settings).keep("heads", "medusa", {"steps": 3})
    again = WorkFolder(tmp_path, Settings.at("tiny", speed_minutes=7.0))
    assert again.figures("heads", "medusa") == {"steps": 3}
    assert again.figures("heads", "eagle") is None
    with pytest.raises(ValueError, match="was begun with seed 0, not 1"):
        WorkFolder(tmp_path, Settings.at("tiny", seed=1))
