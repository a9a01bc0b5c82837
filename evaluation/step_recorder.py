"""Record the time of every step of an engine, and find the steady state: steps in which all requests decode and no prompt runs."""

import itertools
import time
from collections import deque

from ..inference.line import Call

SETTLING = 3  # steps at either end of the steady state that are not counted


class NoSteadyState(ValueError):
    """The outputs are too short for a steady state."""


def record_steps(session, prompts, params, at_once=None):
    """Run prompts on a Session to their end.  -> StepRecord

    prompts: as LLM.generate takes them; params: SamplingParams of all, or a list of them, one per prompt; at_once: number of
    prompts, of one output each, that are in the engine at any time: when an output has ended, the next prompt is handed in, and
    somebody reads the tokens as they come. None: all are handed in at the start. Steps of other threads are not noted.
    """
    call, metrics = Call(is_stream=at_once is not None), session.engine.metrics
    each = params if isinstance(params, list) else [params] * len(prompts)
    try:
        checked = [session.check(*pair, number) for number, pair in enumerate(zip(prompts, each, strict=True))]
        num_outputs = sum(prompt.params.n for prompt in checked)
        record, waiting = StepRecord([]), deque(checked)

        def hand_in():
            while waiting and (at_once is None or len(record.submissions) - len(call.ended) < at_once):
                record.submissions.append(session.submit(waiting.popleft(), call=call))

        def note(advanced):
            if advanced is not None:
                record.notes.append(
                    (time.perf_counter(), metrics.num_decoded_tokens, metrics.num_prompt_tokens, len(advanced))
                )
            hand_in()
            return len(call.ended) == num_outputs

        hand_in()
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

    def split(self, filling, late):
        """Milliseconds of the steps over a full batch.  -> {"plain": [...], "admitting": [...], "launching": [...]}

        filling: the engine's num_prompt_tokens when the batch is full for the first time; late: Engine.steps_late. In a step the
        engine launches work, then hands back what was launched `late` steps before. admitting: that computed prompt tokens;
        launching: it did not, but what was launched does, and its launch may take longer than the step; plain: neither. After the
        last prompt the batch is no longer kept full, and no step counts.
        """
        counts = [note[2] for note in self.notes]
        launched = [True] + [after > before for before, after in itertools.pairwise(counts)]  # prompt tokens, by step
        full = sum(count < filling for count in counts)
        last = max(i for i, prompt in enumerate(launched) if prompt) + late
        steps = {"plain": [], "admitting": [], "launching": []}
        for i in range(full + 1 + late, min(last + 1, len(counts))):
            kind = "admitting" if launched[i - late] else "launching" if launched[i] else "plain"
            steps[kind].append((self.notes[i][0] - self.notes[i - 1][0]) * 1e3)
        return steps
