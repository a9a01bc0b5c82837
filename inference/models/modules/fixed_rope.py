"""Rotary frequencies that the library chooses by the largest position of a pass, fixed by the longest sequence there may be.

`longrope` has long and short factors. The library takes the long ones while any position of the pass is beyond the original length,
so a row would depend on its company. Here they are taken for all positions if max_model_len is beyond that length, as in vLLM.
"""

import inspect
from contextlib import contextmanager

DRAFTED = 64  # positions of draft nodes after those of the longest sequence (tree.MAX_NODES)


def fixed_ropes(module, max_positions):
    """What to set on a module's rotary embeddings: [(part, {attribute: value})], empty for ropes that depend on no length.

    max_positions: of the longest sequence, DRAFTED included.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = []
    for part in module.modules():
        if getattr(part, "rope_type", None) == "longrope" and hasattr(part, "original_inv_freq"):
            original = part.config.rope_parameters["original_max_position_embeddings"]
            length = original + (max_positions - DRAFTED > original)
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](part.config, part.inv_freq.device, seq_len=length)
            found.append((part, {"rope_type": "default", "inv_freq": frequencies}))
    return found


ABSENT = object()  # what an attribute that a part does not have was before


@contextmanager
def in_force(changes):
    """Inside this context the attributes have these values; afterwards those that they had."""
    before = [(part, {name: _own(part, name) for name in values}) for part, values in changes]
    try:
        for part, values in changes:
            for name, value in values.items():
                setattr(part, name, value)
        yield
    finally:
        for part, values in before:
            for name, value in values.items():
                if value is ABSENT:
                    vars(part).pop(name, None)  # it may not have come so far
                else:
                    setattr(part, name, value)


def _own(part, name):
    """A part's attribute; ABSENT if it has none, or if it is a method of its class."""
    if name not in vars(part) and inspect.isfunction(getattr(type(part), name, None)):
        return ABSENT
    return getattr(part, name, ABSENT)
