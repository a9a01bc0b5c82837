"""Benchmarks of the engine and its parts on random weights, on the CPU: what they print, write and count for steps, drafts, whole
runs and a peer, and their baselines. No figure is judged."""

import json

import pytest
import torch
from transformers import MixtralConfig, OPTConfig

from headstart.benchmarks import floor, library, random_heads
from headstart.benchmarks.engine import engine
from headstart.benchmarks.engine.draft import parallel_chains
from headstart.benchmarks.engine.engine import EngineSettings, ways_of_drafting
from headstart.benchmarks.shape import best_tree, config_of_shape, random_decoder
from headstart.cli import main
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.speculation.adaptive import Adaptive
from headstart.inference.speculation.drafters.levels import Levels
from headstart.inference.speculation.tree import ROOT_ONLY, chain
from headstart.inference.speculation.tree_on_device import TreeOnDevice
from headstart.tests.benchmarks.small_bench import CPU, check_times


def test_step_prints_a_line_per_size_and_the_parts_of_the_largest_tree(bench, tmp_path):
    output = tmp_path / "step.json"
    lines, found = bench(
        "step", "--rows", "1,6", "--context", "70", "--batch", "1,3", "--repeats", "3", "--baseline", "eager",
        "--output", str(output),
    )  # fmt: skip
    forwards = [row for row in found["rows"] if row["part"] == "forward"]
    assert [(row["batch"], row["rows"]) for row in forwards] == [(1, 1), (1, 6), (3, 1), (3, 6)]
    parts = [row["part"] for row in found["rows"] if (row["batch"], row["rows"]) == (3, 6)]
    assert parts == [
        "forward", "draft, own", "verify", "commit", "whole step, own", "draft, shared", "whole step, shared",
    ]  # fmt: skip
    for row in found["rows"]:
        check_times(row)
    for row in forwards:
        assert row["library"] > 0
        assert row["over_floor"] == pytest.approx(row["p50"] / row["floor"], rel=1e-3)
        assert sum(row["shares"].values()) == pytest.approx(1, abs=0.05)
    assert found["facts"]["weight_bytes"] > 0
    for key in ("date", "hardware", "versions", "commit", "command"):
        assert key in found
    assert json.loads(output.read_text()) == found
    table = [line for line in lines if line.split()[:3] == ["70", "3", "6"]]
    assert len(table) == len(parts)


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(
            vocab_size=128,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        MixtralConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=6,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_step_and_engine_measure_models_that_run_as_their_own_modules(config, tmp_path, capsys):
    config.bos_token_id = config.eos_token_id = None
    config.save_pretrained(tmp_path)
    common = ["--batch", "1", "--model", str(tmp_path / "config.json"), *CPU]
    assert main(["bench", "step", "--rows", "1,6", "--context", "70", "--repeats", "3", *common]) == 0
    said, found = capsys.readouterr().out, None
    assert "no baseline: the library's step is written for models that run on kernels of their own" in said
    found = json.loads(said.strip().splitlines()[-1])
    assert [row["part"] for row in found["rows"]][:3] == ["forward", "forward", "draft, own"]
    assert main(["bench", "engine", "--prompt-tokens", "20", "--new-tokens", "40", "--no-startup", *common]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert {row["draft"] for row in rows} == {"plain", "medusa chain, own"}
    assert all(row["library"] is None and row["over_floor"] > 1 for row in rows)


def test_floor_of_a_mixture_reads_as_many_experts_as_its_rows_may_choose():
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=6, num_experts_per_tok=2)
    decoder = ModuleDecoder.from_pretrained(
        None, config, dtype=torch.float32, device="cpu", max_positions=128, load_format="dummy"
    )
    expert = 3 * 32 * 48
    rest = 2 * (4 * 32 * 32 + 6 * 32 + 2 * 32) + 32 + 128 * 32
    for rows, chosen in ((1, 2), (2, 4), (3, 6), (100, 6)):
        assert floor.weight_bytes(decoder, rows) == 4 * (rest + 2 * chosen * expert)
    few = floor.StepFloor(decoder, 1e12, 1.0).of(2, 6, 30)
    assert few["floor_products"] == pytest.approx(2 * 6 * (rest + 2 * 2 * expert)), (
        "each row multiplies with two experts"
    )


def test_step_leaves_out_what_does_not_fit_with_a_note(bench, monkeypatch):
    monkeypatch.setattr("headstart.benchmarks.engine.step.plannable_bytes", lambda device: 100_000)
    lines, found = bench("step", "--rows", "1", "--context", "64,400", "--batch", "1", "--baseline", "none")
    assert any("context 400, batch 1: left out" in line for line in lines)
    assert [row["context"] for row in found["rows"]] == [64]


def test_floor_counts_every_weight_and_every_key_once(shape):
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    hidden, inter, vocab, heads, kv_heads, dim = 32, 48, 128, 4, 2, 8
    layer = (heads + 2 * kv_heads) * dim * hidden + heads * dim * hidden + 3 * hidden * inter + 2 * hidden
    assert floor.weight_bytes(decoder) == 4 * (2 * layer + hidden + vocab * hidden)
    assert floor.kv_bytes(decoder, 3, 10) == 3 * 10 * 2 * 2 * kv_heads * dim * 4


def test_a_head_drafts_in_each_way_that_is_asked_for():
    ways = dict(ways_of_drafting(EngineSettings("", adaptive=True, draft_quantization="fp8")))
    assert ways == {
        "": {},
        ", fp8": {"quantization": "fp8"},
        ", adaptive": {"adaptive": True},
        ", adaptive, fp8": {"quantization": "fp8", "adaptive": True},
    }
    assert ways_of_drafting(EngineSettings("")) == [("", {})]


def test_floor_of_steps_takes_products_or_bytes_whichever_take_longer(shape):
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    head = random_heads.empty_head("medusa", config_of_shape(shape), 3)
    weights, parts = floor.weight_bytes(decoder), head.draft_bytes(decoder.lm_head.nbytes)
    few = floor.StepFloor(decoder, 1e6, 1e12).of(2, 6, 30, head, 3)
    assert few["floor_products"] == pytest.approx(2 * weights / 1e6)
    assert few["floor_keys"] == pytest.approx(floor.kv_bytes(decoder, 3, 10) / 1e6)
    assert few["floor_drafts"] == pytest.approx(2 * sum(parts.values()) / 1e6), "Medusa has no level of its own"
    saved = floor.StepFloor(decoder, 1e6, 1e12).of(2, 6, 30, head, 3, {"first": 1000})
    assert few["floor_drafts"] - saved["floor_drafts"] == pytest.approx(2 * 1000 / 1e6)
    many = floor.StepFloor(decoder, 1e6, 1e6).of(2, 6, 30)
    assert many["floor_products"] == pytest.approx(max(2 * weights, 2 * 6 * weights / 4) / 1e6)
    assert many["floor_drafts"] == 0


@pytest.mark.parametrize("tree", [ROOT_ONLY, chain(3), best_tree(9)], ids=["root", "chain", "tree"])
def test_baseline_computes_what_the_engine_computes(shape, tree):
    """Greedy tokens of the baseline over dense keys equal those of the engine's pass over the same keys in pages."""
    from headstart.benchmarks.engine.step import StandingRequests, pages_needed
    from headstart.inference.engine.cache import PagedCache
    from headstart.inference.speculation.drafters.drafter import NoDrafter
    from headstart.inference.speculation.verifiers import Strict

    torch.manual_seed(0)
    batch, context = 2, 70
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    nodes, hk, dim = tree.num_nodes, decoder.num_kv_heads, decoder.head_dim
    cache = PagedCache(pages_needed(batch, context, nodes), 2, hk, dim, torch.float32, torch.device("cpu"))
    cache.kv.normal_()
    standing = StandingRequests(decoder, cache, batch, context, tree, Strict(), NoDrafter())
    keys = torch.zeros(2 * 2 * batch * hk * (context + nodes) * dim)
    step = library.LibraryStep(decoder, batch, context, TreeOnDevice.of(tree, "cpu"), keys, "eager")
    step.tokens = standing.tokens
    pages = cache.kv.view(2, 2, -1, hk, 64, dim)[:, :, standing.seats.block_table[:batch].long()]
    pages = pages.movedim(4, 3).reshape(2, 2, batch, hk, -1, dim)  # [layers, 2, B, HK, positions, D]
    step.kv[..., :context, :] = pages[..., :context, :]
    with torch.no_grad():
        assert torch.equal(standing.forward().view(batch, nodes), step())


def test_engine_accepts_at_the_asked_rates_and_shows_plain_decoding_beside(bench):
    _, found = bench(
        "engine", "--acceptance", "2.0", "--batch", "1,2", "--prompt-tokens", "20", "--new-tokens", "60", "--no-startup"
    )  # fmt: skip
    assert [(row["draft"], row["batch"]) for row in found["rows"]] == [
        ("plain", 1), ("plain", 2), ("medusa chain, own", 1), ("medusa chain, own", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        check_times(row)
        assert row["tokens_per_second"] > 0
        assert row["of_graph"] > 0
        assert row["library"] > 0
        assert row["over_floor"] == pytest.approx(row["mean"] / row["floor"], rel=1e-3)
        with_library = row["floor"] - row["floor_products"] + row["library"]
        assert row["over_library"] == pytest.approx(row["mean"] / with_library, rel=1e-3)
        assert row["floor"] == pytest.approx(
            sum(row[f"floor_{part}"] for part in ("products", "keys", "drafts")), rel=1e-3
        )
    assert found["rows"][2]["floor_products"] >= found["rows"][0]["floor_products"]
    assert found["rows"][2]["floor_drafts"] > found["rows"][0]["floor_drafts"] == 0
    assert found["rows"][0]["tokens_per_step"] == 1
    assert found["rows"][3]["tokens_per_step"] == pytest.approx(2.0, abs=0.5)
    assert found["facts"]["first_token_ms"]["p50"] > 0


@pytest.mark.parametrize("head", ["mlp_speculator", "eagle", "eagle3", "block"])
def test_engine_takes_a_head_of_every_method_and_as_deep_as_asked(bench, head, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    _, found = bench(
        "engine", "--head", head, "--num-speculative-tokens", "5", "--acceptance", "5.5", "--batch", "2",
        "--prompt-tokens", "20", "--new-tokens", "60", "--no-startup",
    )  # fmt: skip
    assert [row["draft"] for row in found["rows"]] == ["plain", f"{head} chain"]
    assert found["rows"][1]["nodes"] == 6
    assert found["rows"][1]["tokens_per_step"] == pytest.approx(5.5, abs=0.5)  # more than drafts of depth 4 can reach
    assert found["settings"]["head"] == head


@pytest.mark.parametrize(("level", "deep"), [(0.0, True), (10.0, False)])
def test_engine_chooses_its_own_depths_when_asked(bench, monkeypatch, level, deep):
    """level: what a level of drafts costs, in plain steps"""
    record = Adaptive.record

    def at_this_cost(plan, num_requests, place, seconds, *given):
        record(plan, num_requests, place, seconds and 1 + level * plan.depths[place], *given)

    monkeypatch.setattr(Adaptive, "record", at_this_cost)
    _, found = bench(
        "engine", "--head", "mlp_speculator", "--acceptance", "2.0", "--batch", "1", "--adaptive",
        "--prompt-tokens", "20", "--new-tokens", "60", "--no-startup",
    )  # fmt: skip
    plain, whole, chosen = found["rows"]
    assert [row["draft"] for row in found["rows"]] == [
        "plain",
        "mlp_speculator chain",
        "mlp_speculator chain, adaptive",
    ]
    assert (plain["depth"], whole["depth"]) == (0, 4)
    assert chosen["depth"] > 3.5 if deep else chosen["depth"] < 0.5
    assert chosen["tokens_per_step"] > 1.5 if deep else chosen["tokens_per_step"] < 1.5
    assert chosen["graph"] is None
    check_times(chosen)


def test_draft_prints_the_parts_that_a_head_has(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    output = tmp_path / "draft.json"
    lines, found = bench(
        "draft", "--batch", "1,2", "--depth", "3", "--context", "70", "--repeats", "1", "--output", str(output)
    )  # fmt: skip
    sequential = ["first level", "level", "chain of 3"]
    with_keys = [*sequential[:2], "after a step", *sequential[2:]]
    expected = dict.fromkeys(("block", "eagle3", "eagle"), with_keys)
    expected |= {"mlp_speculator": sequential, "medusa": sequential[2:]}
    assert [(row["head"], row["batch"], row["part"]) for row in found["rows"]] == [
        (head, batch, part) for head, parts in expected.items() for batch in (1, 2) for part in parts
    ]
    for row in found["rows"]:
        assert row["p20"] <= row["p50"] <= row["p80"]
        assert row["over_floor"] == pytest.approx(row["p50"] / row["floor"], rel=1e-3)
    assert json.loads(output.read_text()) == found
    assert sum(line.split()[:3] == ["eagle3", "2", "level"] for line in lines) == 1


def test_draft_shows_what_building_a_dynamic_tree_takes(bench):
    _, found = bench(
        "draft", "--head", "mlp_speculator", "--batch", "2", "--depth", "2", "--context", "9", "--repeats", "1",
        "--tree", "dynamic",
    )  # fmt: skip
    static, grown, building = found["rows"][3:]
    assert [row["part"] for row in found["rows"][3:]] == ["levels of 8 rows", "dynamic tree", "tree building"]
    assert building["p50"] == pytest.approx(grown["p50"] - static["p50"], rel=1e-2, abs=1e-3)
    assert building["floor"] is None


def test_a_level_is_what_the_chain_takes_beyond_the_first(bench):
    _, found = bench(
        "draft", "--head", "mlp_speculator", "--batch", "1", "--depth", "4", "--repeats", "2", "--context", "9"
    )
    first, level, chain_of_4 = (row["p50"] for row in found["rows"])
    assert first + 3 * level == pytest.approx(chain_of_4, rel=1e-3)


def test_draft_floor_counts_every_weight_of_a_part_once(shape, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    config, decoder = config_of_shape(shape), random_decoder(shape, "cpu", torch.float32, 128)
    hidden, inter, vocab = 32, 48, 128
    rest = (4 * 8) * hidden + 3 * hidden * inter + hidden  # output product, MLP, the norm before it
    qkv = (4 + 2 * 2) * 8 * hidden
    block = hidden * hidden + hidden
    expected = {
        "eagle3": {
            "first": hidden + 40 * hidden,
            "level": 2 * qkv + rest + 2 * hidden + hidden + 40 * hidden,
            "advance": 3 * hidden * hidden + 2 * qkv + rest + 2 * hidden,
        },
        "eagle": {
            "first": vocab * hidden,
            "level": 2 * hidden * hidden + qkv + rest + vocab * hidden,
            "advance": 2 * hidden * hidden + qkv + rest,
        },
        "mlp_speculator": dict.fromkeys(("first", "level"), hidden * hidden + 2 * hidden + vocab * hidden),
        "medusa": {"first": 3 * (block + vocab * hidden)},
        "block": {
            "first": 2 * (qkv + rest + hidden + 2 * 8) + hidden + vocab * hidden + vocab * 256,
            "level": vocab * 256,
            "advance": 2 * hidden * hidden + 2 * 2 * 2 * 8 * hidden,
        },
    }
    # Of one layer the levels but the first and the pass after the step; of two layers one pass.
    keys = {"eagle": 3, "eagle3": 3, "block": 2}
    for method, parts in expected.items():
        head = random_heads.random_head(method, config, decoder, 3)
        assert head.draft_bytes(decoder.lm_head.nbytes) == {part: 4 * count for part, count in parts.items()}, method
        assert head.draft_key_bytes(3) == 4 * keys.get(method, 0) * 2 * 2 * 8, method


@pytest.mark.parametrize(
    ("layers", "read"), [(36, (2, 10, 18, 26, 34)), (8, (2, 3, 4, 5, 6)), (7, (0, 1, 2, 3, 4)), (2, (0, 1))]
)
def test_a_block_drafter_reads_the_layers_that_published_ones_read(layers, read):
    assert random_heads.block_aux_layers(layers) == read


def test_a_random_eagle3_head_drafts_tokens_spread_over_the_vocabulary(shape, monkeypatch):
    monkeypatch.setattr(random_heads, "DRAFT_VOCABULARY", 40)
    decoder = random_decoder(shape, "cpu", torch.float32, 128)
    head = random_heads.random_head("eagle3", config_of_shape(shape), decoder, 3)
    ids = head.draft_token_ids.tolist()
    assert len(set(ids)) == 40
    assert (min(ids), max(ids) // 4) == (0, 31)
    assert head.t2d.nonzero().flatten().tolist() == ids
    assert head.embed_tokens.weight.data_ptr() == decoder.embedding.data_ptr()


def test_the_static_twin_of_a_dynamic_tree_expands_as_many_nodes_and_asks_as_many_candidates():
    levels = Levels(TreeOnDevice.of(parallel_chains(3, 4), "cpu")).levels
    assert [(level.count, level.width) for level in levels] == [(1, 3), (3, 3), (3, 3), (3, 3)]


def test_engine_says_when_outputs_are_too_short_for_a_steady_state(bench):
    lines, found = bench(
        "engine", "--head", "none", "--batch", "1", "--prompt-tokens", "4", "--new-tokens", "6", "--no-startup"
    )
    assert found["rows"] == []
    assert any("plain, batch 1: left out, no steady state" in line for line in lines)


@pytest.mark.parametrize("prompt", [50, 100])  # some lose their pages later, some get none at first
def test_engine_says_when_the_cache_does_not_hold_the_requests(bench, monkeypatch, prompt):
    monkeypatch.setattr("headstart.inference.engine.engine.pages_that_fit", lambda *given, least, **named: least)
    lines, found = bench(
        "engine", "--head", "none", "--batch", "1,2", "--prompt-tokens", str(prompt), "--new-tokens", "60",
        "--no-startup",
    )  # fmt: skip
    assert [row["batch"] for row in found["rows"]] == [1]
    pages = -(-(prompt + 60 + 2) // 64)
    said = f"they need {2 * pages} pages of the cache, which holds {pages}"
    assert any(line.startswith("plain, batch 2: left out") and said in line for line in lines)


def test_engine_says_the_clock_and_power_of_the_step_and_frees_the_cache_before_a_head(bench, monkeypatch):
    order = []
    state = {"clock": 1500.0, "watts": 706.0, "max_clock": 1980.0, "max_watts": 700.0}
    monkeypatch.setattr(engine, "state_under", lambda work, device: work() or state)
    free, make = engine.release, engine.random_head
    monkeypatch.setattr(engine, "release", lambda *given: order.append("freed") or free(*given))
    monkeypatch.setattr(engine, "random_head", lambda *given: order.append("head") or make(*given))
    lines, found = bench(
        "engine", "--acceptance", "2.0", "--batch", "1", "--prompt-tokens", "20", "--new-tokens", "60", "--no-startup"
    )  # fmt: skip
    assert [(row["clock"], row["watts"]) for row in found["rows"]] == [(1500, 706)] * 2
    assert found["facts"]["products_at"] == state
    assert any("over time at 1500 MHz and 706 W (limits: 1980 MHz, 700 W)" in line for line in lines)
    assert order == ["freed", "freed", "head", "freed"], "before each engine, and before the head"


@pytest.mark.slow
def test_engine_measures_start_up_in_processes_of_their_own(bench):
    _, found = bench(
        "engine", "--head", "none", "--batch", "1", "--prompt-tokens", "4", "--new-tokens", "40"
    )  # fmt: skip
    for seconds in found["facts"]["startup"].values():
        assert 0 < seconds["imported"] < seconds["built"] < seconds["first_token"]


def test_peer_decodes_the_same_model_in_both_ways(bench):
    _, found = bench("peer", "--batch", "2", "--prompt-tokens", "9", "--new-tokens", "24")
    theirs, ours = found["rows"]
    assert (theirs["engine"], ours["engine"]) == ("transformers, static", "headstart")
    check_times(theirs)
    check_times(ours)
    assert ours["agreeing"] == 24  # fp32: no near-tie among these
    assert ours["speedup"] == pytest.approx(theirs["p50"] / ours["p50"], rel=1e-3)


def test_step_measures_the_usual_contexts_that_the_model_reaches(bench):
    _, found = bench("step", "--rows", "1", "--batch", "1", "--repeats", "1", "--baseline", "none")
    assert [row["context"] for row in found["rows"]] == [511]
    assert found["settings"]["contexts"] == [511]
