"""The engine's drafts equal training's predictions, in every configuration of a head: candidates and scores, at every root.

With a lossless rule a worse draft changes no output, so no other test would see it. draft_matrix.py runs both sides.
"""

import itertools
from copy import deepcopy
from dataclasses import fields

import pytest
import torch

import headstart.inference.speculation.drafters.medusa as medusa_module
import headstart.inference.speculation.drafters.mlp_speculator as mlp_speculator_module
from headstart.heads.block import BlockHead
from headstart.heads.eagle import Eagle
from headstart.heads.eagle3 import Eagle3
from headstart.heads.families import FAMILIES
from headstart.heads.layers import ROPE_TYPES
from headstart.heads.medusa import Medusa
from headstart.heads.mlp_speculator import MLPSpeculator
from headstart.inference.llm import LLM
from headstart.inference.speculation.tree import GrowingTree, Tree, save_tree
from headstart.kernels.sampling.philox import gumbel
from headstart.tests.inference.speculation.draft_cases import CASES
from headstart.tests.inference.speculation.draft_matrix import (
    VOCAB,
    build,
    draft,
    make_head,
    make_prompts,
    make_target,
    predict,
)
from headstart.tests.kernels.speculation.test_dynamic_tree import grow_naively

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TREES = ("chain", "tree", "grown")
# Of the largest score after a node. On the CPU rounding makes 1.5e-6 of it; GELU by tanh, the smallest mutant, 2.3e-4.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}

RANKED = 4  # so many of the recorded candidates of a depth are looked at


@pytest.fixture(scope="module", params=DEVICES)
def targets(request):
    """{number of layers: (FrozenTarget, LLM without drafts)} on a device."""
    found = {layers: make_target(request.param, layers) for layers in (2, 7)}
    return {layers: (target, LLM(target.model, max_num_seqs=2)) for layers, target in found.items()}


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    # Children of first and of other candidates, and ranks that are left out.
    ragged = Tree((-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 6), (0, 0, 1, 3, 0, 2, 1, 0, 0, 1, 0))
    full = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 6, 6), (0, 0, 1, 2, 0, 1, 0, 0, 0, 1))  # as the ratio rules want them
    for name, tree in (("tree", ragged), ("full", full), ("grown", GrowingTree(max_depth=3, width=3, num_nodes=10))):
        save_tree(tree, folder / f"{name}.json")
    return {"chain": "chain"} | {name: str(folder / f"{name}.json") for name in ("tree", "full", "grown")}


def make_case(name, targets):
    """(FrozenTarget, LLM without drafts, the head, a copy of it for training: what the engine does to the head is not its)"""
    kind, changes = CASES[name]
    changes = dict(changes)
    target, plain = targets[changes.pop("layers", 2)]
    head = make_head(kind, target, **changes)
    taught = deepcopy(head)
    if head.needs_embedding:
        taught.take_embedding(target.embedding)
    if kind is Eagle3:
        taught.take_depth(target.num_layers)
    return target, plain, head, taught


def check_scores(kept, said, device):
    """The largest difference, and the smallest distance of two neighbours among the best tokens, both of the largest score."""
    worst, nearest = 0.0, torch.inf
    assert kept.keys() == said.keys()
    for path, scores in said.items():
        drafted = scores > -torch.inf
        assert torch.equal(kept[path] > -torch.inf, drafted), path
        largest = scores[drafted].abs().max()
        worst = max(worst, ((kept[path] - scores)[drafted].abs().max() / largest).item())
        best = scores.topk(RANKED + 1).values
        nearest = min(nearest, ((best[:-1] - best[1:]).min() / largest).item())
    assert worst <= TOLERANCE[device], worst
    return worst, nearest


def candidates(said, root, path, width, temperature):
    """The best tokens after a path and their log confidence, by training's scores; under noise it is the target's own.

    Scores that all nodes of a depth share are known of the path (0, 0, ...) at least.
    """
    scores = said[path if path in said else (0,) * len(path)].double()
    if not temperature:
        found = scores.log_softmax(0).topk(width)
        return found.indices.tolist(), found.values.tolist()
    keys = [torch.tensor([x], device=scores.device) for x in (root.request, 0, root.length + 1 + len(path))]
    found = (scores / temperature + gumbel(*keys, VOCAB)[0]).topk(width)
    return found.indices.tolist(), found.values.log_softmax(0).tolist()


def expected_paths(said, root, tree, temperature):
    """The paths of a draft's nodes, in their order, by training's scores."""
    if isinstance(tree, GrowingTree):

        def children(path):
            return list(zip(*candidates(said, root, path, tree.width, temperature)))

        return [(), *grow_naively(children, tree.width, tree.max_depth, tree.num_nodes)[1]]
    paths = [()]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:]):
        paths.append((*paths[parent], candidates(said, root, paths[parent], rank + 1, temperature)[0][rank]))
    return paths


def check_drafts(target, head, tree, texts, roots, temperature=0.0, drawn=False):
    """Candidates and scores of all roots. drawn: the candidates are draws, of which the scores are all that is compared.

    Returns how many of training's rows were the text itself.
    """
    (found, plain), ties = predict(target, head, texts, roots), 0
    device = target.lm_head.weight.device.type
    for root, said in zip(roots, found):
        assert root.tokens[0] == texts[root.request][root.length]
        worst, nearest = check_scores(root.kept, said, device)
        if drawn:
            assert len(root.handed) == len({*root.parents})
            check_scores(root.handed, {path: said[path] for path in root.handed}, device)
            continue
        if nearest <= 2 * worst:  # rounding may exchange the two
            ties += 1
            continue
        assert root.paths == expected_paths(said, root, tree, temperature)
        for path in said if root.candidates else ():
            ranked = candidates(said, root, path, RANKED, temperature)[0]
            assert root.candidates[len(path)][:RANKED] == ranked
            most = head.max_candidates or VOCAB
            assert {*root.candidates[len(path)][most:]} <= {-1}
    assert ties <= 1, "choose another seed"
    return plain


def check_roots(prompts, roots, max_depth):
    """The roots are of all kinds: the first one of a prompt, one after a rejected draft, one after a draft accepted whole."""
    accepted = set()
    for request, prompt in enumerate(prompts):
        lengths = [root.length for root in roots if root.request == request]
        assert lengths[0] == len(prompt)
        accepted |= {after - before - 1 for before, after in itertools.pairwise(lengths)}
    assert {0, max_depth} <= accepted
    assert max(root.company for root in roots) == len(prompts)


MATRIX = [*itertools.product(CASES, TREES)]
EXAMPLES = (
    "medusa-blocks2-own_lm_head",
    "mlp-untied-scaled",
    "eagle-biases",
    "eagle3-draft_vocabulary",
    "block-causal",
    "block-edge-anchored",
    "block-sliding",
    "block-sliding-of_block-causal",
    "block-dflash2",
    "block-scaled-edge",
    "block-scaled-dflash2",
)


def ids_of(matrix):
    return ["-".join(map(str, one)) for one in matrix]


@pytest.mark.parametrize(("name", "tree"), MATRIX, ids=ids_of(MATRIX))
def test_the_engine_drafts_what_training_says(targets, trees, name, tree):
    target, plain, head, taught = make_case(name, targets)
    llm, prompts = build(plain, head, trees[tree]), make_prompts((1, 9))
    assert tree != "chain" or llm.tree.max_depth == head.num_speculative_tokens
    texts, roots = draft(llm, prompts)
    check_roots(prompts, roots, llm.tree.max_depth)
    # Where a draft was accepted whole, what training says is its prediction of the text as it is.
    assert check_drafts(target, taught, llm.tree, texts, roots) > 0
    assert all((root.candidates is not None) == (tree == "chain") for root in roots)


@pytest.mark.parametrize("name", [name for name, (kind, _) in CASES.items() if kind in (Medusa, MLPSpeculator)])
def test_what_these_drafters_do_on_a_gpu_is_the_same_by_its_reference(targets, trees, monkeypatch, name):
    """Their way on a GPU is another one than on the CPU. Here it is made of the kernels' references."""
    target, plain, head, taught = make_case(name, targets)
    for module in (medusa_module, mlp_speculator_module):
        monkeypatch.setattr(module, "on_triton", lambda x: True)
    llm = build(plain, head, trees["tree"])
    check_drafts(target, taught, llm.tree, *draft(llm, make_prompts((1, 9))))


@pytest.mark.parametrize(("name", "tree"), NOISY := [one for one in MATRIX if one[0] in EXAMPLES], ids=ids_of(NOISY))
def test_under_the_target_s_noise_too(targets, trees, name, tree):
    target, plain, head, taught = make_case(name, targets)
    llm = build(plain, head, trees[tree])
    check_drafts(target, taught, llm.tree, *draft(llm, make_prompts((1, 9)), temperature=0.8), temperature=0.8)


@pytest.mark.parametrize("tree", ["chain", "full"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_rules_that_compare_distributions_are_handed_those_of_training(targets, trees, name, tree):
    target, plain, head, taught = make_case(name, targets)
    llm = build(plain, head, trees[tree], verifier="traversal")
    texts, roots = draft(llm, make_prompts((1, 9)), temperature=0.8)
    check_drafts(target, taught, llm.tree, texts, roots, drawn=True)


@pytest.mark.parametrize(("name", "tree"), FAR := [one for one in NOISY if one[1] != "chain"], ids=ids_of(FAR))
def test_across_pages_and_on_pages_found_in_the_cache(targets, trees, name, tree):
    target, plain, head, taught = make_case(name, targets)
    llm, prompts = build(plain, head, trees[tree], chunk=40), make_prompts((1, 61))
    texts, roots = draft(llm, prompts)
    check_roots(prompts, roots, llm.tree.max_depth)
    check_drafts(target, taught, llm.tree, texts, roots)
    assert llm.get_stats()["prefix_cache_hits"] == 0
    # The page ends with what was emitted.
    texts, roots = draft(llm, [texts[0], texts[1][:67]])
    check_drafts(target, taught, llm.tree, texts, roots)
    assert llm.get_stats()["prefix_cache_hits"] == 64


OF_TARGET = "every head has the target's"
NOT_READ = "drafts do not depend on it"
LABEL = "names where the head comes from; nothing is computed with it"
NOT_APPLICABLE = {
    (Medusa, "hidden_size"): OF_TARGET,
    (Medusa, "vocab_size"): OF_TARGET,
    (Medusa, "base_model_name_or_path"): LABEL,
    (Medusa, "adapter"): LABEL,
    (MLPSpeculator, "hidden_size"): OF_TARGET,
    (MLPSpeculator, "vocab_size"): OF_TARGET,
    (MLPSpeculator, "base_model_name_or_path"): LABEL,
    (BlockHead, "hidden_size"): OF_TARGET,
    (BlockHead, "vocab_size"): OF_TARGET,
    (BlockHead, "base_model_name_or_path"): LABEL,
    (BlockHead, "attention_bias"): "block drafters have none",
    (BlockHead, "confidence"): NOT_READ,
    (BlockHead, "confidence_sees_token"): NOT_READ,
    (Eagle, "hidden_size"): OF_TARGET,
    (Eagle, "vocab_size"): OF_TARGET,
    (Eagle, "base_model_name_or_path"): LABEL,
    (Eagle3, "target_hidden_size"): OF_TARGET,
    (Eagle3, "vocab_size"): OF_TARGET,
    (Eagle3, "base_model_name_or_path"): LABEL,
}


def test_every_field_of_every_configuration_is_varied():
    targets = {layers: (make_target("cpu", layers), None) for layers in (2, 7)}
    said, embeddings = {}, {}
    for name, (kind, changes) in CASES.items():
        embeddings.setdefault(kind, set()).add(changes.get("embedding"))
        config = make_case(name, targets)[2].config
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name == "rope_scaling":
                value = config.rope_parameters["rope_type"]
            said.setdefault((kind, field.name), set()).add(value)
    assert {kind for kind, _ in said} == {family.head for family in FAMILIES}
    assert {key for key, values in said.items() if len(values) == 1} == {*NOT_APPLICABLE}
    for key, values in said.items():
        assert key[1] != "rope_scaling" or values == {*ROPE_TYPES}
    # No field says whose table it is.
    assert embeddings[Eagle] == embeddings[Eagle3] == embeddings[BlockHead] == {"target's", "own", "none"}
    assert embeddings[Medusa] == embeddings[MLPSpeculator] == {None}  # these read no table of the target's
