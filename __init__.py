"""Headstart: train speculator heads, export them, and run them in an engine where speculation changes no output bit."""

from importlib import import_module

__version__ = "0.1.0"

# Public names and where they live. They are imported on first use, so that `headstart --help` does not wait for torch.
_PUBLIC = {
    "LLM": ".inference.llm",
    "SamplingParams": ".inference.sampling_params",
    "StructuredOutputsParams": ".inference.grammar.structured_outputs",
    "RequestOutput": ".inference.outputs",
    "CompletionOutput": ".inference.outputs",
    "TextPrompt": ".inference.inputs",
    "TokensPrompt": ".inference.inputs",
    "load_head": ".heads.checkpoint",
    "save_head": ".heads.checkpoint",
    "Medusa": ".heads.medusa",
    "MedusaConfig": ".heads.medusa",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}; it offers {', '.join(_PUBLIC)}")
    return getattr(import_module(_PUBLIC[name], __name__), name)


def __dir__():
    return sorted([*globals(), *_PUBLIC])
