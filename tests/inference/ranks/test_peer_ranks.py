"""PeerRanks over memory that processes share, in the interpreter. On GPUs: test_gpu_ranks.py."""

import gc
import multiprocessing
import os
import tempfile
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from headstart.inference.models import divided_weight
from headstart.inference.models.decoder import ForwardPass
from headstart.inference.models.division import WHOLE, Division, RowParallel, in_pairs
from headstart.inference.models.modules.divided_products import FeatureDivision
from headstart.inference.models.modules.module_decoder import ModuleDecoder
from headstart.inference.models.transport import ALONE, GlooRanks, RankLost
from headstart.inference.ranks import host_memory
from headstart.inference.ranks.peer_ranks import MeetingStore, PeerRanks
from headstart.inference.speculation.drafters.lm_heads import LMHeads, products
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.kernels.linear.linear import linear, linear_sums
from headstart.kernels.peer_gather import ROWS, flag_bytes
from headstart.tests.inference.models.small_architectures import small_model
from headstart.tests.inference.models.test_division import BIASED, scores

CAPACITY = 4096


def run_rank(on_host, rank, size, folder, memory, results):
    torch.set_num_threads(1)
    host = GlooRanks(folder, rank, size)
    peers = PeerRanks(host, memory, on_host)
    generator = torch.Generator().manual_seed(5)
    for turn in range(5):  # an odd number of gathers in a pass
        peers.begin()
        for shape in ((2, 3, 8), (9, 101), (1,)):  # the second is larger than a buffer
            parts = torch.randn(size, *shape, generator=generator)
            slot = peers.slot(shape, torch.float32)
            assert (slot is None) == (on_host or parts.nbytes > CAPACITY)
            part = parts[rank] if slot is None or turn % 2 else slot.copy_(parts[rank])
            if not torch.equal(peers.gather(part), parts):
                results.put(f"rank {rank}, turn {turn}, {shape}")
                return
    results.put(peers.least(10 + rank))


def sum_products(rank, size, folder, memory, results):
    """Rows that the ranks share evenly, and so few that some have none; beside other gathers, whose buffers take turns."""
    torch.set_num_threads(1)
    host = GlooRanks(folder, rank, size)
    ranks = PeerRanks(host, memory)
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(torch.float16)

    for turn, num_rows in enumerate((600, 520)):
        ranks.begin()
        x, weights, bias = drawn(num_rows, 32 * size), drawn(48, 32 * size), drawn(48)
        parts = [[part.contiguous() for part in whole.split(32, 1)] for whole in (x, weights)]
        parts = list(zip(*parts, [bias] + [None] * (size - 1)))
        expected = in_pairs(torch.stack([linear_sums(*part) for part in parts]), 1)
        x, weight, bias = parts[rank]
        product = RowParallel((weight,), bias, ranks)
        for _ in range(turn):
            ranks.gather(torch.ones(2))
        for _ in range(2):
            found = product.parts(x)
            if found.dtype != torch.float16 or not torch.equal(found, expected.to(torch.float16)):
                results.put(f"rank {rank}, {num_rows} rows")
                return
    results.put(ranks.sum_rows(None, 2**16, 48, torch.float16))  # more than the buffers hold


def run_decoder(on_host, rank, size, folder, memory, results):
    torch.set_num_threads(1)
    host = GlooRanks(folder, rank, size)
    peers = PeerRanks(host, memory, on_host)
    results.put(scores(peers, 4, torch.float32, device_type="cuda"))


def module_scores(model_type, ranks=None):
    """Hidden states and logits of three first tokens, as bytes.  ranks: that divide the module; None: one device"""
    model, cpu, division = small_model(model_type), torch.device("cpu"), FeatureDivision(ranks) if ranks else WHOLE
    decoder = ModuleDecoder(model, 128, division, cpu)
    layers, heads, dim, dtype = decoder.kv_shape
    tokens, pages, node = torch.tensor([5, 90, 31]), torch.arange(1, 4), torch.zeros(1, dtype=torch.int64)
    index = build_tree_index(pages[:, None], torch.zeros_like(pages), node, node[None], heads, dtype)
    kv = torch.zeros(layers, 2, 4 * heads * PAGE, dim, dtype=dtype)
    hidden, _ = decoder.forward(ForwardPass(tokens, torch.zeros_like(pages), pages * PAGE, index), kv)
    return [x.double().numpy().tobytes() for x in (hidden, decoder.logits(hidden), decoder.whole_lm_head())]


def run_module(model_type, rank, size, folder, memory, results):
    torch.set_num_threads(1)
    results.put(module_scores(model_type, PeerRanks(GlooRanks(folder, rank, size), memory)))


def lm_heads_on(rank, size, folder, memory, results):
    """Scores of divided lm_heads, level after level, and of several in one gather."""
    ranks, generator = PeerRanks(GlooRanks(folder, rank, size), memory), torch.Generator().manual_seed(0)
    weights, x = torch.randn(3, 97, 24, generator=generator), torch.randn(3, 5, 24, generator=generator)
    divided = [LMHeads(ranks, size)(weight) for weight in weights]
    expected = [linear(rows, weight) for rows, weight in zip(x, weights)]
    one_by_one = [one.product(rows) for one, rows in zip(divided, x)]
    results.put(all(map(torch.equal, one_by_one + list(products(divided, x)), expected * 2)))


def keep_logits(rank, size, folder, memory, results):
    """Logits of one row are still right after those of others."""
    host = GlooRanks(folder, rank, size)
    peers = PeerRanks(host, memory)
    division = Division(BIASED, peers, "cuda")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(size, 3, division.vocab_rows, generator=generator)
    first = division.joined_logits(whole[rank, :1].contiguous())
    kept = first.clone()
    for rows in (2, 3, 1):
        division.joined_logits(-whole[rank, :rows].contiguous())
    results.put(torch.equal(first, kept))


def on_processes(size, work, capacity=CAPACITY, on_host=False):
    """What work(rank, size, folder, memory, results) puts into results, on forks that share memory.

    on_host: one piece for all, as shared_host_memory makes it
    """
    context = multiprocessing.get_context("fork")
    results, num_bytes = context.Queue(), 2 * capacity + flag_bytes(size) * (size if on_host else 1)
    memory = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(1 if on_host else size)]
    memory = memory[0] if on_host else memory
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            context.Process(target=work, args=(rank, size, folder, memory, results), daemon=True).start()
        return [results.get(timeout=60) for _ in range(size)]


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("on_host", [False, True])
def test_parts_come_in_the_order_of_the_ranks(size, on_host):
    """In buffers of each rank, or in some that all share."""
    assert on_processes(size, partial(run_rank, on_host), on_host=on_host) == [10] * size


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_sums_of_many_rows(size):
    """Each adds some of the rows. The bits are those of all parts added in pairs."""
    assert on_processes(size, sum_products, capacity=2**20) == [None] * size


def test_a_norms_sums_take_a_buffer_in_their_turn():
    """So no rank writes what another may still add up. Other sums are gathered: too many rows, not in their slot, three ranks."""

    def peers(size):
        memory = [torch.zeros(2 * CAPACITY + flag_bytes(size), dtype=torch.uint8) for _ in range(size)]
        return PeerRanks(SimpleNamespace(rank=1, size=size), memory)

    ranks = peers(2)
    first = ranks.slot((2, 8), torch.float32)
    sums = ranks.peer_parts(first.fill_(1))
    assert (sums.place, sums.parts.sum((1, 2)).tolist()) == (0, [0, 16])
    second = ranks.slot((2, 8), torch.float32)
    assert second.data_ptr() - first.data_ptr() == CAPACITY
    assert ranks.peer_parts(second.clone()) is ranks.peer_parts(ranks.slot((ROWS + 1, 1), torch.float32)) is None
    assert ranks.peer_parts(second).place == CAPACITY
    assert ranks.slot((2, 8), torch.float32).data_ptr() == first.data_ptr()
    three = peers(3)
    assert three.peer_parts(three.slot((2, 8), torch.float32)) is None


@pytest.mark.interpreter
def test_logits_do_not_lie_in_a_buffer_of_the_ranks():
    assert on_processes(2, keep_logits) == [True, True]


def test_what_stops_the_kernels_holds_no_group():
    """Else an LLM that nobody uses any more would keep its ranks."""
    memory = torch.zeros(2 * CAPACITY + flag_bytes(2), dtype=torch.uint8)
    peers = PeerRanks(SimpleNamespace(rank=0, size=2), [memory] * 2)
    stop, number, held = peers.stopper(), peers._peers.stop, weakref.ref(peers)
    del peers
    gc.collect()
    assert held() is None
    stop()
    assert number.tolist() == [1]


@pytest.mark.interpreter
@pytest.mark.parametrize(("size", "on_host"), [(2, False), (4, False), (2, True)])
def test_a_decoder_on_the_kernels_gives_the_bits_of_one_device(size, on_host):
    """Divided as on GPUs: sums go straight into the buffers, and features are cut as those of the whole product."""
    assert (
        on_processes(size, partial(run_decoder, on_host), on_host=on_host)
        == [scores(ALONE, 4, torch.float32, device_type="cuda")] * size
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [2, 4])
def test_divided_lm_heads_give_the_scores_of_whole_ones(size):
    assert on_processes(size, lm_heads_on) == [True] * size


@pytest.mark.interpreter
@pytest.mark.parametrize(("model_type", "size"), [("opt", 2), ("phi3", 3)])
def test_a_module_on_the_kernels_gives_the_bits_of_one_device(model_type, size, monkeypatch):
    monkeypatch.setattr(divided_weight, "SMALL", 0)
    assert on_processes(size, partial(run_module, model_type)) == [module_scores(model_type)] * size


def map_and_write(rank, size, folder, memory, results):
    """What rank 0 reads of the bytes that each rank wrote, and whether its files are closed."""
    torch.set_num_threads(1)
    host = GlooRanks(folder, rank, size)
    before = len(os.listdir("/proc/self/fd"))
    mapping = host_memory.shared_mapping(host, 4096)
    zero = not any(mapping[:])
    host.least(0)
    mapping[rank] = rank + 1
    host.least(0)
    # The mapping itself holds a copy of the descriptor.
    results.put((zero, list(mapping[: size + 1]), len(os.listdir("/proc/self/fd")) - before))


def test_ranks_map_the_same_memory_of_the_host():
    assert on_processes(3, map_and_write) == [(True, [1, 2, 3, 0], 1)] * 3


def test_memory_of_the_host_that_ranks_do_not_come_to_is_closed():
    def lost(number):
        raise RankLost("rank 1 of 2 was ended by SIGKILL")

    host = SimpleNamespace(rank=0, size=2, store=SimpleNamespace(set=lambda *_: None), least=lost)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RankLost):
        host_memory.shared_mapping(host, 4096)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_memory_of_the_host_that_a_gpu_cannot_map_is_said(monkeypatch):
    def refuse(status):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match=r"cuda:1 cannot map 1 MiB of the host's memory.*out of memory.*ulimit -l"):
        host_memory._Registered(bytearray(2**20), torch.device("cuda", 1))


def test_ranks_meet_whatever_their_processes_exchanged_before(tmp_path):
    """As torch's rendezvous calls a store: from C++, with keys that count the exchanges of the process."""
    one, other = (MeetingStore(dist.FileStore(str(tmp_path / "ranks"), 2)) for _ in range(2))
    first, second = dist.PrefixStore("peers", one), dist.PrefixStore("peers", other)
    for turn in range(3):
        first.set(f"X/{5 + turn}/0", bytes([turn, 0, 255]))
        second.set(f"X/{turn}/1", b"b")
        second.wait([f"X/{turn}/0"])
        assert second.get(f"X/{turn}/0") == bytes([turn, 0, 255])
        assert first.get(f"X/{5 + turn}/1") == b"b"
    first.set("Y/9/0", b"of another prefix")
    second.set("Y/0/1", b"")
    assert second.get("Y/0/0") == b"of another prefix"
    with pytest.raises(RuntimeError, match="Wait timeout"):
        second.wait(["Y/1/0"], timedelta(seconds=0.1))
