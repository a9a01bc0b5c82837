"""Compile grammars where nothing else can be harmed; the program that trial.py runs. No torch.

Lines of JSON on standard input: first a tokenizer [text, vocab_size, eos_token_ids], then grammars, as arguments of make_grammar.
For each line one on standard output: {"grammar": the fields of a Grammar}, or {"error": what is wrong}. A grammar that takes too
much kills it.
"""

import ctypes
import json
import resource
import sys
import threading
from functools import partial
from pathlib import Path

from .library import Grammar, compile_grammar, make_grammar, make_tokenizer, one_line
from .matcher import Matcher

CPU_SECONDS = 2  # of one grammar
MEMORY = 512 * 2**20  # bytes beyond those of the tokenizer, address space
MOST_DRAFTS = 64  # more than an engine drafts
STACK = 2**20  # bytes: the caller compiles on a stack of at least twice as many


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo returns.  hblkhd: bytes in blocks of their own; uordblks: in others"""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_uint) for name in _names.split()]


def main():
    _limit(resource.RLIMIT_CORE, 0)  # what kills it is no error to look into, and memory on disk would fill it
    tokenizer = make_tokenizer(*json.loads(sys.stdin.readline()))
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, taken + MEMORY)
    print("{}", flush=True)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1)
        try:
            told = {"grammar": _try(tokenizer, json.loads(line))}
        except Exception as error:  # of the library, whatever its kind
            told = {"error": one_line(str(error))}
        print(json.dumps(told), flush=True)


def _try(tokenizer, asked):
    """Compile a grammar and compute its first masks.  asked: arguments of make_grammar  ->  Grammar"""
    text, before = make_grammar(*asked), _allocated()
    alone = partial(compile_grammar, tokenizer, text)
    first = Matcher(compile_grammar(tokenizer, text, shared=True), MOST_DRAFTS, alone)
    if first.look_ahead():
        raise ValueError(first.error)
    num_bytes = max((_allocated() - before + 2**31) % 2**32 - 2**31, 0)  # what was freed meanwhile may be more
    eos = sum(1 << token for token in set(tokenizer.eos_tokens))
    if not int.from_bytes(first.masks[0].tobytes(), "little") & ~eos:
        raise ValueError("only the empty text has this form")
    return Grammar(text, num_bytes)


def _allocated():
    """Bytes that glibc's malloc, which the library uses, has handed out, modulo 2**32; with another C library always 0."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.hblkhd + found.uordblks


def _limit(kind, value):
    """Limit this process, and no further than it may be: the user may have limited it before."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=main)
    thread.start()
