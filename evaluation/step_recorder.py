"""The time of every step that an engine makes, and the steady state among them: all requests decode, no prompt is computed."""

import itertools
import time

SETTLING = 3  # steps at either end of the steady state that are not counted


class NoSteadyState(ValueError):
    """The outputs are too short to show one."""


class StepRecorder:
    """Stands before an engine's `step` while `LLM.generate` runs, and notes after each step what the counters say."""

    def __init__(self, engine):
        self.engine, self.step, self.notes = engine, engine.step, []

    def __enter__(self):
        def recorded():
            advanced = self.step()
            metrics = self.engine.metrics
            note = (time.perf_counter(), metrics.num_decoded_tokens, metrics.num_prompt_tokens, len(advanced))
            self.notes.append(note)
            return advanced

        self.engine.step = recorded
        return self

    def __exit__(self, *_):
        del self.engine.step  # the class's own shows again

    def steady(self, batch):
        """(tokens, seconds, milliseconds of each step) of steps that gave tokens to all `batch` requests and computed no prompt.

        Raises NoSteadyState if there are too few of them.
        """
        *_, num_prompt_tokens, _ = self.notes[-1]
        kept = [note[:2] for note in self.notes if note[2:] == (num_prompt_tokens, batch)][SETTLING:-SETTLING]
        if len(kept) < 2:
            raise NoSteadyState(
                f"no steady state with {batch} requests: outputs ended before all prompts were computed; raise --new-tokens"
            )
        steps = [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(kept)]
        return kept[-1][1] - kept[0][1], kept[-1][0] - kept[0][0], steps
