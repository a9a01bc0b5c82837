"""Random models of a shape: find the shape, check that it fits, make its decoder, its LLM on ranks and trees for it.

Heads: random_heads.py.
"""

import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

from ..evaluation.timing import release
from ..inference.llm import LLM
from ..inference.models.memory import free_bytes, in_gib
from ..inference.models.modules.module_decoder import ModuleDecoder
from ..inference.models.shapes import SHAPES, config_of
from ..inference.models.support import check_supported, decoder_class, weight_bytes
from ..inference.speculation.tree import build_static_tree

NUM_HEADS = 4  # Medusa heads, and so the depth of trees
# Acceptance rates of the candidates at each depth, which shape the trees: falling, like those of typical Medusa heads.
RATES = [[0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01]] * NUM_HEADS


def config_of_shape(shape):
    """The Hugging Face config of a named shape (inference/models/shapes.py), of a folder with a config.json, or of such a file."""
    if (Path(shape) / "config.json").is_file() or Path(shape).is_file():
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(shape, trust_remote_code=False)
    return config_of(shape)


def check_fits(shape, device, dtype, *, num_bytes=weight_bytes, what="the weights"):
    """ValueError, naming the shapes that would fit, if a shape's weights do not fit into the free memory of the device.

    num_bytes(config, dtype) and what: size and name of what is held at once, if it is not just the target's weights.
    """
    config = config_of_shape(shape)
    check_supported(config)
    needed, free = num_bytes(config, dtype), free_bytes(torch.device(device))
    if needed > free:
        fitting = [name for name in SHAPES if _fits(config_of(name), dtype, num_bytes, free)]
        raise ValueError(
            f"{what} of {shape} take {in_gib(needed)} in {str(dtype).removeprefix('torch.')} and {in_gib(free)} are free "
            f"on {device}: name a shape that fits ({', '.join(fitting) or 'of the named ones none does'}), a folder with the "
            "config.json of a smaller model, or a smaller --dtype"
        )


def _fits(config, dtype, num_bytes, free):
    try:
        return num_bytes(config, dtype) <= free
    except ValueError:  # the benchmark does not take this shape
        return False


def random_decoder(shape, device, dtype, max_positions, as_module=False):
    """A decoder of a shape with random weights, made on the device; as_module: the model's own module in any case."""
    config = config_of_shape(shape)
    where = dict(dtype=dtype, device=torch.device(device), max_positions=max_positions)
    kind = ModuleDecoder if as_module else decoder_class(config)
    return kind.from_pretrained(None, config, load_format="dummy", **where)


@contextmanager
def llm_on_ranks(config, size, device, **options):
    """An LLM with random weights of a config on so many ranks, without prefix cache; the other ranks have ended afterwards."""
    release(torch.device(device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "with tensor_parallel_size")  # bits of its own: what is measured says so
        llm = LLM(
            config,
            load_format="dummy",
            device=device,
            enable_prefix_caching=False,
            tensor_parallel_size=size,
            **options,
        )
    try:
        yield llm
    finally:
        if llm.session.ranks is not None:
            llm.session.ranks.end()


def best_tree(num_nodes):
    """The static tree of `num_nodes` nodes with the greatest expected acceptance at RATES, which are typical of NUM_HEADS heads."""
    return build_static_tree(RATES, num_nodes)
