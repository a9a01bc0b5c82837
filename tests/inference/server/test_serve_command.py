"""`headstart serve`: what its command line refuses before a model is loaded, and the spellings that it takes."""

import socket
from types import SimpleNamespace

import httpx
import pytest

from headstart.cli import build_parser, main, with_dashes
from headstart.commands.chat_template import check_chat_template, read_chat_template
from headstart.inference.server.driver import engine_process
from headstart.inference.server.options import KEY_VARIABLE, keys_of
from headstart.inference.server.serve import listening_socket
from headstart.inference.speculation.tree import GrowingTree
from headstart.tests.inference.server.serving import HEADS, TARGET, running


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name one model"),
        (["x", "--model", "y"], "name one model"),
        (["x", "--host", "0.0.0.0"], "can be reached from other machines"),
        (["./missing", "-tp", "2", "--port", "0"], "there is no model folder ./missing"),
        (["x", "--speculative-config", "{"], "is not JSON"),
        (["x", "--speculative-config", "[]"], "must be a JSON object"),
        (["x", "--speculative-config", "{}", "--head", "y"], "says all"),
        (["x", "--tree", "static"], "says how a head drafts"),
        (["x", "--port", "99999"], "--port must be"),
        (["x", "--tool-call-parser", "pythonic"], "must be one of hermes, mistral, llama3_json"),
        (["x", "--pipeline_parallel_size", "2"], "only tensor_parallel_size divides a model"),
        (["x", "--quantization=awq"], "weights are not quantised"),
        (["x", "--rot-path", "/y"], "headstart serve --help lists the options"),
        (["./missing", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--port", "0"], "no model folder"),
        (["x", "--uds", "/missing/socket"], "cannot listen on --uds /missing/socket: No such file"),
        (["x", "--allowed-origins", '["a"'], "is not a JSON list"),
        (["./missing", "--port", "0"], "there is no model folder ./missing"),
    ],
)
def test_bad_options_are_one_line(options, words, capsys, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["serve", *options]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_port_in_use_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "x", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


def test_a_missing_model_is_told_before_a_process_is_started(capsys, monkeypatch):
    monkeypatch.setattr(engine_process, "EngineProcess", None)
    assert main(["serve", "./missing", "--port", "0"]) == 2
    assert "there is no model folder ./missing" in capsys.readouterr().err


def test_underscores_stand_for_dashes():
    typed = [
        "serve",
        "a_b",
        "--max_model_len=64",
        "--max_num_seqs",
        "4",
        "--speculative_config",
        '{"model": "a_b"}',
        "--",
        "--x_y",
    ]
    changed = with_dashes(typed)
    assert changed[2:6] == ["--max-model-len=64", "--max-num-seqs", "4", "--speculative-config"]
    assert (changed[1], changed[6:]) == ("a_b", typed[6:])
    parsed = build_parser().parse_args(changed[:-2])
    assert (parsed.model_tag, parsed.max_model_len, parsed.max_num_seqs) == ("a_b", 64, 4)


def test_keys_come_from_the_environment_unless_they_are_given(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert keys_of(None) == ("secret",)
    assert keys_of(["other"]) == ("other",)
    monkeypatch.delenv(KEY_VARIABLE)
    assert keys_of(None) == ()


def test_what_speculation_does_is_told(plain_llm, speculative, recwarn):
    from headstart import LLM
    from headstart.commands.serve import _describe

    assert _describe(plain_llm.tree, None) == "plain decoding, no speculation"
    told = _describe(speculative().tree, {"model": str(HEADS), "tree": "static"})
    assert "stdlib-coder-medusa speculates: a tree of 8 nodes, 2 deep, which" in told
    assert "changes no bit" in told
    assert not recwarn
    told = _describe(GrowingTree(max_depth=5, width=8, num_nodes=32), {"model": "x", "tree": "dynamic"})
    assert told.startswith("x speculates: a growing tree of 32 nodes, up to 5 deep, which")
    config = {"model": str(HEADS), "tree": "chain", "verifier": "block"}
    told = _describe(LLM(plain_llm, speculative_config=config).tree, config)
    assert told.endswith("speculates: a chain of 4, verifier block")
    assert "only 'strict' keeps its bits" in str(recwarn.pop(UserWarning).message)


def test_every_name_of_the_model_is_told(monkeypatch, capsys):
    class Built:
        def __init__(self, build):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_until_built(self):
            return SimpleNamespace(model_name="of-the-engine", tree=None)

    def serve(engine, tokenizer, options, bound, ready):
        bound.close()
        ready("http://x")
        return 0

    monkeypatch.setattr("headstart.inference.server.driver.engine_process.EngineProcess", Built)
    monkeypatch.setattr("headstart.inference.server.serve.serve", serve)
    named = ["--served-model-name", "a", "b/c"]
    for words, names in (([], "of-the-engine"), (named, "a, b/c")):
        assert main(["serve", str(TARGET), "--port", "0", *words]) == 0
        assert capsys.readouterr().out == f"ready: http://x/v1 serves {names}; plain decoding, no speculation\n"


def test_another_chat_template(plain_llm, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "<{{ messages[0].content }}>{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}!{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (str(path), path.read_text()):
        with running(plain_llm, chat_template=read_chat_template(given), tokenizer_info=True) as server:
            body = {"messages": [{"role": "user", "content": "hello"}], "return_token_strs": True}
            answer = httpx.post(f"{server.url}/tokenize", json=body).json()
            assert plain_llm.tokenizer.decode(answer["tokens"]) == "<hello>!"
            assert httpx.get(f"{server.url}/tokenizer_info").json()["chat_template"] == path.read_text()
            asked = {"messages": body["messages"], "tools": tools, "max_tokens": 1, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked).json()
            assert plain_llm.tokenizer.decode(answer["prompt_token_ids"]) == "<hello><tool_call>!"


class NeverBuilt:
    """An engine's process that must be ended before anybody waits for its engine."""

    ended = False

    def __init__(self, build):
        assert callable(build)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        NeverBuilt.ended = True

    def wait_until_built(self):
        pytest.fail("the engine was waited for")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{{ bos_token }}\n{% for m in messages %}\n{% if %}",
            "FILE, line 3: no Jinja template: Expected an expression",
        ),
        ("\n{% for m in messages %}{{ m.content }}", "FILE, line 2: no Jinja template: Unexpected end of template"),
        ("{{ messages | no_filter }}", "FILE, line 1: no Jinja template: No filter named 'no_filter'"),
        ("\n\n{{ messages[0].told.text }}", "FILE, line 3: a user's message cannot be rendered: UndefinedError: "),
        ("\n{{ messages[0].content + 1 }}", "FILE, line 2: a user's message cannot be rendered: TypeError: "),
        ("\n{{ 1 / 0 }}", "FILE, line 2: a user's message cannot be rendered: ZeroDivisionError: "),
        ("\n{{ raise_exception('never') }}", "FILE, line 2: a user's message cannot be rendered: it refuses (never)"),
        (None, "FILE cannot be read: No such file or directory; name a file of a Jinja template"),
    ],
)
def test_a_bad_chat_template_is_told_before_the_engine_is_built(template, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("headstart.inference.server.driver.engine_process.EngineProcess", NeverBuilt)
    path, NeverBuilt.ended = tmp_path / "bad.jinja", False
    if template is not None:
        path.write_text(template)
    assert main(["serve", str(TARGET), "--port", "0", "--chat-template", str(path)]) == 2
    told = capsys.readouterr().err
    assert words.replace("FILE", f"--chat-template {path}") in told
    assert told.count("\n") == 1
    if template is not None:
        assert "; mend it, or leave --chat-template out for the tokenizer's own" in told
        assert NeverBuilt.ended
        assert main(["serve", str(TARGET), "--port", "0", "--chat-template", template.strip()]) == 2
        assert "--chat-template, line" in capsys.readouterr().err


def test_a_chat_template_may_want_a_system_message(plain_llm):
    """And a model without a tokenizer has none to render it with."""
    wants = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    check_chat_template(wants, wants, plain_llm.tokenizer)
    second = "{{ messages[0].content ~ messages[1].content }}"
    check_chat_template(second, second, plain_llm.tokenizer)
    with pytest.raises(ValueError, match="this model has none: give --tokenizer"):
        check_chat_template(wants, wants, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_small_writes_do_not_wait_for_each_other(host):
    """asyncio switches Nagle's algorithm off for sockets that name their protocol, and accepted ones take it over."""
    with listening_socket(host, 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
