"""Choose how an engine speculates: drafter, tree, verifier, and the depth of each step's drafts.

choice = choose_speculation(SpeculativeOptions.parse(config), target_config, max_num_seqs)    # raises every ValueError
speculation = choice.build(decoder, max_positions)                                            # on the target's device
"""

from dataclasses import dataclass, field, replace

from ...kernels.sampling.sample import MAX_WIDTH
from .adaptive import Adaptive, OneDepth, PerBatchSize, buckets, depths_to_try
from .draft_sampling import OWN_NOISE, RATIO_VERIFIERS, check_sampling
from .drafters.drafter import Drafter, NoDrafter
from .options import DRAFT_SAMPLE_METHODS, SpeculativeOptions
from .proposers import Proposer, find_proposer
from .tree import DEFAULT_DYNAMIC, ROOT_ONLY, GrowingTree, Tree, chain, load_tree
from .verifiers import Ratio, Strict, Synthetic, check_rates, rates_for_length


@dataclass(frozen=True)
class Speculation:
    """Speculation as the engine runs it.

    drafter: a Drafter on the target's device; tree: the tree it drafts; verifier: one of verifiers.py; plan: the depth of each
    step's drafts (adaptive.py), None: the whole tree in every step.
    """

    drafter: Drafter = field(default_factory=NoDrafter)
    tree: Tree | GrowingTree = ROOT_ONLY
    verifier: object = field(default_factory=Strict)
    plan: object = None

    def __post_init__(self):
        if self.plan is None:
            object.__setattr__(self, "plan", OneDepth(self.tree.max_depth))


@dataclass(frozen=True)
class Choice:
    """The choice of a Speculation, before anything is on a device."""

    options: SpeculativeOptions
    proposer: Proposer
    tree: Tree | GrowingTree
    verifier: str
    sampling: str
    rates: list | None  # of the verifier "synthetic"
    plan: object

    @property
    def head(self):
        """The head that drafts, or None."""
        return self.proposer.head

    def build(self, decoder, max_positions):
        """The Speculation on the device of `decoder`, the target's; max_positions: longest sequence, the tree's places included."""
        if self.verifier == "synthetic":
            verifier = Synthetic(self.rates, decoder.device)
        else:
            verifier = Strict() if self.verifier == "strict" else Ratio(self.verifier)
        drafter = self.proposer.build(self.tree, self.sampling, decoder, max_positions)
        drafter.tells_confidence = self.plan is not None and self.plan.measures
        return Speculation(drafter, self.tree, verifier, self.plan)


@dataclass(frozen=True)
class NoSpeculation:
    """Plain decoding, in the place of a Choice."""

    head, tree = None, ROOT_ONLY

    def build(self, decoder, max_positions):
        return Speculation()


def choose_speculation(options, target, max_num_seqs):
    """The Choice that SpeculativeOptions ask for; NoSpeculation for None.

    target: the target's config; max_num_seqs: number of requests that can run at once. Raises ValueError for parts that do not fit.
    """
    if options is None:
        return NoSpeculation()
    proposer = find_proposer(options, target)
    tree = _choose_tree(options, proposer)
    verifier = options.verifier_on(tree)
    sampling = _choose_sampling(options, verifier, tree)
    if sampling in OWN_NOISE:
        tree = tree.without_gaps()
    check_sampling(verifier, sampling, tree)
    check_width(tree, target.get_text_config().vocab_size)
    rates = _choose_rates(options, verifier, tree)
    return Choice(options, proposer, tree, verifier, sampling, rates, _choose_plan(options, tree, max_num_seqs))


def _choose_tree(options, proposer):
    depth, most, name = options.num_speculative_tokens, proposer.max_depth, options.tree
    if depth is not None and (type(depth) is not int or not 1 <= depth <= most):
        limit = f"the head's {most}" if most == proposer.depth else str(most)
        raise ValueError(f"num_speculative_tokens must be from 1 to {limit}, got {depth!r}")
    if name == "dynamic":
        deepest = depth or min(most, DEFAULT_DYNAMIC.max_depth)
        # A shallow tree may have fewer candidates than nodes: truncated() reduces the nodes.
        deepened = replace(DEFAULT_DYNAMIC, max_depth=max(deepest, DEFAULT_DYNAMIC.max_depth))
        tree = deepened.truncated(deepest)
    elif name == "chain":
        if depth is None and proposer.depth is None:
            raise ValueError(f"the method {proposer.method!r} needs num_speculative_tokens: how many tokens it drafts")
        tree = chain(depth or proposer.depth)
    else:
        tree = load_tree(proposer.static_tree_file() if name == "static" else name)
    proposer.check_tree(tree)
    if tree.max_depth > most and name != "static":
        raise ValueError(
            f"{name} drafts {tree.max_depth} tokens deep, the head has {most}: measure a tree for this head"
        )
    return tree.truncated(depth or most)


def check_width(tree, vocab_size):
    """ValueError if a node has more candidates than can be drawn, or than there are tokens."""
    if tree.width > min(MAX_WIDTH, vocab_size):
        raise ValueError(
            f"the tree takes {tree.width} candidates after a node, at most {min(MAX_WIDTH, vocab_size)} can be drawn of the "
            f"target's {vocab_size} tokens: narrow it"
        )


def _choose_sampling(options, verifier, tree):
    """How drafts are sampled: as asked, else the default of verifier and tree."""
    if options.draft_sample_method is not None:
        return DRAFT_SAMPLE_METHODS[options.draft_sample_method]
    if verifier in RATIO_VERIFIERS:
        return "greedy" if tree.grows else "sampled"
    return "shared_noise"


def _choose_rates(options, verifier, tree):
    """The acceptance rates of the verifier "synthetic"; None for the others."""
    rates, length = options.acceptance_rates, options.acceptance_length
    if verifier != "synthetic":
        if rates is not None or length is not None:
            raise ValueError("acceptance_rates and acceptance_length belong to the verifier 'synthetic'")
        return None
    if (rates is None) == (length is None):
        raise ValueError("the verifier 'synthetic' takes acceptance_rates or acceptance_length, one of the two")
    if tree.grows:
        raise ValueError(
            "the verifier 'synthetic' accepts along the tree's deepest path: give it a chain or a static tree"
        )
    if rates is None:
        return rates_for_length(length, tree.max_depth)
    check_rates(rates)
    if len(rates) < tree.max_depth:
        raise ValueError(f"acceptance_rates has {len(rates)} positions, the drafts are {tree.max_depth} deep")
    return rates


def _choose_plan(options, tree, max_num_seqs):
    """The plan for the depth of each step's drafts (adaptive.py); None: the whole tree in every step."""
    told = options.num_speculative_tokens_per_batch_size
    if told is None:
        return Adaptive(depths_to_try(tree.max_depth), buckets(max_num_seqs)) if options.adaptive else None
    whole = isinstance(told, dict) and all(type(x) is int for pair in told.items() for x in pair)
    if (
        not whole
        or 1 not in told
        or min(told) < 1
        or not 0 <= min(told.values()) <= max(told.values()) <= tree.max_depth
    ):
        raise ValueError(
            "num_speculative_tokens_per_batch_size must be a dict {smallest batch size: tokens}, 1 among the batch sizes and "
            f"tokens from 0 to the tree's {tree.max_depth}, got {told!r}"
        )
    return PerBatchSize(told, tree.max_depth)
