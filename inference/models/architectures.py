"""The Llama-like architectures that the packed decoder runs: each is a declaration of its differences from Llama.

To add an architecture, add its declaration to ARCHITECTURES; weights.py and decoder.py do not look at the `model_type` otherwise.
An architecture with an operation of its own, such as partial rotation or a mixture of experts, also needs a block (blocks.py).
"""

from dataclasses import dataclass, fields, replace

FULL, SLIDING = "full_attention", "sliding_attention"


class UnsupportedArchitecture(ValueError):
    """The engine does not run this target yet; the message lists what it runs."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture's differences from Llama; the defaults are Llama's values.

    A string names the field of the Hugging Face config to read. If the field of a bias is missing there is no bias.
    layer_types: the known types; None: every layer has the config's sliding_window, whatever the config's layer_types say.
    """

    attention_bias: bool | str = "attention_bias"  # of q, k and v
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    attention_scale: float | str | None = None  # of the scores; None: D ** -0.5
    embedding_multiplier: float | str = 1.0
    residual_multiplier: float | str = 1.0  # factor of the outputs of attention and MLP
    logits_divisor: float | str = 1.0
    head_norms: bool = False  # RMSNorm of every head of q and k
    layer_types: tuple[str, ...] | None = (FULL,)

    def unknown_layer_types(self, config):
        """The layer types of a config that this architecture does not know."""
        if self.layer_types is None:
            return []
        return [kind for kind in getattr(config, "layer_types", None) or [] if kind not in self.layer_types]

    def windows(self, config):
        """Number of positions that each layer sees, its own included; None: all."""
        if self.layer_types is None:
            return [config.sliding_window] * config.num_hidden_layers
        if SLIDING in self.layer_types:
            return [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
        return [None] * config.num_hidden_layers


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(layer_types=None),
    "qwen2": Architecture(attention_bias=True, out_bias=False, mlp_bias=False, layer_types=(FULL, SLIDING)),
    "qwen3": Architecture(head_norms=True, layer_types=(FULL, SLIDING)),
    "granite": Architecture(
        attention_scale="attention_multiplier",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        logits_divisor="logits_scaling",
    ),
}


def architecture_of(config):
    """The Architecture of a Hugging Face config with every value read from it; KeyError for one that is not declared."""
    declared, values = ARCHITECTURES[config.model_type], {}
    for field in fields(declared):
        name = getattr(declared, field.name)
        if isinstance(name, str):
            values[field.name] = getattr(config, name, False) if field.name.endswith("_bias") else getattr(config, name)
    return replace(declared, **values)
