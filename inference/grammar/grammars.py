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

from .library import compile_grammar, make_tokenizer
from .matcher import Matcher
from .trial import Trial

MOST_KEPT = 64  # grammars, and answers of trials


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
        """The library's text of StructuredOutputsParams that it can follow. ValueError in one line."""
        found = self._kept(self._tried, params)
        if found is None:
            with self._lock:
                self._trial = self._trial or Trial(*self._tokenizer_parts())
            try:
                found = self._trial(params), None
            except ValueError as error:
                found = None, str(error)
            self._keep(self._tried, params, found)
        grammar, error = found
        if error is not None:
            raise ValueError(error)
        return grammar

    def compile(self, grammar):
        """The LLMatcher of a grammar that `check` has returned, to be copied. It is kept for a while. ValueError if too large."""
        compiled = self._kept(self._compiled, grammar)
        if compiled is None:
            with self._compiling:
                if self._library_tokenizer is None:
                    self._library_tokenizer = make_tokenizer(*self._tokenizer_parts())
            compiled = compile_grammar(self._library_tokenizer, grammar)
            self._keep(self._compiled, grammar, compiled)
        return compiled

    def matcher(self, grammar, most_drafts):
        """A Matcher at the start of a grammar that `check` has returned."""
        compiled = self.compile(grammar)
        return Matcher(compiled, most_drafts, alone=partial(self._replace, grammar, compiled))

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

    def _replace(self, grammar, broken):
        """The grammar compiled anew, for one output. The compiled one that broke is kept no longer."""
        with self._lock:
            if self._compiled.get(grammar) is broken:
                del self._compiled[grammar]
        return compile_grammar(self._library_tokenizer, grammar)

    def _kept(self, kept, key):
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
            return kept.get(key)

    def _keep(self, kept, key, value):
        with self._lock:
            kept[key] = value
            while len(kept) > MOST_KEPT:
                kept.popitem(last=False)
