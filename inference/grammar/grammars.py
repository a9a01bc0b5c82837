"""Grammars: checked, compiled and kept for one model's tokenizer. No torch.

grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
grammar = grammars.check(params)                    # ValueError; any thread, may take seconds
compiled = grammars.compile(grammar)                # any thread, may take seconds; else `matchers` does
matchers = grammars.matchers(grammar, 3, most_drafts=4)  # at its start; one per output of a prompt
"""

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakValueDictionary

from .library import compile_grammar, make_tokenizer
from .matcher import Matcher
from .prompt_lookup import PromptLookup
from .trial import Trial

MOST_ANSWERS = 64  # of trials
MOST_BYTES = 2**30  # of all compiled grammars that are used or kept, however their lexers grow: some 60 small ones
MOST_BYTES_OF_ONE = 2**27  # of a compiled grammar


def fit(grammars):
    """Whether Grammars, in use at once, keep to MOST_BYTES. Nothing here refuses more: who uses them asks."""
    return sum({grammar.text: grammar.most_bytes for grammar in grammars}.values()) <= MOST_BYTES


@dataclass(eq=False)
class CompiledGrammar:
    """In use as long as something refers to it."""

    matcher: object  # an LLMatcher at the start, to be copied
    most_bytes: int


class Grammars:
    """tokenizer: a fast tokenizer of transformers, or None; vocab_size: number of the model's logits; eos_token_ids: the engine's.

    Nothing is loaded or started before the first grammar.
    """

    def __init__(self, tokenizer, vocab_size, eos_token_ids):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._trial = self._library_tokenizer = None
        self._tried, self._compiled = OrderedDict(), OrderedDict()  # kept ones, the newest last
        self._alive = WeakValueDictionary()  # {text: CompiledGrammar} of all that are used or kept

    def check(self, params):
        """The Grammar of StructuredOutputsParams. ValueError in one line if the library cannot follow it."""
        with self._lock:
            found = self._tried.get(params)
            if found is not None:
                self._tried.move_to_end(params)
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
        """The CompiledGrammar of a Grammar. It is kept for a while after its last use. ValueError if too large."""
        with self._lock:
            found = self._alive.get(grammar.text)
        if found is None:
            with self._compiling:
                if self._library_tokenizer is None:
                    self._library_tokenizer = make_tokenizer(*self._tokenizer_parts())
            matcher = compile_grammar(self._library_tokenizer, grammar.text, shared=True)
            found = CompiledGrammar(matcher, grammar.most_bytes)
        with self._lock:
            found = self._alive.setdefault(grammar.text, found)
            self._compiled[grammar.text] = found
            self._compiled.move_to_end(grammar.text)
            while self._compiled and sum(one.most_bytes for one in self._alive.values()) > MOST_BYTES:
                self._compiled.popitem(last=False)
        return found

    def matchers(self, grammar, number, most_drafts, prompt_token_ids=(), **others):
        """Matchers at the start of a Grammar, for so many outputs of a prompt.  others: further arguments of Matcher"""
        compiled = self.compile(grammar)
        # It also keeps the CompiledGrammar alive for as long as a Matcher uses it.
        alone = partial(self._compile_alone, grammar.text, compiled)
        others["prompt_lookup"] = cache(partial(PromptLookup, prompt_token_ids))  # one for all of them
        return [Matcher(compiled.matcher, most_drafts, alone, **others) for _ in range(number)]

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
            for found in (self._compiled, self._alive):
                if found.get(text) is broken:
                    del found[text]
        return compile_grammar(self._library_tokenizer, text)
