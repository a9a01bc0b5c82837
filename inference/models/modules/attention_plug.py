"""Our attention in the place that transformers leaves for it, while a decoder runs."""

import threading
from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from .expert_modules import register_experts
from .fixed_rope import in_force

NAME = "headstart"  # of our attention and our experts among transformers'
_running = threading.local()  # .calls: what runs in this thread, the innermost last


def _attention(module, query, key, value, attention_mask=None, **options):
    """Our attention in the form that transformers calls.  query [1, HQ, M, D], key and value [1, HK, M, D] -> [1, M, HQ, D]"""
    with _disable_current_modes():  # it is exact by itself
        return _running.calls[-1](module, query, key, value, attention_mask, options), None


def _register():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        register_experts(NAME)


@contextmanager
def attending(module, attend, changes=()):
    """Inside this context the module's attention is `attend`, and `changes` (fixed_rope.py) are in force; then all is as before."""
    _register()
    config, calls = module.config, _running.__dict__.setdefault("calls", [])
    # Without a token of padding no model looks for it among the rows.
    ours = {
        "_attn_implementation": NAME,
        "_experts_implementation": NAME,
        "pad_token_id": None,
        "output_router_logits": False,
    }
    calls.append(attend)
    try:
        with in_force([(config, ours), *changes]):
            yield
    finally:
        calls.pop()
