"""The `headstart` command on a tiny target: its output, its files, its refusals."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from headstart.cli import main
from headstart.inference.speculation.tree import load_tree
from headstart.inference.threads import choose_threads


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "no"}]}
        for i in range(22)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_generate_streams_an_answer_and_compares_it_with_plain_decoding(target_folder, head_folder, capsys):
    arguments = ["generate", "--model", str(target_folder), "--max-tokens", "12", "--seed", "1", "--temperature", "0.9"]
    assert main([*arguments, "hello"]) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--head", str(head_folder), "--compare", "hello"]) == 0
    compared = capsys.readouterr().out
    assert compared.startswith(plain.rstrip("\n"))
    assert "same tokens: yes, every one" in compared
    assert "speed-up:" in compared
    assert "tokens per step" in compared


def test_generate_reads_raw_text_from_standard_input(target_folder, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("def f("))
    assert main(["generate", "--model", str(target_folder), "--max-tokens", "5", "--raw", "-"]) == 0
    assert capsys.readouterr().out.strip()


def test_tree_measures_writes_and_draws(target_folder, head_folder, prompt_file, tmp_path, capsys):
    output = tmp_path / "tree.json"
    arguments = [
        "tree",
        str(head_folder),
        "--model",
        str(target_folder),
        "--prompts",
        prompt_file,
        "--num-prompts",
        "5",
    ]
    assert main([*arguments, "--budget", "6", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "root" in printed
    assert f"written to {output}" in printed
    tree = load_tree(output)
    assert 2 <= tree.num_nodes <= 6
    rates = json.loads(output.read_text())["rates"]
    assert len(rates) == 3
    assert all(0 <= sum(ranks) <= 1 + 1e-6 for ranks in rates)


def test_tree_of_a_run_measures_on_the_prompts_that_the_run_held_out(
    target_folder, head_folder, prompt_file, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(head_folder, run / "head")
    (run / "config.yaml").write_text(f"target: {target_folder}\n")
    shutil.copy(prompt_file, run / "heldout.jsonl")
    assert main(["tree", str(run), "--budget", "4"]) == 0
    assert f"22 prompts of {run / 'heldout.jsonl'}" in capsys.readouterr().err
    assert load_tree(run / "tree.json").num_nodes > 1


def test_tree_and_bench_take_the_best_head_of_a_run_and_say_so(
    target_folder, head_folder, prompt_file, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(head_folder, run / "head")
    shutil.copytree(head_folder, run / "best")
    (run / "head" / "config.json").write_text("{")  # not looked at
    said = f"{run}: taking {run / 'best'}, the head that was measured best; {run / 'head'} is that of the end"
    given = ["--model", str(target_folder), "--prompts", prompt_file, "--num-prompts", "2"]
    assert main(["tree", str(run), *given, "--budget", "4"]) == 0
    assert said in capsys.readouterr().err
    assert main(["bench", "speculation", "--head", str(run), *given, "--max-tokens", "4", "--temperature", "0"]) == 0
    assert said in capsys.readouterr().err


def test_bench_prints_a_table_and_writes_its_rows(target_folder, head_folder, prompt_file, tmp_path, capsys):
    head_folder = shutil.copytree(head_folder, tmp_path / "head")
    tree = ["tree", str(head_folder), "--model", str(target_folder), "--prompts", prompt_file, "--num-prompts", "5"]
    assert main([*tree, "--budget", "5"]) == 0
    assert (head_folder / "tree.json").is_file()
    output = tmp_path / "rows.json"
    arguments = [
        "--model",
        str(target_folder),
        "--head",
        str(head_folder),
        "--prompts",
        prompt_file,
        "--num-prompts",
        "3",
    ]
    assert main(["bench", "speculation", *arguments, "--max-tokens", "10", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(output.read_text())
    assert [row["temperature"] for row in content["rows"] if row["draft"] == "none"] == [0.0, 0.8]
    assert all(row["identical"] for row in content["rows"])
    assert all(row["acceptance_length"] >= 1 for row in content["rows"])
    assert printed.count("plain decoding") == 2
    assert content["hardware"]
    assert content["date"]


def test_bench_measures_transformers_beside_the_engine(target_folder, head_folder, prompt_file, tmp_path, capsys):
    output = tmp_path / "rows.json"
    arguments = [
        "--model",
        str(target_folder),
        "--head",
        str(head_folder),
        "--prompts",
        prompt_file,
        "--dtype",
        "float32",
    ]
    short = ["--num-prompts", "2", "--max-tokens", "6", "--transformers", "--output", str(output)]
    assert main(["bench", "speculation", *arguments, *short]) == 0
    assert capsys.readouterr().out.count("transformers ") == 4
    rows = json.loads(output.read_text())["transformers"]
    assert [(row["temperature"], row["draft"]) for row in rows[::2]] == [(0.0, "generate"), (0.8, "generate")]
    assert [row["num_identical"] for row in rows] == [2, 2, None, None]
    assert main(["bench", "speculation", *arguments, *short, "--adapter", str(head_folder)]) == 2
    assert "--transformers measures the target without an adapter" in capsys.readouterr().err


def test_bench_compares_a_head_without_a_tree_as_a_chain(target_folder, head_folder, prompt_file, capsys):
    arguments = ["--model", str(target_folder), "--head", str(head_folder), "--prompts", prompt_file]
    short = ["--num-prompts", "1", "--max-tokens", "3", "--temperature", "0"]
    assert main(["bench", "speculation", *arguments, *short]) == 0
    printed = capsys.readouterr()
    assert "chain of 3" in printed.out
    assert "compared as a chain alone, for there is no static tree for medusa drafts of 3 tokens" in printed.err
    assert main(["bench", "speculation", *arguments, *short, "--nodes", "4"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "./missing", "x"], "there is no model folder ./missing"),
        (["generate", "--model", "TARGET", "--compare", "x"], "--compare shows a head beside plain decoding"),
        (["generate", "--model", "TARGET", "--tree", "chain", "x"], "--tree chain says how a head drafts"),
        (
            ["generate", "--model", "TARGET", "--num-speculative-tokens", "2", "x"],
            "--num-speculative-tokens 2 says how a head drafts",
        ),
        (["generate", "--model", "HEAD", "x"], "holds a head, not a target"),
        (["generate", "--model", "TARGET", "--temperature", "-1", "x"], "temperature must be"),
        (["generate", "--model", "TARGET", " "], "the prompt is empty"),
        (["tree", "HEAD", "--model", "TARGET", "--output", "/proc/x/tree.json"], "cannot write /proc/x/tree.json"),
        (
            ["tree", "HEAD", "--model", "TARGET", "--prompts", "x", "--num-prompts", "0"],
            "--num-prompts must be at least 1",
        ),
        (["tree", "./missing", "--model", "TARGET"], "missing"),
        (["tree", "HEAD", "--model", "TARGET"], "ships no held-out prompts"),
        (["tree", "HEAD", "--model", "TARGET", "--budget", "65"], "--budget must be auto or from 2 to 64"),
        (["tree", "HEAD", "--model", "TARGET", "--budget", "1"], "--budget must be auto or from 2 to 64"),
        (
            ["tree", "HEAD", "--model", "TARGET", "--budget", "8", "--batch-size", "2"],
            "--batch-size 2 says what to time",
        ),
        (["tree", "HEAD", "--model", "TARGET", "--batch-size", "0"], "--batch-size must be at least 1"),
        (
            ["tree", "TARGET", "--model", "TARGET"],
            "holds no head: to draft with it as a model, give --num-speculative-tokens",
        ),
        (["tree", "TARGET", "--model", "TARGET", "--num-speculative-tokens", "2"], "as a model, give --output"),
        (
            ["bench", "speculation", "--model", "TARGET", "--head", "HEAD", "--prompts", "./none.jsonl"],
            "no prompt file",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(target_folder, head_folder, arguments, message, capsys):
    filled = [{"TARGET": str(target_folder), "HEAD": str(head_folder)}.get(word, word) for word in arguments]
    assert main(filled) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") == 1


def test_a_broken_prompt_file_names_file_and_line(target_folder, head_folder, tmp_path, capsys):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    arguments = ["tree", str(head_folder), "--model", str(target_folder), "--prompts", str(path)]
    assert main(arguments) == 2
    assert "broken.jsonl, line 2 is not JSON" in capsys.readouterr().err
    path.write_text('{"messages": ["a"]}\n')
    assert main(arguments) == 2
    assert "broken.jsonl, line 1: a message is {'role': ..., 'content': ...}, got 'a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hidden", "device", "variable", "expected"),
    [
        (256, "cpu", None, 1),
        (512, "cpu", None, 1),
        (513, "cpu", None, 2),
        (256, "cuda", None, 2),
        (256, "cpu", "OMP_NUM_THREADS", 2),
        (256, "cpu", "MKL_NUM_THREADS", 2),
    ],
)
def test_small_models_decode_on_one_thread_of_a_cpu(hidden, device, variable, expected, monkeypatch, threads):
    if variable:
        monkeypatch.setenv(variable, "2")
    choose_threads(SimpleNamespace(hidden_size=hidden), torch.device(device))
    assert torch.get_num_threads() == expected


def test_every_command_that_decodes_chooses_its_threads(target_folder, head_folder, prompt_file, tmp_path, threads):
    head_folder = shutil.copytree(head_folder, tmp_path / "head")
    model = ["--model", str(target_folder), "--device", "cpu"]
    prompts = ["--prompts", prompt_file, "--num-prompts", "5"]
    shape = ["--shape", str(target_folder), "--device", "cpu"]
    for command in (
        ["generate", *model, "--max-tokens", "1", "x"],
        ["tree", str(head_folder), *model, *prompts, "--budget", "4"],
        ["bench", "speculation", *model, *prompts, "--head", str(head_folder), "--max-tokens", "2"],
        ["bench", "kernel", "rms-norm", *shape, "--rows", "1", "--repeats", "1"],
    ):
        torch.set_num_threads(2)
        assert main(command) == 0
        assert torch.get_num_threads() == 1


@pytest.fixture
def threads(monkeypatch):
    """Set torch to two threads, without a choice by the user; restore the number afterwards."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_help_teaches_every_command(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    for name in ("generate", "tree", "bench", "report"):
        assert name in overview
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert "example:" in capsys.readouterr().out
