"""Requests on an LLM that come one by one while others run, for callers that learn the next prompt from the last output.

    with OpenBatch(llm) as batch:
        batch.add("a prompt", SamplingParams(max_tokens=64), tag="first")
        while batch:
            for tag, output in batch.step():
                ...  # and perhaps batch.add(...)

What a request gives does not depend on when it came, or on its company. Not done here: waiting for prompts, threads.
"""

from .outputs import make_output


class OpenBatch:
    """The requests that its owner added and that have not ended; len() counts them. Leaving the block cancels them."""

    def __init__(self, llm):
        self.llm = llm
        self._open = {}  # Request: (tag, the prompt's text or None)

    def __len__(self):
        return len(self._open)

    def add(self, prompt, sampling_params, tag=None):
        """Hand in one prompt, as LLM.generate takes it. Raises ValueError for what LLM.generate refuses, and for n above 1."""
        if sampling_params.n != 1:
            raise ValueError(f"an open batch makes one output per prompt, got n={sampling_params.n}")
        text, ids, params = self.llm._check(prompt, sampling_params, 0)
        (request,) = self.llm._make_requests(text, ids, params)
        self.llm.engine.scheduler.add(request)
        self._open[request] = tag, text

    def step(self):
        """One step of the engine.  -> list of (tag, RequestOutput) of the requests that have ended

        No step where some ended in steps that other calls on the LLM made.
        """
        if not any(request.finished for request in self._open):
            self.llm.engine.step()
        ended = [request for request in self._open if request.finished]
        found = []
        for request in ended:
            tag, text = self._open.pop(request)
            found.append((tag, make_output(text, [request], self.llm.tokenizer, self.llm.eos_token_ids)))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.llm._cancel([list(self._open)])
        self._open.clear()
