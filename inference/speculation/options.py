"""The keys of a speculative_config, checked once. speculation.py applies them to a target."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import nn

from ...heads.families import FAMILIES
from ...heads.storage.keywords import ANY, Theirs, python_value, reject_unknown
from .draft_sampling import DRAFT_SAMPLING, VERIFIERS

# vLLM's names of drafters: a family of heads, a smaller model, the sequence itself.
METHODS = (*(family.key for family in FAMILIES), "draft_model", "ngram")
# vLLM's rejection_sample_method: the verifier on a chain, and on a tree.
REJECTION_SAMPLE_METHODS = {
    "strict": ("strict", "strict"),
    "probabilistic": ("token", "recursive"),
    "standard": ("token", "recursive"),
    "block": ("block", "traversal"),
    "synthetic": ("synthetic", "synthetic"),
}
# draft_sample_method: vLLM's "probabilistic" is called "sampled" here.
DRAFT_SAMPLE_METHODS = {name: name for name in DRAFT_SAMPLING} | {"probabilistic": "sampled"}

# Keys of vLLM's speculative_config that are not ours.
SPECULATIVE = (
    Theirs("max_model_len", (None,), "the drafter has the LLM's max_model_len: leave it out"),
    Theirs("code_revision", (None,), "no code of a drafter is run: leave it out"),
    Theirs("draft_load_config", (None,), "weights are read in one way: leave it out"),
    Theirs("enforce_eager", (None, False), "give enforce_eager to the LLM"),
    Theirs("attention_backend", (None,), "the engine has its own attention: leave it out"),
    Theirs("disable_padded_drafter_batch", ANY, "drafts of a batch have one shape; the tokens do not depend on it"),
    Theirs("use_local_argmax_reduction", ANY, "lm_heads are divided as draft_tensor_parallel_size says"),
    Theirs("parallel_drafting", (False,), "take Medusa heads, which draft all depths at once"),
    Theirs("disable_by_batch_size", (None,), "say adaptive=True, or give num_speculative_tokens_per_batch_size"),
    Theirs("disable_logprobs", ANY, "log-probabilities are those of the target, with and without drafts"),
    Theirs("spec_token_tree", (None,), "give a tree file, 'static' or 'dynamic' as tree"),
    Theirs("suffix_decoding_max_tree_depth", (None,), "use the method 'ngram'"),
)


@dataclass(frozen=True)
class SpeculativeOptions:
    """A speculative_config; names and meanings are in LLM's docstring. Raises ValueError for values that can never be right."""

    method: str | None = None
    model: object = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    tree: str | Path = "chain"
    verifier: str | None = None
    rejection_sample_method: str | None = None
    draft_sample_method: str | None = None
    acceptance_rates: list | None = None
    acceptance_length: float | None = None
    adaptive: bool = False
    num_speculative_tokens_per_batch_size: dict | None = None
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None

    @classmethod
    def parse(cls, config):
        """The options of a speculative_config (a dict); None for None."""
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"speculative_config must be a dict or None, got {config!r:.80}")
        if config is None:
            return None
        names = [field.name for field in fields(cls)]
        config = {name: python_value(value) for name, value in config.items()}
        reject_unknown(config, [*names, "revision"], "speculative_config key", SPECULATIVE)
        if config.get("method") in ("dflash", "dspark"):  # vLLM's names of the family
            config["method"] = "block"
        return cls(**{name: config[name] for name in names if name in config}).at_revision(config.get("revision"))

    def __post_init__(self):
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"speculative_config['method'] must be one of {', '.join(METHODS)}, got {self.method!r}")
        lookup = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if getattr(self, name) is not None]
        if self.method == "ngram" and self.model is not None:
            raise ValueError(
                f"the method 'ngram' copies from the sequence itself and takes no model, got {name_of(self.model)}"
            )
        if self.method != "ngram" and lookup:
            raise ValueError(f"{lookup[0]} belongs to the method 'ngram': say method='ngram', or leave it out")
        if self.method != "ngram" and not (isinstance(self.model, str | Path | nn.Module) or is_config(self.model)):
            raise ValueError(
                "speculative_config needs 'model': what drafts, a head (a folder, a run, a Hub id or a module) or a smaller model "
                "of the same vocabulary; or method='ngram', which needs none"
            )
        if not isinstance(self.tree, str | Path):
            raise ValueError(
                f"speculative_config['tree'] must be 'chain', 'static', 'dynamic' or a tree file, got {self.tree!r:.80}"
            )
        if self.verifier is not None and self.rejection_sample_method is not None:
            raise ValueError(
                f"verifier={self.verifier!r} and rejection_sample_method={self.rejection_sample_method!r} say the same "
                "thing: give one of them"
            )
        for name, known in (
            ("verifier", VERIFIERS),
            ("rejection_sample_method", REJECTION_SAMPLE_METHODS),
            ("draft_sample_method", DRAFT_SAMPLE_METHODS),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or value not in known):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        ranks = self.draft_tensor_parallel_size
        if ranks is not None and (type(ranks) is not int or ranks < 1):
            raise ValueError(f"draft_tensor_parallel_size must be a whole number of at least 1, got {ranks!r}")
        if self.quantization not in (None, "fp8"):
            raise ValueError(
                "speculative_config['quantization'] must be 'fp8', which rounds the weights that drafts read most, or None, got "
                f"{self.quantization!r}"
            )
        if self.quantization and ranks not in (None, 1):
            raise ValueError(
                f"quantization={self.quantization!r} keeps lm_heads whole on each rank: leave out "
                f"draft_tensor_parallel_size={ranks}"
            )
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"speculative_config['adaptive'] must be True or False, got {self.adaptive!r}")
        if self.adaptive and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError("adaptive measures what num_speculative_tokens_per_batch_size tells: give one of them")

    def at_revision(self, revision):
        """Options with vLLM's key `revision` moved into the model's name, OWNER/NAME@REVISION, as heads are named everywhere."""
        model = self.model
        if revision is None:
            return self
        if not isinstance(revision, str) or not revision:
            raise ValueError(f"speculative_config['revision'] must name a branch, tag or commit, got {revision!r}")
        if not isinstance(model, str) or "@" in model or Path(model).is_dir() or self.method == "draft_model":
            raise ValueError(
                f"speculative_config['revision'] is of a head on the Hub (model='OWNER/NAME'), and the model here is "
                f"{name_of(model)}: leave it out"
            )
        return replace(self, model=f"{model}@{revision}")

    def verifier_on(self, tree):
        """The verifier's name on this Tree or GrowingTree."""
        if self.rejection_sample_method is not None:
            return REJECTION_SAMPLE_METHODS[self.rejection_sample_method][not tree.is_chain]
        return self.verifier or "strict"

    @property
    def lookup_range(self):
        """(fewest, most) tokens that prompt lookup compares. If one is given, both have its value, as in vLLM; else 1 to 4."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return 1, 4
        return (longest if shortest is None else shortest), (shortest if longest is None else longest)


def is_config(model):
    """Whether this is a config of transformers; a draft model is then made of its shape with random weights."""
    from transformers import PreTrainedConfig

    return isinstance(model, PreTrainedConfig)


def name_of(model):
    """A model's name for errors."""
    return f"this {type(model).__name__}" if isinstance(model, nn.Module) else str(model)
