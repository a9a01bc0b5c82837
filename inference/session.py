"""Session, the only driver of an engine: it turns prompts into requests, and their tokens into outputs.

    call = Call()
    submission = session.submit(prompt, params, call)
    session.drive(call, lambda advanced: call.ended)
    output = session.output(submission)                    # or: for text in session.subscribe(submission, call)

Any thread may call a session. The first in line (line.py) steps the engine until its own submissions have ended; those of other
callers advance in the same batch, and it tells them between steps. An output does not depend on when its request came, or on other
requests. Not done here: waiting for prompts, making threads.
"""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property

from .checked_prompt import CheckedPrompt, PromptChecker
from .engine.logprobs import TokenLogprobs
from .engine.request import Request
from .engine.stopping import GrowingText, StopChecker, final_text, forbidden_early, stable_length
from .frozen_heap import frozen_heap
from .grammar.grammars import Grammars
from .line import Call, Line
from .outputs import make_output


@dataclass(eq=False)
class Submission:
    """A prompt that was submitted: one Request per output. Compared by identity."""

    prompt: CheckedPrompt
    requests: list[Request] = field(default_factory=list)

    @property
    def finished(self):
        """Whether it has ended. Other threads than the driver ask their Call, which is told when a step is complete."""
        return all(request.finished for request in self.requests)


class Session:
    """engine: Engine; tokenizer: a transformers tokenizer or None; seed: requests without one derive theirs from it."""

    ranks = None  # the processes of other ranks, where there are some (inference/ranks)

    def __init__(self, engine, tokenizer, max_model_len, seed=0):
        self.engine, self.tokenizer, self.max_model_len, self.seed = engine, tokenizer, max_model_len, seed
        self.grammars = Grammars(tokenizer, engine.decoder.vocab_size, engine.eos_token_ids)
        self.line = Line()
        self._numbers = itertools.count()  # of prompts, in order of arrival
        self._calls = {}  # {request: the Call it belongs to} of requests whose call has not been told that they ended
        self._told = True  # False in a step, and after one that broke off before every call was told

    @cached_property
    def prompt_checker(self):
        """What `check` does, without the engine."""
        engine = self.engine
        return PromptChecker(
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=engine.decoder.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            max_logprobs=engine.options.max_logprobs,
            grammars=self.grammars,
        )

    def check(self, prompt, params=None, number=0):
        """The CheckedPrompt of one prompt, in any form that LLM.generate takes, or ValueError; number: its name in errors."""
        return self.prompt_checker.check(prompt, params, number)

    def submit(self, prompt, params=None, call=None, number=None):
        """Queue a prompt, or a CheckedPrompt.  -> Submission

        call: the Call that is told of its tokens; number: of the prompt, None for the next one. Raises ValueError for what `check`
        refuses, and for what the cache cannot hold.
        """
        if not isinstance(prompt, CheckedPrompt):
            prompt = self.check(prompt, params)
        number, call = next(self._numbers) if number is None else number, call or Call()
        submission = Submission(prompt, self.requests_of(prompt, number, call.is_stream))
        try:
            self._queue(submission, number, call)
        except BaseException:
            self.cancel(submission)
            raise
        return submission

    def requests_of(self, prompt, number, is_streamed):
        """The Requests of a CheckedPrompt, one per output, which no engine has yet.  number: of the prompt"""
        params, room, matchers = prompt.params, self.max_model_len - len(prompt.token_ids), self._matchers(prompt)
        return [
            Request(
                request_id=(number, sample),
                prompt_token_ids=prompt.token_ids,
                params=params,
                seed=_derive_seed(self.seed, number) if params.seed is None else params.seed,
                sample_index=sample,
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_checker=StopChecker(self.tokenizer, self.engine.eos_token_ids, params),
                logprobs=None if params.logprobs is None else TokenLogprobs(),
                # Once per prompt: its other outputs find the pages that this one computes.
                prompt_logprobs=TokenLogprobs() if params.prompt_logprobs is not None and sample == 0 else None,
                bad_words=prompt.bad_words,
                matcher=matchers[sample],
                cache_salt=prompt.cache_salt,
                is_streamed=is_streamed,
            )
            for sample in range(params.n)
        ]

    def submit_all(self, prompts, call):
        """Queue CheckedPrompts whose outputs are read together.  -> their Submissions, in the order of the prompts

        The last max_num_seqs prompts start with the longest outputs, so that the batch stays full for longer: of 256 requests for
        32 to 512 tokens in 64 seats, those left at the end are short. Earlier prompts keep their order: if all were sorted, the
        short ones would end together, and prompts enter in a crowd. Numbers, and with them seeds, follow the order of the prompts.
        """
        numbers, found = [next(self._numbers) for _ in prompts], [None] * len(prompts)
        order = list(range(len(prompts)))
        last = max(len(prompts) - self.engine.max_num_seqs, 0)
        order[last:] = sorted(order[last:], key=lambda i: -(prompts[i].params.max_tokens or self.max_model_len))
        for i in order:
            found[i] = self.submit(prompts[i], call=call, number=numbers[i])
        return found

    def drive(self, call, enough):
        """Step the engine, or wait for the thread that does, until enough(x).  -> as step, if the last step was this thread's

        enough is asked after every step of this thread, x: what `step` returns, and when there is news for the call, x: None.
        """
        # A stream comes back here for every piece of its text.
        with nullcontext() if call.is_stream else frozen_heap():
            return self.line.drive(call, self._step, enough)

    def step(self):
        """One step of the engine, once no other thread drives.  -> the requests, of all submissions, that were given tokens"""
        return self.line.drive(Call(), self._step, lambda advanced: advanced is not None)

    def subscribe(self, submission, call):
        """Yield the final text of a submission of one output, piece by piece, until it has ended.

        call: the one it was submitted with, a stream's. Between two pieces other threads drive.
        """
        (request,) = submission.requests
        shown, growing, known = 0, GrowingText(request.stop_checker), 0
        while not call.ended:
            if call.num_tokens == known:
                self.drive(call, lambda _, known=known: call.ended or call.num_tokens > known)
            if not call.ended:
                known = call.num_tokens  # of tokens after these it is not known yet whether they end the output
                now = growing.of(request.output_token_ids[:known])
                end = stable_length(now, submission.prompt.params.stop)
                if end > shown:
                    yield now[shown:end]
                    shown = end
        if rest := final_text(request)[shown:]:
            yield rest

    def cancel(self, submission):
        """Drop the requests of a submission that have not ended: now, or before the next step if another thread drives."""
        self.line.between_steps(lambda: self._drop(submission.requests))

    def leave(self, call):
        """Cancel all submissions of a call that have not ended."""
        self.line.between_steps(lambda: self._drop([one for one, its in list(self._calls.items()) if its is call]))

    def reset_prefix_cache(self):
        """Forget the cached prompts. False, and nothing happens, while requests run or another thread drives."""
        return bool(self.line.unless_driven(self._forget))

    def output(self, submission):
        """The RequestOutput of a submission that has ended."""
        requests, eos_token_ids = submission.requests, self.engine.eos_token_ids
        return make_output(submission.prompt.text, requests, self._text_of, eos_token_ids)

    def outputs(self, submissions):
        """The RequestOutputs of submissions that have ended. Of 64 with log-probabilities 100,000 objects are made."""
        with frozen_heap():
            return [self.output(submission) for submission in submissions]

    @cached_property
    def _text_of(self):
        """The text of one token, remembered, since outputs with log-probabilities ask for many; None without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else cache(lambda token: tokenizer.decode([token]))

    def _matchers(self, prompt):
        """The Matcher of each output of a CheckedPrompt, None for free text."""
        engine, params = self.engine, prompt.params
        if prompt.grammar is None:
            return [None] * params.n
        late = forbidden_early(params, engine.eos_token_ids, engine.decoder.vocab_size)
        return self.grammars.matchers(
            prompt.grammar,
            params.n,
            engine.seats.logit_state.most_host_drafts,
            prompt_token_ids=prompt.token_ids,
            min_tokens=params.min_tokens,
            late=late,
        )

    def _step(self):
        """One step of the engine, for the first in line. Tells every call what has become of its requests."""
        if not self._told:
            self.engine.recover()
            self._tell(list(self._calls))
        self._told = False
        advanced = self._advance()
        self._tell(advanced)
        self._told = True
        return advanced

    def _queue(self, submission, number, call):
        """Queue the requests of a submission, which belong to a call."""
        for request in submission.requests:
            self._calls[request] = call
            self.engine.add(request)  # it joins the end of a queue, which any thread may do

    def _advance(self):
        """One step of the engine.  -> the requests that were given tokens"""
        return self.engine.step()

    def _forget(self):
        """Forget the cached prompts, if no request holds pages.  -> whether it was done"""
        return self.engine.reset_prefix_cache()

    def _tell(self, requests):
        """Tell their calls that requests have ended, or, where the call is a stream, have been given tokens. Twice does no harm."""
        for request in requests:
            call = self._calls.get(request)
            if call is None:
                continue
            if request.finished:
                call.ended.add(request)
                self._calls.pop(request, None)
            elif not call.is_stream:
                continue
            call.num_tokens = len(request.output_token_ids)
            call.ring()

    def _drop(self, requests):
        """Cancel requests; for the first in line."""
        for request in requests:
            self.engine.cancel(request)
            self._calls.pop(request, None)


def _derive_seed(seed, number):
    """A 63-bit seed for request `number` of a session seeded with `seed` (splitmix64's finaliser over both)."""
    x = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
