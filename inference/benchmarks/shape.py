"""Random models of a shape: which shape is meant, its decoder, and Medusa heads for it."""

from pathlib import Path

import torch

from ...heads.medusa import Medusa, MedusaConfig
from ..decoder import Decoder, check_supported
from ..memory import free_bytes, in_gib
from ..shapes import SHAPES, config_of
from ..tree import build_static_tree
from ..weights import weight_bytes

NUM_HEADS = 4
# Chances of the candidates of a depth that trees are shaped by: falling, as those of a typical Medusa head.
RATES = [[0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01]] * NUM_HEADS


def config_of_shape(shape):
    """The Hugging Face config of a named shape (inference/shapes.py) or of a folder with a config.json."""
    if (Path(shape) / "config.json").is_file():
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(shape)
    return config_of(shape)


def check_fits(shape, device, dtype, num_bytes=weight_bytes, what="the weights"):
    """ValueError, naming the shapes that would fit, if a shape's weights do not fit into the free memory of the device.

    num_bytes(config, dtype) and what: what is held at once, where that is something else than the weights of the target.
    """
    config = config_of_shape(shape)
    check_supported(config)
    needed, free = num_bytes(config, dtype), free_bytes(torch.device(device))
    if needed > free:
        fitting = [name for name in SHAPES if num_bytes(config_of(name), dtype) <= free]
        raise ValueError(
            f"{what} of {shape} take {in_gib(needed)} in {str(dtype).removeprefix('torch.')} and {in_gib(free)} are free "
            f"on {device}: name a shape that fits ({', '.join(fitting) or 'of the named ones none does'}), a folder with the "
            "config.json of a smaller model, or a smaller --dtype"
        )


def bytes_with_heads(config, dtype, shared_lm_head):
    """Bytes of a target's weights and of NUM_HEADS Medusa heads beside it."""
    head = empty_head(config.hidden_size, config.vocab_size, shared_lm_head)
    return weight_bytes(config, dtype) + dtype.itemsize * sum(parameter.numel() for parameter in head.parameters())


def random_decoder(shape, device, dtype, max_positions):
    """A decoder of a shape with random weights, made on the device."""
    config = config_of_shape(shape)
    return Decoder.from_pretrained(None, config, dtype, torch.device(device), max_positions, load_format="dummy")


def empty_head(hidden_size, vocab_size, shared_lm_head):
    """NUM_HEADS Medusa heads without memory, to ask them for their shape."""
    with torch.device("meta"):
        return Medusa(MedusaConfig(hidden_size, vocab_size, NUM_HEADS, shared_lm_head=shared_lm_head))


def random_head(decoder, shared_lm_head):
    """NUM_HEADS Medusa heads with random weights for a decoder, made on its device."""
    head = empty_head(decoder.hidden_size, decoder.vocab_size, shared_lm_head).to(decoder.dtype)
    head = head.to_empty(device=decoder.device).requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(std=decoder.hidden_size**-0.5)
    return head.eval()


def spread_tree(num_nodes):
    """A tree of `num_nodes` nodes, as deep as NUM_HEADS heads of typical acceptance have it."""
    return build_static_tree(RATES, num_nodes)
