"""Parts of the draft matrix: a random target, a head per configuration, the engine's drafts, and training's predictions for each.

A wrong draft changes no output, it is only accepted less often. So drafts are compared with the trainers' own forward
(Head.predict) on the trainers' own features (train/teacher/features.py). A stand-in replaces the verifier: random heads are almost
never right, and drafting must go on from accepted tokens.

Letters: R rows, T tokens per row, A residual streams, H hidden size, V vocabulary, D the tree's depth, N nodes.
"""

from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.block import BlockHead
from headstart.heads.block_config import BlockConfig
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.heads.eagle3 import Eagle3, Eagle3Config
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from headstart.inference.engine.engine import Engine
from headstart.inference.engine.options import EngineOptions
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.verifiers import Strict
from headstart.tests.inference.speculation.given_target import GivenTarget
from headstart.train.teacher.features import FrozenTarget

VOCAB, MAX_TOKENS = 97, 12
ROW_LENGTHS, ROWS = (40, 112), 16  # of training's forwards: few shapes, for on a GPU each is compiled


def make_target(device, num_layers):
    """A random Llama as trainers have it; no two of its norms are alike."""
    torch.manual_seed(num_layers)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    randomize(model)
    return FrozenTarget(model.to(device).requires_grad_(False))


@torch.no_grad()
def randomize(module):
    """Random parameters, none of them neutral: no bias is zero, no norm's weight is one, no two tables are equal."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            weighs = name.endswith("weight")  # of a norm
            parameter.uniform_(0.5, 1.5) if weighs else parameter.normal_(std=0.5)
        elif "emb" in name:
            parameter.normal_()
        else:
            scores = "lm_head" in name or name.startswith("head.")  # the likeliest tokens shall be clearly so
            parameter.normal_(std=(4.0 if scores else 1.0) * parameter.shape[1] ** -0.5)


def make_head(kind, target, embedding=None, **changes):
    """A random head. embedding, of EAGLE's: "target's", "own" (its file held one), "none" (it held none: the engine gives it)."""
    shape = dict(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    torch.manual_seed(5)
    if kind is Medusa:
        head = Medusa(MedusaConfig(**shape | dict(num_heads=3) | changes))
    elif kind is MLPSpeculator:
        head = MLPSpeculator(MLPSpeculatorConfig(**shape | dict(inner_size=32) | changes))
    else:
        config = {Eagle: EagleConfig, Eagle3: Eagle3Config, BlockHead: BlockConfig}[kind]
        head = kind(target.layer_config(config, **dict(num_speculative_tokens=3) | changes))
    randomize(head)
    if getattr(head, "d2t", None) is not None:
        drafted = torch.randperm(VOCAB)[: len(head.d2t)].sort().values
        head.set_draft_vocabulary(drafted - torch.arange(len(drafted)), torch.isin(torch.arange(VOCAB), drafted))
    if embedding == "target's":
        head.take_embedding(target.embedding)
    elif embedding == "none":
        head.embed_tokens = None
    elif embedding == "own":
        head.embedding_is_targets = False
    return head.to(target.lm_head.weight.device)


@dataclass
class Root:
    """One request's draft of one step. A path is a tuple of tokens, that of the root ()."""

    request: int
    length: int  # number of committed tokens; the root is the next one
    tokens: list
    parents: list
    company: int  # number of requests in the step
    kept: dict = field(default_factory=dict)  # path -> scores [V] that the head gave after it
    handed: dict = field(default_factory=dict)  # the same, as given to the verifier (if they were)
    candidates: list | None = None  # [D][.] of the engine's own record after the draft's first choices

    @property
    def paths(self):
        """Of all nodes, in their order."""
        found = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:]):
            found.append((*found[parent], token))
        return found


class Watch:
    """A context in which every draft of a drafter is kept as a Root, with the scores that it was drawn from."""

    def __init__(self, drafter):
        self.roots, self.drafter, self.sequential = [], drafter, drafter.autoregressive
        self.watched = ("propose", "start", "expand") if self.sequential else ("propose", "distributions")

    def __enter__(self):
        for name in self.watched:
            setattr(self, name, getattr(self.drafter, name))
            setattr(self.drafter, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_):
        for name in self.watched:
            delattr(self.drafter, name)

    def _start(self, batch):
        found = self.start(batch)
        self.kept = [{(): scores.clone()} for scores in self.drafter.whole(found[0])[0]]
        self.rows = [[] for _ in self.kept]  # of each request the tokens of the expanded nodes
        return found

    def _expand(self, batch, level, tokens, state):
        found = self.expand(batch, level, tokens, state)
        scores = self.drafter.whole(found[0])
        ways = level.ancestors.expand(len(self.rows), *level.ancestors.shape[-2:]).tolist()
        for request, rows in enumerate(self.rows):
            rows += tokens[request].tolist()
            for node, way in enumerate(ways[request]):
                self.kept[request][tuple(rows[row] for row in way)] = scores[node, request].clone()
        return found

    def _distributions(self, batch, num_depths):
        self.by_depth = self.distributions(batch, num_depths)  # [K, B, V]
        return self.by_depth

    def _propose(self, batch, tree, processor=None):
        drafted = self.propose(batch, tree, processor)
        topology = tree if drafted.tree is None else drafted.tree
        parents = topology.parents.expand(drafted.tokens.shape).tolist()
        for i, (request, length) in enumerate(zip(batch.seed.tolist(), batch.committed.tolist())):
            root = Root(request, length, drafted.tokens[i].tolist(), parents[i], len(parents))
            inner = sorted({*root.parents})
            if self.sequential:
                root.kept = self.kept[i]
            else:  # nodes of one depth share a head's scores
                root.kept = {root.paths[n]: self.by_depth[len(root.paths[n]), i].clone() for n in inner}
                if tree.tree.grows:  # nodes were looked at that are not in the tree
                    root.kept |= {(0,) * d: scores[i].clone() for d, scores in enumerate(self.by_depth)}
            if drafted.scores is not None:
                root.handed = {root.paths[n]: drafted.scores[drafted.distribution[n], i].clone() for n in inner}
            self.roots.append(root)
        return drafted


class Accepting:
    """A rule that accepts in turn a deepest node, none, one of depth 1 and so on, whatever the target's tokens; then `strict`."""

    name = "accepting"

    def __init__(self):
        self.steps = {}  # how many each request had

    @property
    def undrafted(self):
        return self

    def __call__(self, tree, draft, target):
        tokens, target_tokens, batch = target.drafted, target.sample().clone(), target.batch
        shape = tokens.shape
        parents, depths = (x.expand(shape).tolist() for x in (tree.parents, tree.depths))
        for i, request in enumerate(batch.seed.tolist()):
            step = self.steps[request] = self.steps.get(request, -1) + 1
            wanted = ((tree.max_depth, 0, 1, 2), (0, tree.max_depth, 2, 1))[request % 2][step % 4]
            same = [node for node, depth in enumerate(depths[i]) if depth == min(wanted, max(depths[i]))]
            node = same[-1 - step // 4 % len(same)]
            while node:
                target_tokens[i, parents[i][node]] = tokens[i, node]
                node = parents[i][node]
        return Strict()(tree, draft, GivenTarget(batch, tokens, target_tokens))


def make_prompts(lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def build(plain, head, tree, chunk=7, **speculative):
    """An LLM with this head and the stand-in of a rule.

    plain: LLM whose target it shares; tree: "chain" or a tree file; chunk: how many prompt tokens are computed in a step
    """
    speculative = {"model": head, "tree": tree, **speculative}
    llm = LLM(plain, max_num_seqs=2, enforce_eager=True, speculative_config=speculative)  # a graph cannot be watched
    rule = Accepting()
    options = EngineOptions(llm.max_model_len, max_num_seqs=2, max_num_batched_tokens=chunk, enforce_eager=True)
    drafts = Speculation(llm.engine.drafter, llm.tree, rule)
    llm.session.engine = Engine.build(llm.engine.decoder, llm.eos_token_ids, options, drafts)
    rule.steps.clear()  # on a GPU steps of padding seats were measured
    llm.engine.record_candidates = tree == "chain"
    return llm


def draft(llm, prompts, temperature=0.0):
    """The drafts of two requests in one batch.  -> texts (their tokens, the prompts included), [Root]"""
    llm.engine.recorded = []
    common = dict(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True)
    with Watch(llm.engine.drafter) as watch:
        outputs = llm.generate(prompts, [SamplingParams(seed=i, **common) for i in range(len(prompts))])
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs)]
    recorded = {(r.seed, len(prompts[r.seed]) + at): candidates for r, at, candidates in llm.engine.recorded}
    roots = [root for root in watch.roots if root.length + 1 < len(texts[root.request])]  # else its request had ended
    for root in roots:
        root.candidates = recorded.get((root.request, root.length))
    return texts, roots


@torch.no_grad()
def predict(target, head, texts, roots, lm_head=None):
    """Training's scores after every path of every root.  -> per root {path: scores [V]}, number of rows that were the text itself

    lm_head [V, H]: what the head reads in the place of the target's.

    All texts are documents of one packed row. Drafted tokens after a root replace the text there; the head reads only features
    before them, so the features stay valid.
    """
    device = target.lm_head.weight.device
    tokens, positions, documents, firsts = [], [], [], []
    for document, text in enumerate(texts):
        firsts.append(len(tokens))
        tokens, positions = tokens + text, positions + [*range(len(text))]
        documents += [document] * len(text)
    most = max(len(path) for root in roots for path in root.kept)
    padding = next(length for length in ROW_LENGTHS if length >= len(tokens) + most) - len(tokens)
    filled = ((tokens, 0), (positions, 0), (documents, -1))
    packed = [torch.tensor([x + [value] * padding], device=device) for x, value in filled]  # [1, T] each
    features = target.features(*packed, head.aux_layers)  # [1, T, (1 + A) H]
    read = features[..., target.hidden_size :] if head.aux_layers else features
    text, found = packed[0][0], [{} for _ in roots]

    rows, reads = [], []  # rows [T]; (row, place of the newest token with a feature, root, path) of all scores
    for root, known in zip(roots, found):
        at, own = firsts[root.request] + root.length, {}  # path -> its row
        for path in sorted(root.kept, key=len, reverse=True):
            row = next((row for longer, row in own.items() if longer[: len(path)] == path), None)
            if row is None:
                row = own[path] = len(rows)
                rows.append(text.clone())
                rows[-1][at + 1 : at + 1 + len(path)] = torch.tensor(path, dtype=torch.int64)
            reads.append((row, at - 1, known, path))
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        input_ids = torch.stack(some + [text] * (ROWS - len(some)))  # [R, T]
        rest = [x.expand(ROWS, -1) for x in packed[1:]]
        batch = input_ids, *rest, target.lm_head.weight if lm_head is None else lm_head
        predictions = head.predict(read.expand(ROWS, -1, -1), *batch, num_steps=most + 1)
        for row, at, known, path in reads:
            if start <= row < start + ROWS:
                depth = len(path)
                state = predictions.states[depth][[(row - start) * len(text) + at]]
                known[path] = _whole(predictions.logits(state, depth)[0], predictions.draft_ids)
    return found, sum(torch.equal(row, text) for row in rows)


def _whole(scores, draft_ids):
    """Scores of the target's tokens: minus infinity for those that a draft vocabulary lacks.  -> [V]"""
    return scores if draft_ids is None else scores.new_full((VOCAB,), -torch.inf).index_copy(0, draft_ids, scores)
