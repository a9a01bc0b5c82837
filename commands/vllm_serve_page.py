"""The page docs/vllm_serve.md: what becomes of the options of `vllm serve` here, from the tables that parse and refuse them.

python -m headstart.commands.vllm_serve_page > docs/vllm_serve.md
"""

import argparse

from ..heads.storage.keywords import ANY
from . import serve
from .vllm_serve import REASONS, ROWS, SHORT, SWITCH, TAKEN

INTRODUCTION = """# From `vllm serve`

What becomes of the options of `vllm serve` (0.11 to 0.26). [serving.md] says how to run the server,
[vllm_api.md] what becomes of the offline API.

    vllm serve MODEL --port 8000 --max-num-seqs 64 --speculative-config '{"model": "HEAD", "num_speculative_tokens": 4}'
    headstart serve MODEL --port 8000 --max-num-seqs 64 --speculative-config '{"model": "HEAD", "num_speculative_tokens": 4}'

1. Put `headstart` in place of `vllm`. Every option is taken, or refused at once, in one line.
2. Give a key where the server is to be reached from elsewhere: it listens on 127.0.0.1 unless `--host` and a key say otherwise.
   The key's variable is `HEADSTART_API_KEY`, not `VLLM_API_KEY`. `/metrics` needs the key, too.
3. Compare the defaults below, above all `--max-num-seqs`.
4. Point the scrapers at `/metrics`: names are vLLM's. Watch `/health`: it says 503 once the engine has failed.

*Same*: it is here under the same name. *Accepted*: it changes nothing here. *Checked*: the values named are taken, others refused
with the reason. *Refused*, *not there yet*: always, with the reason. Switches are also taken as `--no-NAME` where vLLM has that.
`--speculative-model`, of old versions, is `--head`.
Requests have a list of their own in `inference/server/fields.py`, with a reason for every field that is refused.

This page is written by `python -m headstart.commands.vllm_serve_page`, from the tables of `commands/vllm_serve.py` and
`inference/vllm_api.py` by which the command line is checked.

[serving.md]: serving.md
[vllm_api.md]: vllm_api.md
"""
# Options that vLLM does not have, or has no more.
OWN = {
    "adapter", "device", "tensor-parallel-invariant", "head", "method", "tree", "num-speculative-tokens", "allowed-hosts",
    "max-connections", "header-timeout", "max-waiting", "shutdown-timeout", "request-timeout", "body-timeout", "write-timeout",
    "step-timeout", "max-body-bytes", "max-n", "max-prompts", "access-log", "access-log-file", "disable-log-requests", "help",
}  # fmt: skip
NOTES = {
    "host": "127.0.0.1 if not given; another one needs a key",
    "api-key": "guards every route but `/health`, `/ping` and `/`; in a variable: `HEADSTART_API_KEY`",
    "max-num-seqs": "64 if not given",
    "max-num-batched-tokens": "2048 if not given",
    "num-gpu-blocks-override": "pages of 64 tokens",
    "dtype": "`auto`, `bfloat16`, `float16`, `half`, `float32`, `float`",
    "load-format": "`auto` or `dummy`",
    "logprobs-mode": "`raw_logprobs` or `processed_logprobs`",
    "tensor-parallel-size": "one process and GPU each ([engine.md](engine.md#several-ranks))",
    "seed": "of requests without one; a secret number, new at every start, if not given",
    "speculative-config": "the keys are listed in [vllm_api.md]",
    "generation-config": "`auto` or `vllm`",
    "allowed-origins": "none if not given; names, or vLLM's JSON list",
    "allow-credentials": "not with `*` as origin",
    "ssl-ca-certs": "clients must then show a certificate",
    "chat-template": "tried before the engine is built",
    "tool-call-parser": "`hermes`, `mistral` or `llama3_json`; as the chat template writes calls if not given",
    "reasoning-parser": "`deepseek_r1`, `qwen3` or `glm45`",
    "max-logprobs": "20 if not given",
    "trust-remote-code": "code is run only for model types that transformers does not know, and a warning says so",
    "config": "YAML; the command line wins",
}


def same():
    """Names of our own options that vLLM has, in the order of --help."""
    return [name for name in visible() if name not in OWN]


def visible():
    """Long names of all options that --help shows."""
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.option_strings]
    return [next(name for name in action.option_strings if name.startswith("--"))[2:] for action in shown]


def page():
    """The page as Markdown."""
    lines = [f"| `--{name}` | same | {NOTES.get(name, '')} |" for name in same()]
    rows = [(name, ROWS[name.replace("-", "_")]) for name in TAKEN]
    lines += [f"| {_names(name)} | accepted | {row.words} |" for name, row in rows if row.accepts is ANY]
    for name, row in rows:
        if row.accepts is not ANY:
            values = ", ".join(f"`{_typed(name, value)}`" for value in row.accepts if value is not None)
            taken = values and f"; taken: {values}"
            lines.append(f"| {_names(name)} | checked | {row.words}{taken} |")
    for state in ("not supported here", "not there yet"):
        grouped = {}
        for name, words in REASONS.items():
            if words.startswith(state):
                grouped.setdefault(words.removeprefix(f"{state}: "), []).append(f"`--{name}`")
        told = "refused" if state == "not supported here" else state
        lines += [f"| {', '.join(names)} | {told} | {words} |" for words, names in grouped.items()]
    return f"{INTRODUCTION}\n| `vllm serve` | here | |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _names(name):
    return f"`--{name}`" + (f", `{SHORT[name]}`" if name in SHORT else "")


def _typed(name, value):
    """A value as it stands on a command line."""
    if TAKEN[name] is SWITCH:
        return f"--{name}" if value else f"--no-{name}"
    return {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else str(value) or '""'


if __name__ == "__main__":
    print(page(), end="")
