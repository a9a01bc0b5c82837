"""`headstart serve --config FILE.yaml`."""

import pytest

from headstart.cli import build_parser, main, with_dashes
from headstart.commands.config_file import with_config

CONTENT = """
model: of-the-file
head: a b
tree: static
port: 8001
served-model-name: [one, two]
api_key: [k1, k2]
enforce-eager: true
trust-remote-code: false
enable-prefix-caching: false
max-model-len: null
gpu_memory_utilization: 0.5
allowed-origins: ["*"]
"""


@pytest.fixture
def parse(tmp_path):
    """The arguments of a command line with the file."""
    path = tmp_path / "serve.yaml"

    def parsed(*typed, content=CONTENT):
        path.write_text(content)
        words = with_config(with_dashes(["serve", *typed, "--config", str(path)]))
        return build_parser(words).parse_args(words)

    return parsed


def test_names_in_the_file_are_those_of_the_options(parse):
    found = parse()
    assert (found.model, found.model_tag, found.head, found.tree) == ("of-the-file", None, "a b", "static")
    assert (found.port, found.served_model_name, found.api_key) == (8001, ["one", "two"], ["k1", "k2"])
    assert (found.enforce_eager, found.trust_remote_code, found.enable_prefix_caching) == (True, False, False)
    assert (found.max_model_len, found.gpu_memory_utilization, found.allowed_origins) == (None, 0.5, ["*"])
    nested = parse(content="speculative-config: {method: ngram, num_speculative_tokens: 3}")
    assert parse(content="speculative-model: a b").head == "a b"  # an old name of vLLM's
    assert nested.speculative_config == '{"method": "ngram", "num_speculative_tokens": 3}'


def test_the_command_line_wins(parse):
    found = parse("of-the-line", "--port", "8000", "--served-model-name", "three", "--enable-prefix-caching")
    assert (found.model_tag, found.model, found.port, found.served_model_name) == ("of-the-line", None, 8000, ["three"])
    assert (found.enable_prefix_caching, found.head) == (True, "a b")
    assert parse("of-the-line", content="served-model-name: [one, two]").model_tag == "of-the-line"
    assert parse("--model", "x").model == "x"


def test_only_the_whole_name_of_the_option_names_the_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(CONTENT)
    for words in (["--config", str(path)], [f"--config={path}"]):
        assert "--port=8001" in with_config(["serve", "x", *words])
    for words in (["--conf", str(path)], []):
        assert with_config(["serve", "x", *words]) == ["serve", "x", *words]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 8001", "unknown option of {path} 'prot'; did you mean 'port'?"),
        ("config: x.yaml", "unknown option of {path} 'config'"),
        ("no-prefix: true", "unknown option of {path} 'no-prefix'"),
        ("- port", "must hold names of options with their values"),
        ("port: [", "is not YAML"),
        ("", "must hold names of options"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content)
    assert main(["serve", "x", f"--config={path}"]) == 2
    told = capsys.readouterr().err
    assert words.format(path=path) in told
    assert told.startswith("headstart serve: error: ")
    assert told.count("\n") == 1
