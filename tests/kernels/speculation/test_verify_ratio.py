"""The ratio rules on the device against the reference in fp64: same uniforms, same distributions, same noise for the token
after.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from headstart.inference.speculation.draft import Draft
from headstart.inference.speculation.draft_sampling import sampled_nodes
from headstart.inference.speculation.tree import Tree, chain
from headstart.inference.speculation.verifiers import with_any_distribution
from headstart.kernels.jit import jit, tl
from headstart.kernels.sampling.keep_top import (
    keep_top,
    keep_top_reference,
    kept_scores_reference,
    keys_reference,
    scaled_reference,
)
from headstart.kernels.sampling.philox import ACCEPT_UNIFORM, RESIDUAL_NOISE, gumbel, uniform
from headstart.kernels.speculation import verify_ratio as module
from headstart.kernels.speculation.ratio_rules import RATIO_RULES, DraftProbabilities, verify_ratio_reference
from headstart.kernels.speculation.row_distributions import probabilities, row_distributions_reference
from headstart.tests.inference.speculation.draw_children import draw_children
from headstart.tests.kernels.mutants import mutated

TREES = [
    chain(0),
    chain(1),
    chain(3),
    Tree((-1, 0, 0, 0), (0, 0, 1, 2)),
    Tree((-1, 0, 0, 1, 1, 2, 2), (0, 0, 1, 0, 1, 0, 1)),
    Tree((-1, 0, 1, 1, 0, 4, 0), (0, 0, 0, 1, 1, 0, 2)),  # numbered depth first
]
CASES = list(product(TREES, ("greedy", "sampled", "top_and_one")))
RULES = {True: RATIO_RULES["recursive"], False: RATIO_RULES["traversal"]}
NODES, DEPTH = 7, 3


def problem(cases, vocab_size, device="cpu", seed=0, dtype=torch.float32, spread=0.7, cut=False):
    """Arguments of verify_ratio for one request per (tree, drawing), each with its topology, and what the reference is told.

    In between: requests at temperature 0, depth limits, distributions with zeros, slots left empty. spread: how far p is from q;
    cut: by top-k, top-p and min-p, some requests by nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = len(cases)
    kind = torch.arange(batch) + seed
    parents, depths, distribution = (torch.zeros(batch, NODES, dtype=torch.int64) for _ in range(3))
    drawn = torch.zeros(batch, NODES, dtype=torch.bool)
    tokens = torch.full((batch, NODES), -1).index_fill(1, torch.tensor([0]), 0)
    base = 2 * torch.randn(batch, NODES, vocab_size, generator=generator)
    scores = (base + spread * torch.randn(base.shape, generator=generator)).to(dtype)
    draft_scores = (
        base.flip(1).transpose(0, 1).contiguous().to(dtype)
    )  # [L, B, V], distributions in another order than nodes
    half = vocab_size // 2
    scores[kind % 5 == 1, :, :half] = -torch.inf  # as top-k and top-p leave tokens out
    draft_scores[:, kind % 5 == 2, half:] = -torch.inf
    temperature = torch.where(kind % 6 == 5, 0.0, 0.5 + torch.rand(batch, generator=generator))
    draft_temperature = torch.where(temperature > 0, 0.5 + torch.rand(batch, generator=generator), 0.0)
    p_scores, p_heat = scores.flatten(0, 1), temperature.repeat_interleave(NODES)
    q_scores, q_heat = draft_scores.flatten(0, 1), draft_temperature.repeat(NODES)
    kept = None
    if cut:
        filters = torch.tensor([3, 0, 0, vocab_size // 2, 0]), torch.tensor([0.8, 0.9, 1.0, 1.0, 1.0])
        filters = [x[kind % 5] for x in (*filters, torch.tensor([0.0, 0.0, 0.0, 0.01, 0.1]))]
        given = (
            (p_scores, p_heat, *(x.repeat_interleave(NODES) for x in filters)),
            (q_scores, q_heat, *(x.repeat(NODES) for x in filters)),
        )
        kept = [keep_top(*[x.to(device) for x in rows]) if device == "cuda" else listed(*rows) for rows in given]
        p_scores, q_scores = (kept_scores_reference(keep_top_reference(*rows)) for rows in given)
        p_heat, q_heat = (p_heat > 0).float(), (q_heat > 0).float()
        draft_scores, draft_temperature = q_scores.view(draft_scores.shape), (draft_temperature > 0).float()
    p = probabilities(p_scores.double(), p_heat).view(base.shape)
    q = probabilities(q_scores.double(), q_heat)
    q = q.view(draft_scores.shape).transpose(0, 1)  # [B, L, V]
    for b, (tree, drawing) in enumerate(cases):
        size = tree.num_nodes
        parents[b, 1:size], depths[b, :size] = torch.tensor(tree.parents[1:]), torch.tensor(tree.depths)
        depths[b, size:] = 1
        distribution[b] = NODES - 1 - torch.arange(NODES)
        drawn[b, :size] = sampled_nodes(drawing, torch.tensor(tree.parents)) & bool(temperature[b] > 0)
        for n in sorted(set(tree.parents[1:])):
            children = [c for c in range(1, size) if tree.parents[c] == n]
            noise = -torch.log(-torch.log(torch.rand(vocab_size, generator=generator, dtype=torch.float64)))
            noise = None if drawing == "greedy" else noise * bool(temperature[b] > 0)
            log_q = (
                q[b, distribution[b, n]].log() if temperature[b] > 0 else draft_scores[distribution[b, n], b].double()
            )
            tokens[b, children] = draw_children(log_q, len(children), drawing, noise)
    tokens[kind % 9 == 7, 2] = -1
    limit = torch.tensor([9, 9, 9, 9, 1, 9, 0])[kind % 7]
    key = torch.randint(2**62, (batch,), generator=generator), kind % 3, 100 + kind
    arguments = dict(
        parents=parents, depths=depths, tokens=tokens, scores=scores.flatten(0, 1),
        temperature=temperature.repeat_interleave(NODES), draft_scores=draft_scores, draft_temperature=draft_temperature,
        distribution=distribution, sampled=drawn, depth_limit=limit, seed=key[0], sample=key[1], position=key[2],
    )  # fmt: skip
    told = SimpleNamespace(
        tree=SimpleNamespace(parents=parents, depths=depths, max_depth=DEPTH),
        draft=DraftProbabilities(tokens, q, distribution, drawn),
        p=p,
        u=uniform(*key, NODES, ACCEPT_UNIFORM),
        limit=limit,
        noise=gumbel(*key, vocab_size, RESIDUAL_NOISE).double() * (temperature > 0)[:, None],
    )
    return {name: x.to(device) for name, x in arguments.items()} | {"kept": kept}, told


def listed(*rows):
    """keep_top's kernel by the reference, which lists no tokens: the interpreter takes its time."""
    kept = keep_top_reference(*rows)
    keep = keys_reference(scaled_reference(*rows[:2])) >= kept.lowest[:, None]
    return kept._replace(tokens=(~keep).to(torch.uint8).argsort(stable=True).int())


def run(arguments, recursive, kernel=module, max_depth=DEPTH, workspace=None):
    if workspace is None:
        workspace = kernel.make_workspace(*arguments["tokens"].shape, arguments["tokens"].device)
    rule = "recursive" if recursive else "traversal"
    found = kernel.verify_ratio(rule, **arguments, max_depth=max_depth, workspace=workspace)
    assert not workspace.signals.any()
    return [x.cpu() for x in found]


def disagreements(found, told, rule):
    """Requests [B] that are decided otherwise than by the rule though no uniform is within 1e-6 of a threshold, or that emit a
    token though another one's perturbed score is 1e-4 higher; and those that were judged [B]."""
    path, num_accepted, bonus = found
    low, verdict, high = [rule(told.tree, told.draft, told.p, told.u + by, told.limit) for by in (-1e-6, 0, 1e-6)]
    clear = (low.path == high.path).all(1) & (low.num_accepted == high.num_accepted)
    wrong = (path != verdict.path).any(1) | (num_accepted != verdict.num_accepted)
    scores = verdict.distribution.log() + told.noise
    wrong |= scores.gather(1, bonus[:, None]).squeeze(1) < scores.amax(1) - 1e-4
    return wrong & clear, clear


@pytest.fixture
def quick(monkeypatch, kernel_device):
    """In the interpreter a program takes tens of milliseconds: few of them, small blocks, sums over a row by the reference."""
    if kernel_device == "cpu":
        monkeypatch.setattr(module, "_MAX_PARTS", 2)
        monkeypatch.setattr(module, "_BLOCK", 8)
        monkeypatch.setattr(module, "row_distributions", by_reference)


def by_reference(scores, temperature):
    return row_distributions_reference(scores, temperature.repeat(len(scores) // len(temperature)))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("recursive", [True, False])
def test_the_kernel_decides_as_the_reference(kernel_device, quick, recursive, cut):
    on_gpu = kernel_device == "cuda"
    cases, lengths = CASES if on_gpu else CASES[recursive::2], set()
    for vocab_size, seed in product((127, 1013, 32000, 151936) if on_gpu else (21,), range(4 if on_gpu else 1)):
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        arguments, told = problem(cases, vocab_size, kernel_device, seed, dtype, cut=cut)
        found = run(arguments, recursive)
        wrong, clear = disagreements(found, told, RULES[recursive])
        assert not wrong.any(), (vocab_size, seed, wrong.nonzero())
        assert clear.sum() >= 0.9 * len(cases)
        lengths |= set(found[1].tolist())
    assert lengths >= {0, 1, 2}


@pytest.mark.parametrize(("recursive", "cut"), [(True, True), (False, False)])
def test_a_draft_chosen_without_chance_needs_no_distribution(kernel_device, quick, recursive, cut):
    cases = [(tree, "greedy") for tree in (chain(3), TREES[4], chain(3), chain(3), chain(1), chain(3))]
    arguments, _ = problem(cases, 21, kernel_device, seed=10, cut=cut)
    expected = run(arguments, recursive)
    tokens, scores, kept = (arguments[name] for name in ("tokens", "scores", "kept"))
    told = Draft(tokens, None, None, None, arguments["distribution"], arguments["sampled"])
    told = with_any_distribution(told, scores, None if kept is None else kept[0])
    arguments |= {"draft_scores": told.scores, "draft_temperature": told.temperature, "distribution": told.distribution}
    found = run(arguments | {"kept": None if kept is None else (kept[0], told.kept)}, recursive)
    assert expected[1].max() > 0
    for ours, others in zip(found, expected):
        assert torch.equal(ours, others)


TELLING = [CASES[i] for i in (13, 10, 17, 7, 12)]
# A line of the kernel, what is put in its place, and the one of the requests (seed 10) that tells.
MUTANTS = {
    "slots not renormalised": ("tl.where(soft, 1.0 / mass, 0.0)", "tl.where(soft, 1.0, 0.0)", 2),
    "siblings not left out of the slot": ("q = tl.where(v == x, 0.0, q)", "q = q", 2),
    "the soft distribution of a chosen child": ("soft = tl.load(drawn + c).to(tl.int32) != 0", "soft = j >= 0", 4),
    "the target's temperature for the draft": ("tl.load(draft_temperature + request).to(tl.float32)", "heat", 0),
    "a rate that no failure changes": ("S / (S + 1.0 - r)", "r", 0),
    "the path ends at the first failure": ("taken |= tl.max(kids * taken[None, :], 1)", "taken |= 0", 4),
    "the residual of recursive": ("tl.where(some, r, 1.0)", "tl.where(some, 1.0, 1.0)", 0),
    "a bonus that ignores the children": ("_residual(P, q, v, steps, tried)", "_residual(P, q, v, steps, 0)", 2),
    "a bonus without temperature": ("inside, heat, p_lowest, p_top, p_unit,", "inside, heat, p_lowest, p_top, log2_e,", 4),
    "uniforms of another position": ("(0, seed_, sample_, position_,", "(0, seed_, sample_, position_ + 1,", 4),
    "noise of another purpose": ("sample_, position_, NOISE, BLOCK)", "sample_, position_, UNIFORM, BLOCK)", 0),
    "a depth limit that is not kept": ("(depth <= limit)", "(depth <= 99)", 3),
}  # fmt: skip


def only(b, arguments, told):
    """The same problem of request b alone."""
    nodes = slice(b * NODES, (b + 1) * NODES)
    rows = {"scores": nodes, "temperature": nodes, "draft_scores": (slice(None), slice(b, b + 1))}
    draft = told.draft
    tree = SimpleNamespace(parents=told.tree.parents[b : b + 1], depths=told.tree.depths[b : b + 1], max_depth=DEPTH)
    alone = {name: getattr(told, name)[b : b + 1] for name in ("p", "u", "limit", "noise")}
    return (
        {name: x[rows.get(name, slice(b, b + 1))] for name, x in arguments.items() if x is not None},
        SimpleNamespace(tree=tree, draft=DraftProbabilities(*(x[b : b + 1] for x in draft)), **alone),
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_the_kernel_is_seen(kernel_device, quick, monkeypatch, tmp_path, name):
    arguments, told = only(MUTANTS[name][2], *problem(TELLING, 21, kernel_device, seed=10, spread=1.0))
    kernel = mutated(module, *MUTANTS[name][:2], tmp_path)
    for setting in ("_MAX_PARTS", "_BLOCK", "row_distributions"):
        monkeypatch.setattr(kernel, setting, getattr(module, setting))
    wrong, _ = disagreements(run(arguments, False), told, RULES[False])
    assert not wrong.any()
    wrong, _ = disagreements(run(arguments, False, kernel), told, RULES[False])
    assert wrong.all()


def test_a_launch_leaves_the_workspace_for_the_next_one(kernel_device, quick):
    """As in the replays of a CUDA graph; and a request's result does not depend on its company."""
    arguments, told = problem(TELLING[2:4], 21, kernel_device, seed=10)
    workspace = module.make_workspace(2, NODES, kernel_device)
    first = run(arguments, False, workspace=workspace)
    again = run(arguments, False, workspace=workspace)
    alone = run(only(1, arguments, told)[0], False)
    for x, y, z in zip(first, again, alone):
        assert torch.equal(x, y)
        assert torch.equal(x[1:], z)


@jit
def no_words(start, seed, sample, position, purpose: tl.constexpr, COUNT: tl.constexpr):
    return tl.zeros((COUNT,), tl.uint32)


@pytest.mark.parametrize("recursive", [True, False])
def test_u_of_zero_accepts_nothing_that_the_target_never_emits(kernel_device, recursive, monkeypatch):
    if kernel_device == "cuda":
        pytest.skip("the compiled kernel draws its own words")
    monkeypatch.setattr(module, "chunk_words", no_words)
    arguments, _ = problem([CASES[4]], 8, "cpu", seed=1)
    arguments["scores"][:, :4], arguments["draft_scores"][..., 4:] = -torch.inf, -torch.inf
    arguments["tokens"][:, 1] = 2
    assert run(arguments, recursive)[1].tolist() == [0]
    arguments["scores"][:, :4] = 0
    assert run(arguments, recursive)[1].tolist() == [1]


@pytest.mark.parametrize("recursive", [True, False])
def test_a_draft_distribution_that_underflows_keeps_the_targets_distribution(kernel_device, quick, recursive):
    """Three children, all of q's mass on the first: of the others nothing is known but that they are there."""
    arguments, told = problem([CASES[10]] * 5, 13, kernel_device, seed=0)
    arguments["draft_scores"][:] = -1e5
    arguments["draft_scores"][..., 3] = 0
    for child, token in ((1, 3), (2, 5), (3, 6)):
        arguments["tokens"][:, child] = token
    path, num_accepted, bonus = run(arguments, recursive)
    drawn = told.draft.sampled[:, 1]  # others are at temperature 0
    assert drawn.sum() >= 4
    assert (path[drawn] <= 1).all()
    assert (bonus[drawn & (num_accepted == 0)] != 3).all()


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    arguments, _ = problem(CASES[:2], 8, kernel_device)
    for name, message in (
        ("temperature", "temperature"),
        ("draft_scores", "draft scores"),
        ("seed", "seed"),
        ("distribution", "distribution"),
    ):
        with pytest.raises(ValueError, match=message):
            run(arguments | {name: arguments[name][:, :1] if name == "draft_scores" else arguments[name][:1]}, True)
    with pytest.raises(ValueError, match="workspace"):
        run(arguments, True, workspace=module.make_workspace(2, 5, kernel_device))


def test_without_triton_the_reference_decides():
    arguments, told = problem(CASES, 21)
    del arguments["kept"]
    for rule in RATIO_RULES:
        if rule in ("recursive", "traversal"):
            found = verify_ratio_reference(rule, **arguments, max_depth=DEPTH)
            wrong, clear = disagreements(found, told, RATIO_RULES[rule])
            assert not wrong.any()
            assert clear.sum() >= 0.9 * len(CASES)
