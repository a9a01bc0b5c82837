"""Record the time of every step of an engine, and find the steady state: steps in which all requests decode and no prompt runs."""

import itertools
import time

from ..inference.line import Call

SETTLING = 3  # steps at either end of the steady state that are not counted


class NoSteadyState(ValueError):
    """The outputs are too short for a steady state."""


def record_steps(session, prompts, params):
    """Run prompts on a Session to their end.  -> StepRecord

    prompts: as LLM.generate takes them; params: SamplingParams of all. Steps of other threads are not noted.
    """
    call, metrics = Call(), session.engine.metrics
    try:
        checked = [session.check(prompt, params, number) for number, prompt in enumerate(prompts)]
        record = StepRecord([session.submit(prompt, call=call) for prompt in checked])

        def note(advanced):
            if advanced is not None:
                record.notes.append(
                    (time.perf_counter(), metrics.num_decoded_tokens, metrics.num_prompt_tokens, len(advanced))
                )
            return len(call.ended) == num_outputs

        num_outputs = sum(len(submission.requests) for submission in record.submissions)
        session.drive(call, note)
    finally:
        session.leave(call)
    return record


class StepRecord:
    """The submissions, and after each step the time and the engine's counters."""

    def __init__(self, submissions):
        self.submissions, self.notes = submissions, []

    def steady(self, batch):
        """(tokens, seconds, milliseconds of each step) of steps that gave tokens to all `batch` requests and computed no prompt.

        Raises NoSteadyState if there are too few such steps.
        """
        *_, num_prompt_tokens, _ = self.notes[-1]
        kept = [note[:2] for note in self.notes if note[2:] == (num_prompt_tokens, batch)][SETTLING:-SETTLING]
        if len(kept) < 2:
            raise NoSteadyState(
                f"no steady state with {batch} requests: outputs ended before all prompts were computed; raise --new-tokens"
            )
        steps = [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(kept)]
        return kept[-1][1] - kept[0][1], kept[-1][0] - kept[0][0], steps
