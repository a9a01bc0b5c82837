"""The page docs/vllm_api.md: what becomes of vLLM's offline API here, from the tables by which calls are checked.

python -m headstart.inference.vllm_page > docs/vllm_api.md
"""

import inspect
from dataclasses import fields

from ..heads.storage.keywords import ANY
from .inputs import TokensPrompt
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling_params import SamplingParams
from .speculation.options import SPECULATIVE, SpeculativeOptions
from .vllm_api import CALLS, CHAT, LLM_ARGUMENTS, MISSING, PROMPT_KEYS, SAMPLING

INTRODUCTION = """# Code written for vLLM

What becomes of the arguments and methods of vLLM's offline API. *Same*: it is here under the same name. *Accepted*: it changes no
output here. *Refused*: an error of one line says what to do instead. A refused argument is accepted at the values that are named.

    from headstart import LLM, SamplingParams, StructuredOutputsParams, RequestOutput, CompletionOutput, TextPrompt, TokensPrompt
    from headstart.inference.metrics import Counter, Gauge, Vector

This page is written by `python -m headstart.inference.vllm_page`, from the tables of `inference/vllm_api.py` and
`inference/speculation/options.py` by which calls are checked.
"""
# Names that vLLM does not have.
OWN = {
    "device",
    "adapter",
    "tree",
    "verifier",
    "acceptance_rates",
    "acceptance_length",
    "adaptive",
    "get_stats",
    "stream",
    "speculate",
}
OWN |= {
    "tensor_parallel_invariant",
    "engine",
    "generation_defaults",
    "eos_token_ids",
    "numerics",
    "spec_decode_metrics",
}
NOTES = {
    "max_num_seqs": "8 if not given",
    "max_num_batched_tokens": "2048 if not given",
    "max_logprobs": "100 if not given",
    "load_format": "`auto` or `dummy`",
    "tensor_parallel_size": "processes on one host",
    "draft_tensor_parallel_size": "1 or `tensor_parallel_size`, of a head's own lm_heads; if not given, by their size",
    "quantization": "`fp8` rounds weights of a head's drafts; the target's are not quantised",
    "trust_remote_code": "code is run only for model types that transformers does not know, and a warning says so",
    "use_tqdm": "False if not given",
    "get_default_sampling_params": "of the model's generation config; `generate` without parameters takes `SamplingParams()`",
    "get_metrics": "counters and gauges, no histograms",
    "reset_prefix_cache": "without arguments",
    "logprobs_mode": "`raw_logprobs` or `processed_logprobs`",
    "seed": "another generator: the tokens drawn differ from vLLM's",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar` (Lark or GBNF) or `json_object`, by llguidance",
    "bad_words": "a bad word may begin in the prompt",
}


def _names(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "unknown", "others")]


def sections():
    """[(title, names that are the same here, rows that are not)]"""
    public = [name for name in vars(LLM) if not name.startswith("_")]
    speculative = [*(field.name for field in fields(SpeculativeOptions)), "revision"]
    return [
        ("LLM", _names(LLM.__init__), LLM_ARGUMENTS),
        ("speculative_config", speculative, SPECULATIVE),
        ("LLM.generate", _names(LLM.generate), CALLS),
        ("LLM.chat", _names(LLM.chat), CHAT),
        ("SamplingParams", [field.name for field in fields(SamplingParams)] + ["clone", "from_optional"], SAMPLING),
        ("TextPrompt, TokensPrompt", list(TokensPrompt.__annotations__), PROMPT_KEYS),
        ("RequestOutput", [field.name for field in fields(RequestOutput)], ()),
        ("CompletionOutput", [*(field.name for field in fields(CompletionOutput)), "finished"], ()),
        ("Methods and attributes of LLM", public, MISSING),
    ]


def page():
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for title, same, rows in sections():
        lines = [f"| `{name}` | same | {NOTES.get(name, '')} |" for name in same if name not in OWN]
        if isinstance(rows, dict):
            lines += [f"| `{name}` | refused | {words} |" for name, words in rows.items()]
        else:
            lines += [_line(row) for row in rows]
        parts.append(f"## {title}\n\n| vLLM | here | |\n|---|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row):
    if row.accepts is ANY:
        return f"| `{row.name}` | accepted | {row.words} |"
    accepted = ", ".join(f"`{value!r}`" for value in row.accepts)
    return f"| `{row.name}` | refused | {row.words} (accepted: {accepted}) |"


if __name__ == "__main__":
    print(page(), end="")
