"""Grammars: checked, compiled and kept for one model's tokenizer. No torch.

grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
grammar = grammars.check(params)                    # ValueError; any thread, may take seconds
grammars.compile(grammar)                           # any thread, may take seconds; else the first matcher does
matcher = grammars.matcher(grammar, most_drafts=4)  # at its start; one per output
"""

import copy
import threading
from collections import OrderedDict
from functools import partial

from .library import GROWTH, compile_grammar, make_tokenizer
from .matcher import Matcher
from .trial import Trial

MOST_ANSWERS = 64  # of trials
MOST_BYTES = 2**30  # of all compiled grammars that are kept, however their lexers grow: some 60 small ones
MOST_BYTES_OF_ONE = 2**27  # of a compiled grammar


class Grammars:
    """tokenizer: a fast tokenizer of transformers, or None; vocab_size: number of the model's logits; eos_token_ids: the engine's.

    Nothing is loaded or started before the first grammar.
    """

    def __init__(self, tokenizer, vocab_size, eos_token_ids):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._trial = self._library_tokenizer = None
        self._tried, self._compiled = OrderedDict(), OrderedDict()  # the newest last

    def check(self, params):
        """The Grammar of StructuredOutputsParams. ValueError in one line if the library cannot follow it."""
        found = self._kept(self._tried, params)
        if found is None:
            with self._lock:
                self._trial = self._trial or Trial(*self._tokenizer_parts())
            try:
                found = self._small_enough(self._trial(params), params.kind), None
            except ValueError as error:
                found = None, str(error)
            with self._lock:
                self._tried[params] = found
                while len(self._tried) > MOST_ANSWERS:
                    self._tried.popitem(last=False)
        grammar, error = found
        if error is not None:
            raise ValueError(error)
        return grammar

    def compile(self, grammar):
        """The LLMatcher of a Grammar, to be copied. It is kept for a while. ValueError if too large."""
        kept = self._kept(self._compiled, grammar.text)
        if kept is None:
            with self._compiling:
                if self._library_tokenizer is None:
                    self._library_tokenizer = make_tokenizer(*self._tokenizer_parts())
            kept = compile_grammar(self._library_tokenizer, grammar.text, shared=True), grammar.num_bytes + GROWTH
            with self._lock:
                self._compiled[grammar.text] = kept
                while sum(num_bytes for _, num_bytes in self._compiled.values()) > MOST_BYTES:
                    self._compiled.popitem(last=False)
        return kept[0]

    def matcher(self, grammar, most_drafts, **others):
        """A Matcher at the start of a Grammar.  others: further arguments of Matcher"""
        compiled = self.compile(grammar)
        return Matcher(compiled, most_drafts, partial(self._compile_alone, grammar.text, compiled), **others)

    def close(self):
        """End the process that tries grammars; the next grammar starts another."""
        if self._trial is not None:
            self._trial.close()

    def _tokenizer_parts(self):
        """tokenizer.json, the size of the vocabulary, EOS ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("structured outputs need a fast tokenizer (tokenizer.json): pass tokenizer=...")
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str(), max(self._vocab_size, backend.get_vocab_size()), self._eos

    def _small_enough(self, grammar, kind):
        if grammar.num_bytes > MOST_BYTES_OF_ONE:
            size, most = grammar.num_bytes / 2**20, MOST_BYTES_OF_ONE >> 20
            raise ValueError(
                f"structured_outputs {kind} takes {size:.0f} MiB of memory once compiled; at most {most} are given: make it simpler"
            )
        return grammar

    def _compile_alone(self, text, broken):
        """A grammar's text compiled for one output. The compiled one that broke is kept no longer."""
        with self._lock:
            if self._compiled.get(text, (None,))[0] is broken:
                del self._compiled[text]
        return compile_grammar(self._library_tokenizer, text)

    def _kept(self, kept, key):
        """The value of a key that is kept, and is now the newest, or None."""
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
            return kept.get(key)
