"""Options of the server, checked once. Those of the engine are LLM's own arguments. No torch."""

import ipaddress
import os
from dataclasses import dataclass

KEY_VARIABLE = "HEADSTART_API_KEY"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# (opening, closing) by vLLM's names of parsers that look for such markers and nothing else.
REASONING_MARKERS = dict.fromkeys(("deepseek_r1", "qwen3", "glm45"), ("<think>", "</think>"))


@dataclass(frozen=True)
class ServerOptions:
    """What the server listens to and allows. Raises ValueError for values that make no sense or no safe server.

    api_keys: any of them opens every route; without one only /health and /ping are open to others than this machine, which is to
    say that binding beyond loopback is refused. allowed_hosts: names that a Host header may have, None: those of loopback if it is
    bound to loopback, else any. max_waiting: outputs that wait beside those that run. shutdown_timeout: seconds for running
    requests after SIGTERM. request_timeout: the most seconds of one request, None: no limit; body_timeout: for its body to come in;
    write_timeout: for a reader to take what was sent; step_timeout: for a step of the engine, 0: no limit, None: STEP_TIMEOUT on a
    GPU, and none on a CPU. The rest are the most of each per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    max_waiting: int = 1024
    shutdown_timeout: float = 30
    request_timeout: float | None = None
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
    reasoning_markers: tuple[str, str] | None = (
        None  # (opening, closing): what is between is told apart in conversations
    )
    tokenizer_info: bool = False  # whether clients may read the chat template
    log_level: str = "info"

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
        for name in ("shutdown_timeout", "body_timeout", "write_timeout", "request_timeout", "keep_alive"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds >= (0 if name == "shutdown_timeout" else 0.001):
                raise ValueError(f"--{name.replace('_', '-')} must be a number of seconds above 0, got {seconds}")
        if self.step_timeout is not None and not self.step_timeout >= 0:
            raise ValueError(f"--step-timeout must be a number of seconds, or 0 for no limit, got {self.step_timeout}")
        for name in ("max_waiting", "max_body_bytes", "max_n", "max_prompts", "max_stops", "max_biases"):
            if getattr(self, name) < (0 if name == "max_waiting" else 1):
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    @property
    def is_loopback(self):
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self):
        """Names that a Host header may have, without port and in lower case; None: any."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else {host.lower().strip("[]") for host in self.allowed_hosts}
        return {*LOOPBACK_NAMES, self.host.lower()} if self.is_loopback else None


def keys_of(given):
    """The keys of --api-key, or of the environment where none is given: a command line can be read by all users of a machine."""
    return tuple(given or filter(None, [os.environ.get(KEY_VARIABLE)]))
