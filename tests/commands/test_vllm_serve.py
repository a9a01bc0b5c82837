"""Options of `vllm serve`: every one that docs/vllm_serve.md names goes through the real parser and has the status that it says."""

from pathlib import Path

import pytest

from headstart.cli import build_parser, main, with_dashes
from headstart.commands import serve
from headstart.commands.vllm_serve import NOT_YET, REASONS, REFUSED, ROWS, SHORT, SWITCH, TAKEN, check_theirs
from headstart.commands.vllm_serve_page import NOTES, OWN, page, same, visible
from headstart.heads.storage.keywords import ANY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm_serve.md"
EXAMPLES = {
    "generation-config": "vllm", "uvicorn-log-level": "warning", "tool-call-parser": "mistral", "gpu-memory-utilization": "0.5",
    "speculative-config": '{"method": "ngram"}', "allowed-origins": '["https://a.example"]',
}  # fmt: skip
# Command lines as they are written for vLLM.
COMMANDS = [
    "--host 127.0.0.1 --port 8001 --dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.85 --enable-prefix-caching",
    "--tensor-parallel-size 1 --swap-space 16 --enable-chunked-prefill --max-num-batched-tokens 8192 --disable-log-requests",
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --no-enable-log-requests --async-scheduling",
    "-tp 1 -pp 1 -dp 1 --no-enable-prefix-caching --limit-mm-per-prompt {} --kv-cache-dtype auto --served-model-name a b",
]


@pytest.fixture(scope="module")
def parser():
    return build_parser(["serve"])


def parsed(parser, *words):
    arguments, unknown = parser.parse_known_args(["serve", "MODEL", *words])
    assert unknown == []
    assert arguments.model_tag == "MODEL"
    return arguments


def words_for(name, value):
    """A taken option with a value, as words of a command line."""
    if TAKEN[name] is SWITCH:
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def test_the_page_is_written_from_the_tables():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again: python -m headstart.commands.vllm_serve_page > docs/vllm_serve.md"
    )


def test_every_option_is_vllms_or_said_to_be_ours():
    """A new option has to be put on one side."""
    assert OWN - {"help"} <= {*visible(), "num-speculative-tokens"}
    assert set(NOTES) <= set(same())
    assert not {*same(), *OWN} & {*TAKEN, *REASONS}
    listed = [name for table in (REFUSED, NOT_YET) for names in table.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(REASONS)
    assert set(SHORT) <= set(TAKEN)


def test_an_option_that_is_the_same_is_parsed(parser):
    bare = parsed(parser)
    for name in same():
        if name in ("config", "model"):
            continue
        action = parser_action(parser, name)
        words = [] if action.nargs == 0 else [EXAMPLES.get(name, "9")]
        changed = vars(parsed(parser, f"--{name}", *words))
        default = vars(bare)[action.dest]
        flipped = vars(parsed(parser, f"--no-{name}"))[action.dest] if default is True else None
        assert changed[action.dest] != default or flipped is False, name


def parser_action(parser, name):
    serve = next(action for action in parser._actions if action.dest == "command").choices["serve"]
    return serve._option_string_actions[f"--{name}"]


@pytest.mark.parametrize("name", TAKEN)
def test_a_taken_option_is_checked_by_its_row(name, parser):
    row = ROWS[name.replace("-", "_")]
    values = (True, False) if TAKEN[name] is SWITCH else ("3", "x", '{"a": 1}') if row.accepts is ANY else ()
    if row.accepts is ANY:
        for value in values:
            check_theirs(parsed(parser, *words_for(name, value)))
        return
    for value in row.accepts:
        if value is not None and value != "":
            check_theirs(parsed(parser, *words_for(name, value)))
    others = [value for value in values or ("strange",) if value not in row.accepts]
    assert others
    for value in others:
        with pytest.raises(ValueError, match="is vLLM's and not supported here") as told:
            check_theirs(parsed(parser, *words_for(name, value)))
        assert row.words in str(told.value)


def test_short_names_are_the_long_ones(parser):
    for name, short in SHORT.items():
        words = [] if TAKEN[name] is SWITCH else ["1"]
        assert vars(parsed(parser, short, *words)) == vars(parsed(parser, f"--{name}", *words))


def test_what_is_not_taken_is_refused_in_one_line_with_its_reason(capsys):
    for name, words in REASONS.items():
        for typed in ([f"--{name}", "x"], [f"--{name}=x"], [f"--no-{name}"]):
            assert main(["serve", "MODEL", *typed]) == 2
            told = capsys.readouterr().err
            assert told == f"headstart serve: error: option '--{name}' is vLLM's and {words}\n"


def test_a_secret_is_not_repeated(capsys):
    assert main(["serve", "MODEL", "--hf-token", "hf_secret"]) == 2
    assert "hf_secret" not in capsys.readouterr().err


def test_a_config_file_is_told_the_same(tmp_path, capsys):
    path = tmp_path / "vllm.yaml"
    path.write_text("model: x\nswap-space: 4\nlora-modules: [a]\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert f"{path}: option '--lora-modules' is vLLM's and not there yet" in capsys.readouterr().err
    path.write_text("model: x\nexplain-unknown: 1\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "unknown option" in capsys.readouterr().err


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_of_vllm_is_taken(line, parser):
    check_theirs(parsed(parser, *line.split()))


def test_a_command_of_old_documents_is_read():
    line = "--model facebook/opt-6.7b --seed 42 -tp 1 --speculative_model facebook/opt-125m --use-v2-block-manager"
    line += " --num_speculative_tokens 5 --gpu_memory_utilization 0.8"
    words = with_dashes(["serve", *line.split()])
    arguments = build_parser(words).parse_args(words)
    check_theirs(arguments)
    config = serve.speculative_of(arguments)
    assert (config["model"], config["num_speculative_tokens"]) == ("facebook/opt-125m", 5)
