"""What every command says of options that are wrong, shortened or misspelled: one line, and status 2."""

import pytest

from headstart.cli import BENCHMARKS, COMMANDS, build_parser, main
from headstart.hub_export.export import main as export

EVERY = [*([name] for name in COMMANDS if name != "bench"), *(["bench", what] for what in BENCHMARKS)]


def told(command, capsys):
    """The line on stderr of a command that ends with status 2."""
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    return printed.err.rstrip("\n")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--max-num-seqs", "three"], "argument --max-num-seqs: invalid int value: 'three'"),
        (["--access-log", "xml"], "argument --access-log: invalid choice: 'xml' (choose from "),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_a_wrong_value_is_one_line(typed, words, capsys):
    assert told(["serve", "X", *typed], capsys).startswith(f"headstart serve: error: {words}")


def parser_of(command):
    parser = build_parser()
    for word in command:
        parser = next(action for action in parser._actions if action.dest in ("command", "what")).choices[word]
    return parser


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_has_one_line(command, capsys):
    """Its first option that wants a value gets none."""
    actions = parser_of(command)._actions
    option = next((one.option_strings[0] for one in actions if one.option_strings and one.nargs is None), None)
    words = [option] if option else []
    assert told([*command, *words], capsys).startswith(f"headstart {' '.join(command)}: error: ")


def test_the_command_itself_is_told_of_in_one_line(capsys):
    assert told(["srve"], capsys).startswith("headstart: error: argument COMMAND: invalid choice: 'srve'")
    assert told(["bench", "srve"], capsys).startswith("headstart bench: error: argument WHAT: invalid choice: 'srve'")


@pytest.mark.parametrize("words", [["x"], ["x", "--format"], ["verify"], ["push"], ["verify", "x", "--prompts", "y"]])
def test_exports_have_one_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        export(words)
    assert end.value.code == 2
    name = " ".join(["heads.export", *(word for word in words[:1] if word != "x")])
    printed = capsys.readouterr().err
    assert printed.startswith(f"{name}: error: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("serve X --max-num-seq 3", "option --max-num-seq: did you mean --max-num-seqs?"),
        ("serve X --max_nm_seqs=3", "option --max-nm-seqs: did you mean --max-num-seqs?"),
        ("serve X --no-enable-prefix-cach", "option --no-enable-prefix-cach: did you mean --no-enable-prefix-caching?"),
        ("serve X --conf x.yaml", "option --conf: did you mean --config?"),
        ("serve X --swap-spce 3", "option --swap-spce: did you mean --swap-space?"),
        ("bench serve X --num-promts 3", "option --num-promts: did you mean --num-prompts?"),
        ("bench --num", "option --num: headstart bench --help lists the options"),
        ("inspect x --xyzzy 3", "option --xyzzy: headstart inspect --help lists the options"),
        ("inspect x y", "y: headstart inspect --help lists the options"),
    ],
)
def test_an_unknown_option_is_told_with_the_one_that_was_meant(typed, words, capsys):
    command = "bench serve" if typed.startswith("bench serve") else typed.split()[0]
    assert told(typed.split(), capsys) == f"headstart {command}: error: unknown {words}"


def test_no_option_may_be_shortened(capsys):
    for command in EVERY:
        parser = parser_of(command)
        needed = _needed(parser)
        known = [name for name in parser._option_string_actions if name.startswith("--") and name != "--help"]
        for name in known:
            if name[:-1] not in known and name[:-1] != "-":
                _, unknown = parser.parse_known_args([f"{name[:-1]}=1", *needed])
                assert unknown == [f"{name[:-1]}=1"], (command, name)


def _needed(parser):
    """Words for what a command wants in any case."""
    needed = [one for one in parser._actions if one.required]
    return [word for one in needed for word in (*one.option_strings[:1], *(one.choices or ["1"])[:1])]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max_num_seqs: three", "argument --max-num-seqs: invalid int value: 'three'"),
        ("access-log: xml", "argument --access-log: invalid choice: 'xml'"),
        ("port: true", "argument --port: expected one argument"),
        ("enforce-eager: 3", "argument --enforce-eager: ignored explicit argument '3'"),
    ],
)
def test_a_wrong_value_of_a_file_is_told_with_the_file(content, words, tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(f"host: 127.0.0.1\n{content}\n")
    line = told(["serve", "X", "--config", str(path)], capsys)
    assert line.startswith(f"headstart serve: error: {path}: {words}")
    line = told(["serve", "X", "--config", str(path), "--port", "one"], capsys)
    assert line == "headstart serve: error: argument --port: invalid int value: 'one'"
