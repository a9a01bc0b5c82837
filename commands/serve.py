"""`headstart serve`: its arguments and its work."""

import argparse
import json
import secrets
import warnings
from functools import partial

from ..heads.storage.user_errors import say, tell_error
from ..inference import arguments as shared
from ..inference.arguments import choose_threads_for, ranks_of, speculative_config
from ..inference.frozen_heap import end_without_collecting
from .chat_template import check_chat_template, read_chat_template
from .vllm_serve import add_theirs, check_theirs

EXAMPLE = (
    "headstart serve assets/stdlib-coder --head assets/stdlib-coder-medusa --tree static\n"
    '  curl http://127.0.0.1:8000/v1/chat/completions -H \'Content-Type: application/json\' -d \'{"temperature": 0, "messages":\n'
    '      [{"role": "user", "content": "Write the Python function `is_empty`: Return True if the queue is empty."}]}\''
)
DETAILS = (
    "An answer with a seed has the same bits alone and beside others, with a head and without. Options of `vllm serve` have the "
    "same names here, with dashes or underscores; docs/vllm_serve.md lists them. docs/serving.md has the routes and the limits."
)


def add_options(parser):
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the target: a folder or Hub id")
    parser.add_argument("--model", help="the same, as an option")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with options, by their names without dashes; the command line wins"
    )
    add_llm(parser)
    _add_server(parser.add_argument_group("server"))
    add_theirs(parser)


def add_llm(parser):
    """Options of the LLM that is served: those that `llm_arguments` reads."""
    _add_engine(parser.add_argument_group("engine"))
    group = parser.add_argument_group("speculation")
    shared.add_speculation(group)
    group.add_argument("--speculative-config", metavar="JSON", help="all of it as one JSON object, as LLM takes it")


def _add_engine(group):
    shared.add_adapter(group)
    shared.add_device(group)
    group.add_argument("--tokenizer", help="folder or Hub id of another tokenizer")
    group.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    group.add_argument("--download-dir", help="where files of the Hub go")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that the target brings along")
    group.add_argument(
        "--max-model-len", type=int, help="longest prompt + output in tokens (default: the model's limit)"
    )
    group.add_argument("--max-num-seqs", type=int, default=64, help="outputs that run at once (default 64)")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, help="prompt tokens per step (default 2048)")
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory (default 0.9)"
    )
    group.add_argument("--num-gpu-blocks-override", type=int, help="cache pages of 64 tokens to allocate instead")
    group.add_argument(
        "--load-format",
        default="auto",
        help="auto (default); dummy: random weights of the model's shape, to measure speed without a checkpoint",
    )
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs (for debugging)")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep pages of prompts for others that begin alike (default)",
    )
    shared.add_ranks(group)
    group.add_argument("--logprobs-mode", default="raw_logprobs", help="raw_logprobs (default) or processed_logprobs")


def _add_server(group):
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    group.add_argument("--port", type=int, default=8000, help="0: a free one (default 8000)")
    group.add_argument(
        "--uds", metavar="PATH", help="listen on this Unix socket instead; without a key only its owner may connect"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="TLS: the server's certificate, with its chain (PEM)")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key (default: in the same file)")
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="clients must show a certificate that one of these has signed"
    )
    group.add_argument(
        "--api-key",
        action="append",
        help="clients must give it; may be given again; better in the variable HEADSTART_API_KEY, which ps does not show",
    )
    group.add_argument(
        "--seed",
        type=int,
        help="requests without a seed derive theirs from it and their number (default: from a secret number, new at every start)",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        choices=("auto", "vllm"),
        help="auto: parameters that a request leaves out are those of the model's generation_config.json; vllm: OpenAI's",
    )
    group.add_argument("--served-model-name", nargs="+", help="names of the model for clients (default: MODEL)")
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        help="names that a Host header may have; * for any (default: on loopback its names, else any)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        help="CORS: origins of web pages that may read answers in browsers, like https://a.example, or * (default: none)",
    )
    group.add_argument("--allowed-methods", nargs="+", help="CORS: methods for them (default: all)")
    group.add_argument("--allowed-headers", nargs="+", help="CORS: headers for them (default: all)")
    group.add_argument("--allow-credentials", action="store_true", help="CORS: also cookies and certificates")
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's, or its text in one line"
    )
    group.add_argument(
        "--max-connections", type=int, default=4096, help="open connections before 503 is answered (default 4096)"
    )
    group.add_argument(
        "--header-timeout",
        type=float,
        default=10,
        help="seconds after which a connection without a request's whole header is closed (default 10)",
    )
    group.add_argument(
        "--max-waiting", type=int, default=1024, help="outputs that wait before 429 is answered (default 1024)"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=30, help="seconds for running requests after SIGTERM (default 30)"
    )
    group.add_argument("--request-timeout", type=float, help="the most seconds of one request (default: no limit)")
    group.add_argument(
        "--body-timeout", type=float, default=30, help="the most seconds for a body to come in (default 30)"
    )
    group.add_argument(
        "--write-timeout",
        type=float,
        default=60,
        help="seconds after which a client that does not read is left (default 60)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        help="seconds after which a step of the engine counts as failed; 0: never (default: 300 on a GPU, 0 on a CPU, where a step "
        "that computes a long prompt may take longer)",
    )
    group.add_argument("--max-body-bytes", type=int, default=8 * 2**20, help="the longest body (default 8 MiB)")
    group.add_argument("--max-n", type=int, default=128, help="the most outputs per prompt (default 128)")
    group.add_argument("--max-prompts", type=int, default=1024, help="the most prompts per request (default 1024)")
    group.add_argument("--max-logprobs", type=int, default=20, help="the most logprobs per token (default 20)")
    group.add_argument(
        "--enable-prompt-tokens-details", action="store_true", help="usage tells tokens found in the cache"
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="tell reasoning apart from the answer, between <think> and </think>: deepseek_r1, qwen3 or glm45",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes, mistral or llama3_json (default: as its chat template does)",
    )
    group.add_argument(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="GET /tokenizer_info tells special tokens and the chat template",
    )
    group.add_argument(
        "--access-log",
        default="text",
        choices=("text", "json", "off"),
        help="a line per request: text (default), json (on stdout, or in --access-log-file) or off; none holds text of a prompt",
    )
    group.add_argument("--access-log-file", metavar="FILE", help="where the JSON lines go; may be moved at any time")
    group.add_argument("--disable-log-requests", action="store_true", help="accepted: prompts are never logged")
    group.add_argument(
        "--uvicorn-log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="what uvicorn logs; info (default) is needed for --access-log text",
    )


def run(arguments):
    model = arguments.model_tag or arguments.model
    if not model or (arguments.model_tag and arguments.model and arguments.model_tag != arguments.model):
        raise ValueError("name one model: headstart serve MODEL")
    check_theirs(arguments)
    speculative = speculative_of(arguments)
    from ..inference.models.target_source import check_model_folder

    check_model_folder(model)  # before a server and an engine are built
    try:
        from ..inference.server.door.unix_socket import allow_open_files, unix_socket
        from ..inference.server.driver.engine_process import EngineEnded, EngineProcess
        from ..inference.server.options import ServerOptions, keys_of
        from ..inference.server.serve import listening_socket, serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic"):
            raise
        raise ValueError(f"serving needs {error.name}: pip install 'headstart[serve]'") from None
    options = ServerOptions(
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        ssl_keyfile=arguments.ssl_keyfile,
        ssl_certfile=arguments.ssl_certfile,
        ssl_ca_certs=arguments.ssl_ca_certs,
        api_keys=keys_of(arguments.api_key),
        served_model_names=tuple(arguments.served_model_name or ()),
        allowed_hosts=tuple(arguments.allowed_hosts) if arguments.allowed_hosts else None,
        allowed_origins=_names(arguments.allowed_origins) or (),
        allowed_methods=_names(arguments.allowed_methods) or ("*",),
        allowed_headers=_names(arguments.allowed_headers) or ("*",),
        allow_credentials=arguments.allow_credentials,
        chat_template=read_chat_template(arguments.chat_template),
        max_connections=arguments.max_connections,
        header_timeout=arguments.header_timeout,
        max_waiting=arguments.max_waiting,
        shutdown_timeout=arguments.shutdown_timeout,
        request_timeout=arguments.request_timeout,
        body_timeout=arguments.body_timeout,
        write_timeout=arguments.write_timeout,
        step_timeout=arguments.step_timeout,
        max_body_bytes=arguments.max_body_bytes,
        max_n=arguments.max_n,
        max_prompts=arguments.max_prompts,
        max_logprobs=arguments.max_logprobs,
        model_defaults=arguments.generation_config == "auto",
        prompt_tokens_details=arguments.enable_prompt_tokens_details,
        reasoning_markers=_reasoning_markers(arguments.reasoning_parser),
        tool_call_parser=arguments.tool_call_parser,
        tokenizer_info=arguments.enable_tokenizer_info_endpoint,
        log_level=arguments.uvicorn_log_level,
        access_log=arguments.access_log,
        access_log_file=arguments.access_log_file,
    )
    allow_open_files()
    if options.uds is None:
        bound = listening_socket(options.host, options.port)
    else:
        bound = unix_socket(options.uds, for_all=bool(options.api_keys))
    seed = secrets.randbits(63) if arguments.seed is None else arguments.seed
    given = llm_arguments(model, arguments, speculative, max_logprobs=arguments.max_logprobs, seed=seed)
    with EngineProcess(partial(build_llm, given)) as engine:
        # Imports, tokenizer and template take some seconds, in which the engine is built: a bad template is told before its end.
        try:
            tokenizer = _tokenizer(model, arguments, engine)
            if options.chat_template is not None:
                check_chat_template(arguments.chat_template, options.chat_template, tokenizer)
            info = engine.wait_until_built()
        except EngineEnded as error:
            tell_error("headstart serve", error)
            return 1
        names = ", ".join(options.served_model_names or (info.model_name,))
        ranks = arguments.tensor_parallel_size
        places = f" on {ranks} ranks" if ranks > 1 else ""
        ready = f"serves {names}{places}; {_describe(info.tree, speculative)}"
        end_without_collecting()
        return serve(engine, tokenizer, options, bound, ready=lambda url: say(f"ready: {_api(url)} {ready}"))


def _tokenizer(model, arguments, engine):
    """The target's tokenizer. An error waits for the engine's, which says what is wrong with the model."""
    from ..inference.models.target_source import at_revision, load_tokenizer

    trusted = arguments.trust_remote_code
    try:
        source = at_revision(model, arguments.revision, arguments.download_dir, trusted)
        return load_tokenizer(arguments.tokenizer, source, trusted)
    except (ValueError, OSError):
        engine.wait_until_built()
        raise


def _reasoning_markers(parser):
    """The markers of --reasoning-parser, None without one."""
    from ..inference.server.options import REASONING_MARKERS

    if parser is not None and parser not in REASONING_MARKERS:
        raise ValueError(f"--reasoning-parser must be one of {', '.join(REASONING_MARKERS)}, got {parser!r}")
    return REASONING_MARKERS.get(parser)


def _api(url):
    """Where OpenAI's API is: under /v1, which the name of a Unix socket cannot say."""
    return url if url.startswith("unix:") else f"{url}/v1"


def _names(words):
    """Names that were given as words, or as vLLM takes them, as one JSON list."""
    if not words or not words[0].startswith("["):
        return tuple(words or ())
    try:
        names = json.loads(" ".join(words))
    except json.JSONDecodeError as error:
        raise ValueError(f"{' '.join(words)} is not a JSON list: {error}") from None
    return tuple(map(str, names))


def speculative_of(arguments):
    """The speculative_config of the options, None for plain decoding."""
    given = arguments.speculative_config
    if given is None:
        return speculative_config(arguments)
    if arguments.head or arguments.method or arguments.tree or arguments.num_speculative_tokens is not None:
        raise ValueError(
            "--speculative-config says all: leave out --head, --method, --tree and --num-speculative-tokens"
        )
    try:
        config = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--speculative-config is not JSON ({error}), got {given!r:.200}; keys and words are in double quotes, "
            """as in '{"method": "ngram", "num_speculative_tokens": 5}'"""
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config must be a JSON object, got {given!r:.80}")
    return config


def llm_arguments(model, arguments, speculative, **more):
    """Arguments of the LLM of the options of add_llm.  speculative: what speculative_of says; more: further ones"""
    return dict(
        model=model,
        tokenizer=arguments.tokenizer,
        device=arguments.device,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        load_format=arguments.load_format,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        trust_remote_code=arguments.trust_remote_code,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_gpu_blocks_override=arguments.num_gpu_blocks_override,
        enforce_eager=arguments.enforce_eager,
        enable_prefix_caching=arguments.enable_prefix_caching,
        logprobs_mode=arguments.logprobs_mode,
        speculative_config=speculative,
        **ranks_of(arguments),
        **more,
    )


def build_llm(given):
    """The LLM of these arguments: the first work of the engine's process."""
    from ..inference.llm import LLM

    choose_threads_for(given["model"], given["device"], given["trust_remote_code"])
    return LLM(**given)


def _describe(tree, speculative):
    """What speculation does, in a few words; a note where it does more than save time."""
    from ..inference.speculation.options import SpeculativeOptions

    options = SpeculativeOptions.parse(speculative)
    if options is None:
        return "plain decoding, no speculation"
    verifier = options.verifier_on(tree)
    if verifier != "strict":
        warnings.warn(
            f"with the verifier {verifier!r} an answer with a seed depends on speculation and on other requests: only 'strict' "
            "keeps its bits",
            stacklevel=1,
        )
    if tree.grows:
        shape = f"a growing tree of {tree.num_nodes} nodes, up to {tree.max_depth} deep"
    elif tree.is_chain:
        shape = f"a chain of {tree.max_depth}"
    else:
        shape = f"a tree of {tree.num_nodes} nodes, {tree.max_depth} deep"
    source = options.model if isinstance(options.model, str) else options.method
    kept = ", which changes no bit of an answer" if verifier == "strict" else f", verifier {verifier}"
    return f"{source or options.method} speculates: {shape}{kept}"
