"""Options of an engine, checked once."""

from dataclasses import dataclass, fields

from ...heads.storage.keywords import python_value
from .logprobs import LOGPROBS_MODES


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and switches of an engine; names and meanings are in LLM's docstring.

    max_model_len: longest prompt + output; None until the model's limit is known. Numbers may be numpy's. Raises ValueError for
    impossible values.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 100

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, python_value(getattr(self, field.name)))
        check_whole("max_num_seqs", self.max_num_seqs, 1)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.num_gpu_blocks_override is not None:
            check_whole("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        check_whole("max_logprobs", self.max_logprobs, -1)
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}")

    @property
    def keep_scores(self):
        """Whether steps keep the scores that tokens were drawn from."""
        return self.logprobs_mode == "processed_logprobs"


def check_whole(name, value, least):
    """ValueError unless the value of this name is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
