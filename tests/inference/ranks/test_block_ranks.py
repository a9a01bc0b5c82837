"""An edge's drafts on two ranks that divide the target: accepted ones change no bit, whatever happens to the requests."""

import pytest

from headstart.inference.speculation.tree import GrowingTree, build_static_tree, save_tree
from headstart.tests.inference.speculation.small_drafters import llama
from headstart.tests.inference.speculation.taught_block import GROWING, bits_of, many_requests
from headstart.tests.inference.speculation.test_block import DEPTH, taught

pytestmark = pytest.mark.filterwarnings("ignore:with tensor_parallel_size")
KNOWN = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]  # beginnings of the texts that the head is taught


REQUESTS = many_requests(KNOWN, 22), many_requests(KNOWN, 24, lengths=GROWING)


@pytest.mark.parametrize(("tree", "batch", "pages"), [("chain", 12, None), ("static", 16, 16), ("grown", 16, None)])
def test_accepted_drafts_of_an_edge_change_no_bit_on_ranks(
    divided_folder, forked_llm, edged_and_plain, tmp_path, tree, batch, pages
):
    (head, plain), which = edged_and_plain, pages is not None
    shapes = {
        "static": build_static_tree([[0.6, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2], [0.5, 0.2], [0.4, 0.1]], 8),
        "grown": GrowingTree(max_depth=DEPTH, width=4, num_nodes=16),
    }
    if tree in shapes:
        save_tree(shapes[tree], tmp_path / "tree.json")
    speculative = {"model": head, "tree": str(tmp_path / "tree.json") if tree in shapes else tree}
    sizes = dict(max_num_seqs=batch, max_model_len=200, num_gpu_blocks_override=pages)
    llm = forked_llm(divided_folder, 2, speculative_config=speculative, **sizes)
    assert bits_of(llm, REQUESTS[which]) == plain[which]
    assert llm.get_stats()["num_accepted_tokens"] >= len(plain[which]) / 3
    if pages is None:  # pages that are found again
        assert bits_of(llm, [part[:11] for part in REQUESTS[which]]) == plain[which][:11]
        assert llm.get_stats()["prefix_cache_hits"] > 0
    else:
        assert llm.get_stats()["num_preemptions"] > 0
    llm.engine.check()


FOUND = []


@pytest.fixture
def edged_and_plain(divided_folder, forked_llm):
    """(a head with an edge that was taught greedy outputs of two ranks, plain outputs of all requests)"""
    if not FOUND:
        llm = forked_llm(divided_folder, 2, max_num_seqs=8)
        plain = [bits_of(llm, requests) for requests in REQUESTS]
        texts = [prompt + tokens for prompt, (tokens, _) in zip(REQUESTS[0][0][:6:3], plain[0][:6:3])]
        target = llama().requires_grad_(False)
        FOUND.extend((taught(target, texts, edge_rank=8, sample_from_anchor=True), plain))
    return FOUND
