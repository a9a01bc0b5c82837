"""Triton's interpreter patches triton.language once for a process: at every launch and call that is most of its time."""

import inspect

import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """In place of what would take the patches back at the end of a launch."""

    @staticmethod
    def restore():
        pass


def install():
    """For the whole process: nothing else may use triton.language in it."""
    patch_language, patched = interpreter._patch_lang, set()

    def patch_unless_patched(function):
        seen = frozenset(
            id(one) for one in function.__globals__.values() if inspect.ismodule(one) and one in (tl, tl.core)
        )
        if seen not in patched:
            patched.add(seen)
            patch_language(function)
        return _Kept

    interpreter._patch_lang = patch_unless_patched
