"""Which graphs are captured, and when again. Capturing itself needs a GPU: tests/inference/engine/test_engine_gpu.py."""

from types import SimpleNamespace

import torch

from headstart import SamplingParams
from headstart.inference.engine.graphs import StepGraphs
from headstart.inference.engine.request import Request
from headstart.inference.engine.seats import SeatTable


class CountingGraphs(StepGraphs):
    """Counts captures without making them."""

    def __init__(self, seats):
        super().__init__([SimpleNamespace(seats=seats)], 2, captured=False)
        self.captured, self.made = True, []

    def _capture(self, size, filtered, which):
        self.made.append((size, filtered))
        return SimpleNamespace(replay=lambda: None), None, len(self.made)


def test_graphs_with_filters_are_captured_again_when_a_table_is_made(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    seats = SeatTable(2, 1, 8, 11, torch.float32, torch.device("cpu"))
    graphs = CountingGraphs(seats)
    graphs.capture()
    assert graphs.made == [(2, False), (1, False)]

    def write(**given):
        request = Request(0, [1, 2], SamplingParams(**given), 0, 0, 5, None)
        request.seat = 0
        seats.write_requests([request], [0], lambda _: {3})

    def run():
        graphs.made.clear()
        found = [graphs.run([seats.padding_seat], filtered) for filtered in (False, True, True)]
        assert found[1] == found[2]
        return list(graphs.made)

    assert run() == [(1, True)]
    assert run() == []
    write(temperature=0.5, top_k=3)
    assert run() == []
    for given in (dict(logit_bias={3: 1}), dict(presence_penalty=1), dict(min_tokens=1)):
        write(**given)
        assert run() == [(1, True)], given
        write(**given)
        assert run() == []
    assert len(waited) == 3
