"""A module without its weights, for its trial (module_trial.py): the same types, ties, adapters and replaced forwards.

It is copied from the module itself, not made from its config, so that what was done to the module since is tried, too.

Hooks are not copied: they may want contents (`.cpu()`), or note what they see, which must not be a trial. A part with hooks is a
border instead, in the trial and in every pass: what enters and leaves it is computed, whatever its hooks make of it, and nothing is
fused across it. A hook may look at values and change them, but not their shapes or dtypes.
"""

import copy
from collections import OrderedDict

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .deferred import computed

FIRST, LAST = "headstart, first", "headstart, last"  # among the keys of a part's hooks


def outline_of(module):
    """The module without weights: its parameters and buffers, and any other tensor that it holds, are on `meta`."""
    memo = {}
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _without_contents(tensor)
        for name, value in vars(part).items():
            if isinstance(value, dict) and "_hooks" in name:
                memo[id(value)] = OrderedDict()
    with _WithoutContents():
        memo |= _not_copied(module, memo)
        outline = copy.deepcopy(module, memo)
    for part in map(outline.get_submodule, hooked(module)):
        part.register_forward_pre_hook(_enters, with_kwargs=True)
        part.register_forward_hook(_leaves)
    return outline


def _without_contents(tensor):
    empty = torch.empty_like(tensor.detach(), device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class _WithoutContents(TorchFunctionMode):
    """Inside this context copies of tensors have no contents."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return _without_contents(args[0])
        return function(*args, **(kwargs or {}))


def _not_copied(module, memo):
    """What parts hold that cannot be copied, such as locks, streams and files: the outline shares it.  -> {id: value}"""
    parts, shared = {id(part): part for part in module.modules()}, {}
    tried = memo | parts  # each value by itself, not the parts that it refers to
    for part in parts.values():
        for value in vars(part).values():
            try:
                copy.deepcopy(value, tried)
            except Exception:  # of a class that we do not know
                shared[id(value)] = value
                tried = memo | parts | shared
    return shared


# --- parts with hooks ---


def hooked(module):
    """Names of the parts that have hooks, but for the library's own, which only look when it asks them to."""
    return [name for name, part in module.named_modules() if has_hooks(part)]


def has_hooks(part):
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)


def hook_changes(parts):
    """What to set on parts with hooks while they run (fixed_rope.in_force), so that nothing is fused across them.

    Values are computed before their hooks, which may want contents, and after them.
    """
    found = []
    for part in parts:
        enter = OrderedDict({FIRST: _enters}) | part._forward_pre_hooks | {LAST: _enters}
        leave = OrderedDict({FIRST: _leaves}) | part._forward_hooks | {LAST: _leaves}
        with_kwargs = OrderedDict(part._forward_pre_hooks_with_kwargs) | {FIRST: True, LAST: True}
        changes = dict(_forward_pre_hooks=enter, _forward_pre_hooks_with_kwargs=with_kwargs, _forward_hooks=leave)
        found.append((part, changes))
    return found


def _enters(part, args, kwargs):
    with _disable_current_modes():
        return computed(args), computed(kwargs)


def _leaves(part, args, output):
    with _disable_current_modes():
        return computed(output)
