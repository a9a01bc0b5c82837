"""All benchmarks of `headstart bench`: an impossible request is a one-line error, and --help explains every benchmark."""

import pytest

from headstart.cli import main
from headstart.inference.models import support
from headstart.inference.models.support import decoder_class
from headstart.tests.benchmarks.small_bench import CPU

# Requests that the tiny shape has room for.
SHORT = ["--shape", "SHAPE", "--prompts", "3-99", "--outputs", "3-9", "--stalls", "9", "--first-prompt", "9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--shape", "llama-9"], "there is no shape 'llama-9'"),
        (
            ["step", "--shape", "SHAPE", "--rows", "1,x"],
            "--rows takes numbers separated by commas of at least 1, got '1,x'",
        ),
        (["step", "--shape", "SHAPE", "--rows", "65"], "num_nodes must be from 1 to 64"),
        (["step", "--shape", "SHAPE", "--context", "0"], "--context takes"),
        (["step", "--shape", "SHAPE", "--context", "64,512"], "--context 512 is beyond SHAPE: at most 511 fit"),
        (["step", "--shape", "SHAPE", "--lm-head", "its"], "--lm-head takes own, shared"),
        (["step", "--shape", "SHAPE", "--repeats", "0"], "--repeats must be at least 1"),
        (["step", "--shape", "SHAPE", "--dtype", "int4"], "--dtype must be auto or one of"),
        (["step", "--shape", "SHAPE", "--device", "warp"], "device must be auto, cpu, cuda or cuda:N, got 'warp'"),
        (["step", "--shape", "SHAPE", "--device", "cuda:99"], "device 'cuda:99' was asked for, but"),
        (["step", "--shape", "SHAPE", "--output", "/proc/x/y.json"], "cannot write /proc/x/y.json"),
        (["kernel", "softmax", "--shape", "SHAPE"], "there is no operation 'softmax'"),
        (["kernel", "linear", "--shape", "SHAPE", "--batch", "1,2"], "--batch takes one number"),
        (["kernel", "prefill-attention", "--shape", "SHAPE"], "prefill_attention runs on a GPU only"),
        (["kernel", "sample", "--shape", "SHAPE", "--sweep"], "--sweep is for linear"),
        (
            ["engine", "--shape", "SHAPE", "--acceptance", "9", "--prompt-tokens", "9"],
            "acceptance_length must be from 1 to 5",
        ),
        (["engine", "--shape", "SHAPE", "--prompt-tokens", "500", "--no-startup"], "beyond the shape's 512"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--tree", "chain"], "--tree chain says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--lm-head", "own"], "--lm-head own says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--adaptive"], "--adaptive True says how heads draft"),
        (["engine", "--shape", "SHAPE", "--head", "none", "--acceptance", "2"], "--acceptance 2 says how heads draft"),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--lm-head", "own"],
            "--lm-head own is for Medusa heads, and --head eagle is none",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--tree", "static", "--prompt-tokens", "9"],
            "no static tree for eagle drafts of 4 tokens",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "eagle", "--tree", "dynamic", "--prompt-tokens", "9"],
            "the verifier 'synthetic' accepts along the tree's deepest path",
        ),
        (
            ["engine", "--shape", "SHAPE", "--head", "none", "--num-speculative-tokens", "3"],
            "--num-speculative-tokens 3 says how heads draft",
        ),
        (
            ["draft", "--shape", "SHAPE", "--head", "eagle,eagel"],
            "--head takes some of medusa, mlp_speculator, eagle, eagle3",
        ),
        (["draft", "--shape", "SHAPE", "--depth", "1"], "--depth must be from 2 to 63, got 1"),
        (
            ["draft", "--shape", "SHAPE", "--depth", "8", "--tree", "dynamic"],
            "--depth of dynamic trees 8 wide must be from 2 to 7, got 8",
        ),
        (["draft", "--shape", "SHAPE", "--context", "512"], "--context 512 is beyond SHAPE: at most 511 fit"),
        (["traffic", "--shape", "SHAPE"], "3120 tokens of prompt and output are beyond the shape's 512"),
        (["traffic", "--shape", "SHAPE", "--stalls", "9", "--outputs", "3-99"], "2099 tokens of prompt and output are"),
        (
            ["traffic", "--shape", "SHAPE", "--stalls", "9", "--prompts", "3-99", "--outputs", "3-9"],
            "1001 tokens of prompt and output are beyond the shape's 512",
        ),
        (
            ["traffic", *SHORT, "--requests", "5", "--seats", "6"],
            "--seats 6 is above --requests 5: some would never be taken",
        ),
        (
            ["traffic", *SHORT, "--stall-seats", "4", "--stall-requests", "4"],
            "--stall-requests 4 must be above --stall-seats 4",
        ),
        (
            ["traffic", *SHORT, "--prompts", "x"],
            "--prompts takes lengths in tokens like 256, or the shortest and the longest",
        ),
        (["traffic", *SHORT, "--outputs", "9-3"], "like 100-2000, got '9-3'"),
        (["traffic", *SHORT, "--outputs", "0-3"], "--outputs takes lengths in tokens like 256"),
        (["traffic", *SHORT, "--stalls", "9,x"], "--stalls takes lengths in tokens like 256"),
        (["traffic", *SHORT, "--requests", "0"], "--requests must be at least 1, got 0"),
        (["traffic", *SHORT, "--first-prompt", "0"], "--first-prompt must be at least 1, got 0"),
        (["traffic", *SHORT, "--acceptance", "2"], "--acceptance 2 says how heads draft: name one with --head"),
        (
            ["traffic", *SHORT, "--num-speculative-tokens", "2"],
            "--num-speculative-tokens 2 says how heads draft: name one with --head",
        ),
        (["traffic", *SHORT, "--head", "eagle", "--acceptance", "9"], "acceptance_length must be from 1 to 5"),
        (["traffic", *SHORT, "--head", "eagle", "--acceptance", "2,3"], "--acceptance takes one number"),
        (["peer", "--shape", "SHAPE", "--new-tokens", "3"], "--new-tokens must be at least 16"),
    ],
)
def test_bad_input_is_one_line_and_status_2(shape, arguments, message, capsys):
    filled = [{"SHAPE": shape}.get(word, word) for word in arguments]
    assert main(["bench", *filled, *(() if {"--device", "--dtype"} & set(filled) else CPU)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"headstart bench {arguments[0]}: error: ")
    assert message.replace("SHAPE", shape) in printed.err
    assert printed.err.count("\n") == 1


@pytest.fixture(scope="module")
def decoder_classes():
    """decoder_class, which asks once for a config: a trial of a module takes up to a second, and every case asks for all shapes."""
    found = {}

    def known(config):
        name = config.to_json_string(use_diff=False)
        if name not in found:
            found[name] = decoder_class(config)
        return found[name]

    return known


@pytest.mark.parametrize(
    ("arguments", "takes"),
    [
        (["step"], "the weights of llama-3-8b take 29.9 GiB in float32"),
        (["engine", "--head", "none", "--no-startup"], "the weights of llama-3-8b take 29.9 GiB"),
        (["engine", "--no-startup"], "the weights and the head of llama-3-8b take 38.0 GiB"),
        (["engine", "--lm-head", "shared", "--no-startup"], "the weights and the head of llama-3-8b take 30.2 GiB"),
        (["engine", "--head", "eagle3", "--no-startup"], "the weights and the head of llama-3-8b take 31.5 GiB"),
        (["draft", "--head", "medusa,eagle"], "the embedding, lm_head and a head of llama-3-8b take 14.8 GiB"),
        (["traffic"], "the weights of llama-3-8b take 29.9 GiB"),
        (["traffic", "--head", "eagle3"], "the weights and the head of llama-3-8b take 31.5 GiB"),
        (["peer"], "the weights of llama-3-8b take 29.9 GiB"),
        (["kernel", "linear", "--rows", "1"], "the largest weights of llama-3-8b take 2.0 GiB"),
    ],
)
def test_a_shape_beyond_the_free_memory_is_refused_with_those_that_fit(
    arguments, takes, decoder_classes, capsys, monkeypatch
):
    free = {"kernel": 1, "draft": 10}.get(arguments[0], 26) << 30
    monkeypatch.setattr("headstart.benchmarks.shape.free_bytes", lambda device: free)
    monkeypatch.setattr(support, "decoder_class", decoder_classes)
    assert main(["bench", *arguments, "--shape", "llama-3-8b", *CPU]) == 2
    printed = capsys.readouterr().err
    assert takes in printed
    assert f"and {free >> 30}.0 GiB are free on cpu" in printed
    fitting = printed.split("name a shape that fits (")[1].split(")")[0]
    if arguments[0] == "kernel":
        assert fitting == "llama-2-7b, mistral-7b"
    elif arguments[0] == "draft":
        assert fitting == "llama-2-7b, mistral-7b, opt-6.7b, opt-125m, granite-20b-code, mixtral-8x7b"
    elif takes.startswith("the weights of"):
        assert fitting == "llama-3-8b-2layers, llama-2-7b, opt-6.7b, opt-125m"
    else:
        assert fitting.split(", ")[0] == "llama-3-8b-2layers"


def test_kernel_refuses_keys_beyond_the_free_memory(shape, capsys):
    arguments = [
        "kernel",
        "attention",
        "--shape",
        shape,
        *CPU,
        "--rows",
        "1",
        "--context",
        "64",
        "--batch",
        "1000000000",
    ]
    assert main(["bench", *arguments]) == 2
    assert "GiB are free on cpu: lower --batch, --context or --rows" in capsys.readouterr().err


def test_help_teaches_every_benchmark(capsys):
    assert main(["bench"]) == 0
    overview = capsys.readouterr().out
    for name in ("speculation", "step", "draft", "kernel", "engine", "traffic", "serve", "peer", "train"):
        assert name in overview
        with pytest.raises(SystemExit) as end:
            main(["bench", name, "--help"])
        assert end.value.code == 0
        assert f"headstart bench {name}" in capsys.readouterr().out.split("example:")[1]
