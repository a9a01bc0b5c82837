"""Options of `vllm serve` that are not ours: which are taken, and with which words the others are refused.

Taken ones are parsed and checked as LLM's arguments are, by rows of inference/vllm_api.py, or by the rows of SERVER. The others are
explained after parsing. docs/vllm_serve.md is made from these tables (commands/vllm_serve_page.py). No torch.
"""

import argparse
import json

from ..heads.storage.keywords import ANY, Theirs, reject_unknown
from ..inference.vllm_api import CHAT, LLM_ARGUMENTS

SWITCH = {"action": argparse.BooleanOptionalAction}  # --NAME and --no-NAME
ONE_WORD = {}

# Rows of options that LLM has not, or whose words are others on the command line.
SERVER = (
    Theirs("disable_log_stats", ANY, "/metrics always counts"),
    Theirs("enable_lora", (False,), "--adapter merges one LoRA adapter into the weights"),
    Theirs("enable_sleep_mode", (False,), "end the server to free its memory"),
    Theirs(
        "override_generation_config", ({},), "requests give parameters; --generation-config vllm leaves the model's out"
    ),
    Theirs("tokenizer_mode", ("auto", "hf"), "tokenizers are read by transformers: leave it out"),
    Theirs("skip_tokenizer_init", (False,), "requests may give token ids: leave it out"),
    Theirs("data_parallel_size", (1,), "start a process per GPU, behind a proxy"),
    Theirs("scheduling_policy", ("fcfs",), "requests run in the order in which they come: leave it out"),
    Theirs(
        "compilation_config", (0, 1, 2, 3), "the kernels are compiled as they are: leave it out, or say --enforce-eager"
    ),
    Theirs("enable_auto_tool_choice", ANY, "tools are always read where a request gives some"),
    *(row for row in CHAT if row.name == "chat_template_content_format"),
    Theirs("trust_request_chat_template", (False,), "templates of requests are not run: give --chat-template"),
    Theirs("response_role", ("assistant",), "answers are the assistant's: leave it out"),
    Theirs("exclude_tools_when_tool_choice_none", (True,), "with tool_choice none the model is never told of tools"),
    Theirs("return_tokens_as_token_ids", (False,), "requests ask for it by the field of this name"),
    Theirs("enable_force_include_usage", (False,), "requests ask for it with stream_options.include_usage"),
    Theirs("enable_log_requests", (False,), "no text of a prompt is logged: --access-log json has a line per request"),
    Theirs("enable_log_outputs", (False,), "no text of an answer is logged"),
    Theirs("max_log_len", ANY, "no text of a prompt is logged"),
    Theirs("enable_request_id_headers", (True,), "X-Request-Id is always sent: leave it out"),
    Theirs("disable_fastapi_docs", (True,), "there is no such page: leave it out"),
    Theirs("disable_frontend_multiprocessing", ANY, "the engine always has a process of its own"),
    Theirs("api_server_count", (1,), "one process answers HTTP: leave it out"),
    Theirs("headless", (False,), "one process runs the engine: leave it out"),
    Theirs("use_v2_block_manager", ANY, "the cache is one of pages"),
    Theirs(
        "speculative_draft_tensor_parallel_size",
        (1,),
        "give --speculative-config '{\"draft_tensor_parallel_size\": N, ...}'",
    ),
)
# How each is parsed.
TAKEN = {
    **dict.fromkeys(
        ("disable-log-stats", "enable-chunked-prefill", "async-scheduling", "disable-custom-all-reduce", "disable-cascade-attn",
         "disable-chunked-mm-input", "fully-sharded-loras", "disable-async-output-proc",
         "enable-auto-tool-choice", "disable-frontend-multiprocessing",
         "enable-expert-parallel", "enable-lora", "enable-sleep-mode", "enable-prompt-embeds", "skip-tokenizer-init",
         "disable-sliding-window", "calculate-kv-scales", "trust-request-chat-template", "return-tokens-as-token-ids",
         "exclude-tools-when-tool-choice-none", "enable-force-include-usage", "enable-log-requests", "enable-log-outputs",
         "enable-request-id-headers", "disable-fastapi-docs", "headless", "use-v2-block-manager"), SWITCH),
    **dict.fromkeys(
        ("swap-space", "block-size", "kv-cache-dtype", "pipeline-parallel-size", "data-parallel-size",
         "decode-context-parallel-size", "scheduling-policy", "tokenizer-mode", "quantization", "max-seq-len-to-capture",
         "attention-backend", "distributed-executor-backend", "cpu-offload-gb", "prefix-caching-hash-algo",
         "max-num-partial-prefills", "max-long-partial-prefills", "long-prefill-token-threshold", "optimization-level",
         "compilation-config", "additional-config", "model-loader-extra-config", "hf-overrides", "override-generation-config",
         "limit-mm-per-prompt", "mm-processor-kwargs", "mm-processor-cache-gb", "allowed-local-media-path", "max-loras",
         "max-lora-rank", "lora-extra-vocab-size", "num-scheduler-steps",
         "runner", "convert", "task", "model-impl", "structured-outputs-config",
         "guided-decoding-backend", "chat-template-content-format", "response-role", "max-log-len", "api-server-count",
         "speculative-draft-tensor-parallel-size"), ONE_WORD),
}  # fmt: skip
SHORT = {
    "pipeline-parallel-size": "-pp", "data-parallel-size": "-dp", "decode-context-parallel-size": "-dcp", "quantization": "-q",
    "enable-expert-parallel": "-ep", "api-server-count": "-asc",
}  # fmt: skip
ROWS = {row.name: row for row in (*LLM_ARGUMENTS, *SERVER)}

OURS = {
    "generation-config",
    "served-model-name",
    "reasoning-parser",
    "num-speculative-tokens",
    "speculative-model",
}  # options that LLM has not, and the server has
# Never taken: what to do instead, and for which options. Others of LLM_ARGUMENTS have their words there.
REFUSED = {
    "requests have logit_bias, allowed_token_ids, bad_words and penalties": ("logits-processors", "logits-processor-pattern"),
    "give --num-gpu-blocks-override, in pages of 64 tokens, or --gpu-memory-utilization": ("kv-cache-memory-bytes",),
    "download that revision and give its folder as --tokenizer": ("tokenizer-revision",),
    "`headstart bench serve` and `headstart bench engine` measure": ("profiler-config",),
    "write it into the model folder's config.json": ("rope-scaling", "rope-theta"),
    "put it into a proxy before the server": ("middleware",),
    "the proxy may take a prefix off the path": ("root-path",),
    "give --access-log off, or json": (
        "disable-uvicorn-access-log", "disable-access-log-for-endpoints", "aggregate-engine-logging"),
    "no text of an answer is logged": ("enable-log-deltas",),
    "give --uvicorn-log-level and --access-log": ("log-config-file", "log-error-stack"),
    "give --max-body-bytes and --header-timeout": ("h11-max-incomplete-event-size", "h11-max-header-count"),
    "with --ssl-ca-certs clients must show a certificate": ("ssl-cert-reqs",),
    "restart the server, or let a proxy end TLS": ("enable-ssl-refresh", "ssl-ciphers"),
    "/metrics has the numbers": ("enable-server-load-tracking", "enable-per-request-metrics", "show-hidden-metrics-for-version"),
    "graphs are captured up to --max-num-seqs": ("cuda-graph-sizes", "cudagraph-capture-sizes", "max-cudagraph-capture-size"),
    "the kernels are the engine's own": (
        "attention-config", "kernel-config", "moe-backend", "enable-flashinfer-autotune", "override-attention-dtype",
        "performance-mode", "kv-sharing-fast-prefill"),
    "weights are read in one way": (
        "use-tqdm-on-load", "pt-load-map-location", "safetensors-load-strategy", "ignore-patterns"),
    "the system_fingerprint says on what the bits depend": ("fingerprint-mode", "fingerprint-value"),
    "prompts hold no images or sounds": (
        "allowed-media-domains", "media-io-kwargs", "mm-processor-cache-type", "mm-encoder-tp-mode", "mm-encoder-attn-backend",
        "mm-encoder-only", "mm-shm-cache-max-object-size-mb", "skip-mm-profiling", "video-pruning-rate", "enable-mm-embeds",
        "interleave-mm-strings", "io-processor-plugin", "language-model-only", "default-mm-loras"),
    "models with a state are not run": ("mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode"),
}  # fmt: skip
# Of use here, and not built: what there is instead.
NOT_YET = {
    "--adapter merges one LoRA adapter": ("lora-modules", "max-cpu-loras", "lora-dtype"),
    "only tensor-parallel-size divides a model; start several servers behind a proxy": (
        "data-parallel-size-local", "data-parallel-rank", "data-parallel-start-rank", "data-parallel-address",
        "data-parallel-rpc-port", "data-parallel-backend", "data-parallel-hybrid-lb", "data-parallel-external-lb",
        "prefill-context-parallel-size", "nnodes", "node-rank", "master-addr", "master-port", "all2all-backend", "enable-eplb",
        "eplb-config", "enable-dbo", "max-parallel-loading-workers", "worker-extension-cls", "ray-workers-use-nsight"),
    "requests give chat_template_kwargs": ("default-chat-template-kwargs",),
    "calls are read as Hermes, Mistral or Llama 3 write them, reasoning between `<think>` and `</think>`": (
        "tool-parser-plugin", "tool-server", "reasoning-parser-plugin"),
    "text is sent as soon as it is final": ("stream-interval",),
    "requests run in the order in which they come": ("scheduler-cls",),
    "the cache stays on the device": (
        "kv-events-config", "ec-transfer-config", "kv-offloading-size", "kv-offloading-backend", "cpu-offload-params",
        "offload-backend"),
    "/metrics and --access-log json tell of every request": ("otlp-traces-endpoint", "collect-detailed-traces"),
}  # fmt: skip


def add_theirs(parser):
    """Options that are taken, without a line of --help."""
    for name, how in TAKEN.items():
        names = [short] if (short := SHORT.get(name)) else []
        parser.add_argument(*names, f"--{name}", default=None, help=argparse.SUPPRESS, **how)
    parser.add_argument(
        "--speculative-model", dest="head", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )  # its old name
    parser.set_defaults(explain_unknown=why_refused)


def check_theirs(arguments):
    """ValueError for an option whose value asks for something that is not here."""
    for option in TAKEN:
        name = option.replace("-", "_")
        if (given := getattr(arguments, name)) is not None:
            reject_unknown({name: _value(given)}, (), "option", ROWS.values())


def _value(given):
    """A word of the command line as a number, a truth value or JSON where it is one."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given


def why_refused(words):
    """What to say of the first option of vLLM's among unknown words of a command line, or None."""
    for word in words:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-")
        if word.startswith("--") and name in REASONS:
            return f"option '--{name}' is vLLM's and {REASONS[name]}"
    return None


def _reasons():
    """{option that is not taken: what is said of it}"""
    found = {row.name.replace("_", "-"): f"not supported here: {row.words}" for row in LLM_ARGUMENTS}
    for state, table in (("not supported here", REFUSED), ("not there yet", NOT_YET)):
        found |= {name: f"{state}: {words}" for words, names in table.items() for name in names}
    known = {*TAKEN, *OURS, "sliding-window", "enable-prompt-adapter"}  # the last two are not options of `vllm serve`
    return {name: words for name, words in found.items() if name not in known}


REASONS = _reasons()
