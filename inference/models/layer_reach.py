"""Which tokens each layer of a model may see: all before, a sliding window or a chunk.

A config of transformers says it in two ways. With `layer_types` every layer is of a type; without, `sliding_window` or
`attention_chunk_size` holds for all layers.
"""

import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """The tokens that a layer sees of its document: all before, the last `window` (its own included), or those of its chunk."""

    window: int | None = None
    chunk: int | None = None

    def __str__(self):
        limits = [f"a window of {self.window} tokens"] * bool(self.window) + [f"chunks of {self.chunk}"] * bool(
            self.chunk
        )
        return " and ".join(limits) or "all tokens"

    def within(self, row_length):
        """The same reach, without limits that no document of `row_length` tokens meets."""
        window, chunk = (limit if limit and limit < row_length else None for limit in (self.window, self.chunk))
        return Reach(window, chunk)


def find_reaches(config):
    """{layer type: Reach} of a text config, {None: Reach} for a decoder that takes one mask.

    Raises ValueError for windows or chunks beside layers of a type that is not known.
    """
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    named = {"full_attention": Reach(), "indexed_attention": Reach()}
    named |= {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    # Only a config that declares layer_types has a decoder that reads them: Mistral's ignores a stray key of config.json.
    declared = "layer_types" in inspect.signature(type(config).__init__).parameters
    types = sorted(set(config.layer_types or ())) if declared else []
    unknown = [kind for kind in types if kind not in named]
    if not unknown:
        return {kind: named[kind] for kind in types} or {None: Reach(window, chunk)}
    if window or chunk or "sliding_attention" in types or "chunked_attention" in types:
        raise ValueError(
            f"the target ({config.model_type}) has a sliding_window of {window} and an attention_chunk_size of {chunk} beside "
            f"layers of {', '.join(unknown)}: masks are built for layers of {', '.join(named)} only. Take a target whose "
            "layers are of these types"
        )
    return {None: Reach()}
