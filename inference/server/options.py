"""Options of the server, checked once. Those of the engine are LLM's own arguments. No torch."""

import ipaddress
import os
import ssl
from dataclasses import dataclass

from .tools.call_styles import STYLES

KEY_VARIABLE = "HEADSTART_API_KEY"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# (opening, closing) by vLLM's names of parsers that look for such markers and nothing else.
REASONING_MARKERS = dict.fromkeys(("deepseek_r1", "qwen3", "glm45"), ("<think>", "</think>"))


@dataclass(frozen=True)
class ServerOptions:
    """What the server listens to and allows. Raises ValueError for values that make no sense or no safe server.

    uds: a Unix socket to listen on instead of host and port. ssl_keyfile, ssl_certfile: of TLS; with ssl_ca_certs clients must show
    a certificate that one of these has signed. api_keys: any of them opens every route; without one only /health and /ping are open
    to others than this machine, which is to say that binding beyond loopback is refused. allowed_hosts: names of a Host header,
    None: those of loopback if it is bound to loopback, else any. allowed_origins: of pages in browsers (CORS), none: no such
    header is sent. chat_template: used instead of the tokenizer's. max_waiting: outputs that wait beside those that run.
    shutdown_timeout: seconds for running requests after SIGTERM. request_timeout: the most seconds of one request, None: no limit;
    header_timeout, body_timeout: for its parts to come in; write_timeout: for a reader to take what was sent; step_timeout: for a
    step of the engine, 0: no limit, None: STEP_TIMEOUT on a GPU, and none on a CPU. access_log: "text", "json" (lines in
    access_log_file, None: on stdout) or "off". The rest are the most of each per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    chat_template: str | None = None
    max_waiting: int = 1024
    max_connections: int = 4096
    shutdown_timeout: float = 30
    request_timeout: float | None = None
    header_timeout: float = 10
    body_timeout: float = 30
    write_timeout: float = 60
    step_timeout: float | None = None
    keep_alive: float = 15  # seconds of a stream without a piece before a comment is sent
    max_body_bytes: int = 8 * 2**20
    max_n: int = 128
    max_prompts: int = 1024
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_length: int = 1000  # characters
    max_biases: int = 1024
    model_defaults: bool = True  # parameters that a request leaves out are the model's own (its generation_config.json)
    prompt_tokens_details: bool = False
    reasoning_markers: tuple[str, str] | None = None  # (opening, closing): what is between is told apart
    tool_call_parser: str | None = None  # a name of tools/call_styles.py; None: as the chat template writes calls
    tokenizer_info: bool = False  # whether clients may read the chat template
    log_level: str = "info"
    access_log: str = "text"
    access_log_file: str | None = None

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be from 0 (a free one) to 65535, got {self.port}")
        for key in self.api_keys:
            if not key or key != key.strip() or not key.isascii():
                raise ValueError("--api-key must be ASCII text without spaces around it")
        if not self.is_loopback and not self.api_keys:
            raise ValueError(
                f"--host {self.host} can be reached from other machines: give --api-key (or set {KEY_VARIABLE}), or listen on "
                "127.0.0.1"
            )
        for name in (
            "shutdown_timeout",
            "header_timeout",
            "body_timeout",
            "write_timeout",
            "request_timeout",
            "keep_alive",
        ):
            seconds = getattr(self, name)
            if seconds is not None and not seconds >= (0 if name == "shutdown_timeout" else 0.001):
                raise ValueError(f"--{name.replace('_', '-')} must be a number of seconds above 0, got {seconds}")
        if self.step_timeout is not None and not self.step_timeout >= 0:
            raise ValueError(f"--step-timeout must be a number of seconds, or 0 for no limit, got {self.step_timeout}")
        for name in (
            "max_waiting",
            "max_connections",
            "max_body_bytes",
            "max_n",
            "max_prompts",
            "max_stops",
            "max_biases",
        ):
            if getattr(self, name) < (0 if name == "max_waiting" else 1):
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.tool_call_parser not in (None, *STYLES):
            raise ValueError(f"--tool-call-parser must be one of {', '.join(STYLES)}, got {self.tool_call_parser!r}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials lets pages act as their visitor: name them in --allowed-origins, not *"
            )
        if self.access_log_file is not None and self.access_log != "json":
            raise ValueError("--access-log-file is for JSON lines: give --access-log json with it")
        self._check_files()

    def _check_files(self):
        """ValueError if a file that is named cannot be read, or written."""
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("TLS needs a certificate: give --ssl-certfile with --ssl-keyfile and --ssl-ca-certs")
        try:
            if self.ssl_certfile is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=_refuse_password)
                if self.ssl_ca_certs is not None:
                    context.load_verify_locations(self.ssl_ca_certs)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)))
            raise ValueError(f"TLS cannot use {files}: {error.strerror or error}") from None
        if self.access_log_file is not None:
            try:
                open(self.access_log_file, "ab").close()
            except OSError as error:
                raise ValueError(f"cannot write --access-log-file {self.access_log_file}: {error.strerror}") from None

    @property
    def is_loopback(self):
        """Whether only this machine can connect."""
        if self.uds is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self):
        """Names that a Host header may have, without port and in lower case; None: any."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else {host.lower().strip("[]") for host in self.allowed_hosts}
        if self.uds is not None:  # which no browser opens
            return None
        return {*LOOPBACK_NAMES, self.host.lower()} if self.is_loopback else None


def _refuse_password():
    raise ValueError(
        "the key of --ssl-keyfile is encrypted: give one without a password, which only the server can read"
    )


def keys_of(given):
    """The keys of --api-key, or of the environment where none is given: a command line can be read by all users of a machine."""
    return tuple(given or filter(None, [os.environ.get(KEY_VARIABLE)]))
