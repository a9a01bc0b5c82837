"""Which graphs are captured, and when again. Capturing itself needs a GPU: tests/inference/engine/test_engine_gpu.py."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from headstart import LLM, SamplingParams
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.graphs import StepGraphs, ends_early, graph_sizes, known_sizes, prompt_sizes
from headstart.inference.engine.prompt_passes import KnownRows
from headstart.inference.engine.request import Request
from headstart.inference.engine.seats import SeatTable
from headstart.inference.engine.target_scores import CUT, NO_FILTERS
from headstart.inference.models.decoder import Decoder
from headstart.inference.speculation.adaptive import Adaptive, OneDepth, PerBatchSize
from headstart.inference.speculation.drafters.drafter import NoDrafter


class CountingGraphs(StepGraphs):
    """Counts captures without making them."""

    def __init__(self, seats, max_num_seqs=2):
        super().__init__(
            [SimpleNamespace(seats=seats, tree=SimpleNamespace(max_depth=0, num_nodes=1))], max_num_seqs, captured=False
        )
        self.captured, self.made = True, []

    def _capture(self, size, filtered, which, known):
        self.made.append((size, filtered))
        return SimpleNamespace(replay=lambda: None), None, len(self.made)


@pytest.mark.gpu
def test_nothing_is_collected_during_a_capture(monkeypatch):
    """Freeing the graphs of an engine that is no longer used would break the capture off."""
    collecting, forward = [], Decoder.forward

    def noted(self, *given):
        if torch.cuda.is_current_stream_capturing():
            collecting.append(gc.isenabled())
        return forward(self, *given)

    monkeypatch.setattr(Decoder, "forward", noted)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=None,
    )
    LLM(config, load_format="dummy", dtype="bfloat16", max_model_len=128, max_num_seqs=2)
    assert set(collecting) == {False}
    assert gc.isenabled()


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


def test_graphs_with_expected_filters_are_captured_at_the_start():
    graphs = CountingGraphs(SeatTable(2, 1, 8, 11, torch.float32, torch.device("cpu")))
    graphs.capture(filters=CUT)
    assert sorted(graphs.made) == [(1, NO_FILTERS), (1, CUT), (2, NO_FILTERS), (2, CUT)]
    assert graphs.mixed_filters == {NO_FILTERS, CUT}
    graphs.made.clear()
    graphs.run([graphs.step.seats.padding_seat], CUT)
    assert graphs.made == []


def test_the_parameters_of_the_models_generation_config_are_expected(random_target, monkeypatch):
    given, build = [], Engine.build.__func__
    monkeypatch.setattr(
        Engine,
        "build",
        classmethod(lambda cls, *args, **more: given.append(more["filters"]) or build(cls, *args, **more)),
    )
    for changes in (
        {},
        {"top_p": 0.9, "do_sample": True},
        {"top_k": 20, "repetition_penalty": 1.1, "do_sample": True},
        {"top_p": 2.0},
    ):
        config = GenerationConfig()
        config.update(**changes)
        monkeypatch.setattr(random_target, "generation_config", config)
        LLM(random_target)
    assert given == [NO_FILTERS, CUT, NO_FILTERS, NO_FILTERS]


def test_sizes_are_a_sixteenth_of_each_other_apart():
    assert graph_sizes(1) == [1]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    sizes = graph_sizes(256)
    assert sizes[-1] == 256
    assert all(b - a <= max(8, a // 4) for a, b in itertools.pairwise(sizes))
    assert len(sizes) < 24


def test_batch_rows_beside_known_tokens_are_a_half_apart():
    seats = SeatTable(256, 1, 8, 11, torch.float32, torch.device("cpu"))
    assert CountingGraphs(seats, 256)._sizes_beside(1) == [64, 96, 128, 192, 256]
    assert CountingGraphs(seats, 40)._sizes_beside(3) == [16, 24, 32, 40]
    assert CountingGraphs(seats, 1)._sizes_beside(70) == [1]


def test_known_tokens_and_the_rows_of_a_step_fill_tiles():
    assert known_sizes(0, 8192) == [64, 128, 256, 384, 512, 640, 768, 1024]
    assert known_sizes(16, 8192) == [48, 112, 240, 368, 496, 624, 752, 1008]
    assert known_sizes(64, 300) == [64, 192, 320], "the last one holds 300"
    for rows in (1, 5, 48, 96, 384, 4096, 16384):
        sizes = known_sizes(rows, 8192)
        assert sorted(set(sizes)) == sizes
        assert 16 <= sizes[0] <= sizes[-1] <= 1024
        assert all((rows + size) % 128 == 0 or rows + size == 64 for size in sizes)
        assert min(sizes) >= min(rows // 8, 1024), "a pass of a thousand rows does not grow by ten"


@pytest.mark.parametrize(("ranks", "is_packed", "is_host_slow"), [(1, True, False), (2, True, True), (1, False, True)])
def test_prompts_alone_have_larger_graphs_where_the_host_is_slower_than_the_device(ranks, is_packed, is_host_slow):
    decoder = SimpleNamespace(ranks=SimpleNamespace(size=ranks), is_packed=is_packed)
    assert prompt_sizes(decoder, 2048) == known_sizes(0, 2048) + [1536, 2048] * is_host_slow
    assert prompt_sizes(decoder, 1100)[8:] == [1152] * is_host_slow, "no larger than a pass, in whole tiles"
    assert prompt_sizes(decoder, 1024) == known_sizes(0, 1024)


def test_known_tokens_beside_running_requests_are_bounded_by_their_time():
    seats = SeatTable(64, 1, 8, 11, torch.float32, torch.device("cpu"))
    graphs = CountingGraphs(seats, 64)

    def running(count, committed=0, is_streamed=True, **asked):
        params, given = (
            SamplingParams(**asked),
            dict(committed=committed, output_token_ids=[1], is_streamed=is_streamed),
        )
        return [SimpleNamespace(params=params, **given)] * count

    def entering(known, computed=0, is_streamed=False):
        return SimpleNamespace(num_known=known, computed=computed, is_streamed=is_streamed)

    def budget(requests, *prompts):
        return graphs.known_budget(requests, prompts or [entering(4096)], OneDepth(0))

    assert budget(running(3)) is None
    held = [KnownRows(size, seats, NoDrafter()) for size in (64, 256, 1024)]
    graphs.mixed_sizes, graphs._known = {0: [16, 64]}, {(0, 0): held[1:], (16, 0): held, (64, 0): held}
    milliseconds = {
        (8, 0): 4,
        (64, 0): 7,
        (16, 64): 5,
        (16, 256): 10,
        (16, 1024): 22,
        (64, 64): 8,
        (64, 256): 11,
        (64, 1024): 14,
    }
    graphs._seconds = {(size, 0, known): value / 1e3 for (size, known), value in milliseconds.items()}
    assert budget(running(5)) == 64
    assert budget(running(64)) == 1024
    calm = running(5, is_streamed=False)
    assert budget(calm) == 1024, "nobody waits for the step"
    assert budget(running(4, is_streamed=False) + running(1)) == 64, "one does"
    assert budget(calm, entering(1024)) == 256, "the next steps take the rest"
    assert budget(calm, entering(1300, 300), entering(24)) == 256
    assert budget(calm, entering(1000), entering(28)) == 1024
    assert budget(calm, entering(1000), entering(1, is_streamed=True)) == 1024, "its first token is waited for"
    assert budget(running(5, is_streamed=False, top_p=0.9), entering(1024)) == 1024, (
        "a pass of their own reads the weights"
    )
    # 5 contexts of 100 tokens take 0.5 ms beside the 4 and the 10: 10.5 of 4.5 are fewer than 2.4 times.
    graphs._seconds_per_token = 1e-6
    assert budget(running(5, 100)) == 256
    assert budget(running(5, 10)) == 64
    # Known tokens that cannot ride along come after: 4 + 4 are fewer than 2.4 times 4, 4 + 8 are more.
    graphs._seconds[0, 0, 256], graphs._seconds[0, 0, 1024] = 4e-3, 8e-3
    assert budget(running(5, top_p=0.9)) == 256
    graphs.mixed_filters = {NO_FILTERS, CUT}
    assert budget(running(5, top_p=0.9)) == 64
    graphs._seconds[8, 0, 0] = 2e-3
    assert budget(running(5)) == 64, "prompts go on"

    def size_for(count, requests=0):
        return (known := graphs.known_rows(count, requests, 0)) and known.size

    assert [size_for(count, 5) for count in (1, 64, 65, 1024, 1025)] == [64, 64, 256, 1024, None]
    assert [size_for(count) for count in (1, 256, 257)] == [256, 256, 1024], "alone"


def test_beside_known_tokens_a_step_drafts_about_half_as_deep_and_no_deeper_than_without():
    seats = SeatTable(64, 1, 8, 11, torch.float32, torch.device("cpu"))

    def depths_beside(*depths):
        steps = [SimpleNamespace(tree=SimpleNamespace(max_depth=d, num_nodes=1 + d), seats=seats) for d in depths]
        graphs = StepGraphs(steps, 64)
        told = PerBatchSize(dict(enumerate(depths, 1)), depths[0])
        seconds = graphs.seconds_beside([], told)
        return {depth: depths[told.best_beside(which, seconds)] for which, depth in enumerate(depths, 1)}

    assert depths_beside(5, 3, 2, 1, 0) == {5: 2, 3: 2, 2: 2, 1: 0, 0: 0}
    assert depths_beside(5, 3, 0) == {5: 3, 3: 3, 0: 0}, "the nearest"
    assert depths_beside(5, 0) == {5: 5, 0: 0}, "a depth that was asked for is not left out"
    assert depths_beside(1, 0) == {1: 1, 0: 0}
    assert depths_beside(5) == {5: 5}, "nothing else was asked for"
    assert depths_beside(5, 4) == {5: 4, 4: 4}
    assert depths_beside(0) == {0: 0}


def test_what_a_step_adds_to_known_tokens_is_its_time_without_theirs():
    seats = SeatTable(64, 1, 8, 11, torch.float32, torch.device("cpu"))
    steps = [SimpleNamespace(tree=SimpleNamespace(max_depth=d, num_nodes=1 + d), seats=seats) for d in (2, 1, 0)]
    graphs = StepGraphs(steps, 64)
    assert graphs.mixed == [1, 2]
    plan = Adaptive([2, 1, 0], [64])
    assert graphs.seconds_beside([1] * 40, plan) == {1: 0.0, 2: 0.0}, "there are no graphs with known tokens"
    known = {size: KnownRows(size, seats, NoDrafter()) for size in (64, 256, 448, 512)}
    graphs._known = {(0, 2): [known[256], known[512]], (64, 1): [known[64], known[256]], (64, 2): [known[448]]}
    graphs.mixed_sizes = {1: [64], 2: [64]}
    milliseconds = {(0, 2, 256): 8, (0, 2, 512): 16, (64, 1, 64): 9, (64, 1, 256): 13, (64, 2, 448): 17}
    graphs._seconds = {key: value / 1e3 for key, value in milliseconds.items()}
    graphs._seconds_per_token = 1e-6
    found = graphs.seconds_beside([SimpleNamespace(committed=50)] * 40, plan)
    assert found == pytest.approx({1: 7e-3, 2: 5e-3})  # 13 - 8 + 2, and 17 - 16 * 448 / 512 + 2
    graphs._seconds |= {(40, 1, 0): 8e-3, (40, 2, 0): 6e-3}
    running = [SimpleNamespace(committed=0, params=SamplingParams(), output_token_ids=[1], is_streamed=True)] * 40
    assert graphs.known_budget(running, [], plan) == 256, (
        "13 ms are fewer than 2.4 times 8: the depth of 1 is not known yet"
    )
    plan.record(64, 2, None, [0] * 64)
    plan.record(64, 1, None, [0] * 64)
    assert graphs.known_budget(running, [], plan) == 448, (
        "it is not worth 7 ms for 5: 17 are more than 2.4 times 6, but no graph is smaller"
    )


def test_kept_scores_are_counted_for_every_graph():
    seats = SeatTable(64, 1, 8, 11, torch.float32, torch.device("cpu"))
    steps = [SimpleNamespace(tree=SimpleNamespace(max_depth=d, num_nodes=1 + d), seats=seats) for d in (4, 2, 0)]
    graphs = StepGraphs(steps, 64)
    assert graphs.mixed_sizes == {1: [16, 24, 32, 48, 64], 2: [64]}
    beside = 3 * sum(rows * len(known_sizes(3 * rows, 2048)) for rows in (16, 24, 32, 48, 64))
    beside += 64 * len(known_sizes(64, 2048))
    assert graphs.num_scores(2048) == sum(graphs.sizes) * (5 + 3 + 1) + beside


def test_known_tokens_stop_early_where_nobody_reads_what_leaves_the_last_layer():
    def early(keeps_keys=False, streams=(), **decoder):
        decoder = dict(is_packed=True, is_whole=True, layers=[None] * 4) | decoder
        return ends_early(SimpleNamespace(**decoder), SimpleNamespace(keeps_keys=keeps_keys, streams=streams))

    assert early()  # plain decoding, Medusa
    assert early(keeps_keys=True, streams=(0, 2, 3))  # EAGLE-3: what enters layers
    assert not early(keeps_keys=True)  # EAGLE: the last hidden states
    assert not early(keeps_keys=True, streams=(1, 4))  # a stream that leaves the last layer
    assert not early(is_packed=False)
    assert not early(is_whole=False)


def test_known_rows_hold_chunks_one_after_the_other_and_padding_on_page_0():
    seats = SeatTable(4, 3, 8, 11, torch.float32, torch.device("cpu"))
    known = KnownRows(256, seats, NoDrafter())
    requests = [SimpleNamespace(pages=[5, 2, 9], seat=3), SimpleNamespace(pages=[7], seat=0)]
    known.write([(requests[0], 62, [11, 12, 13, 14], 0), (requests[1], 0, [21, 22], 4)])
    tokens, positions, places, sources, of_seat, starts, counts, ends = known._split(known.numbers[0])
    assert tokens[:8].tolist() == [11, 12, 13, 14, 21, 22, 0, 0]
    assert positions[:8].tolist() == [62, 63, 64, 65, 0, 1, 0, 0]
    assert places[:8].tolist() == [5 * 64 + 62, 5 * 64 + 63, 2 * 64, 2 * 64 + 1, 7 * 64, 7 * 64 + 1, 0, 0]
    assert sources[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert not places[6:].any()
    assert (of_seat[:3].tolist(), starts[:3].tolist(), counts[:3].tolist()) == ([3, 0, 4], [62, 0, 0], [4, 2, 0])
    assert ends[:3].tolist() == known.ends[:3].tolist() == [3, 5, 0]
    known.write([(requests[1], 0, [23], 0)])
    assert tokens[:3].tolist() == [23, 0, 0], "no token of an earlier pass is left"
