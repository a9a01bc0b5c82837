"""Acceptance of a head while it trains: the engine's own figure on held-out prompts, equal to that of serving.

The engine is built once, on the loaded target (no second copy) and on the head in training (read in place). For a target that is
sharded over the ranks it is built for each measurement, on all their GPUs (divided_engine.py). Where the engine does not run the
target, or cannot divide it so, the figure is teacher-forced on the held-out conversations and marked as such.

Named sets have figures of their own, at temperatures 0 and 1: of first turns, and of later turns (the last answer of every
conversation with several). One measurement makes at most 4 eval_prompts outputs a set, of eval_tokens tokens each; the prompts of a
run without names are decoded once, at temperature 0. Beside it stands the head's loss on held-out answers, teacher-forced: the
forward KL from the target's distribution, whatever the run minimises, so that all runs on a target compare.
"""

import hashlib
import json
from dataclasses import replace
from functools import partial

import torch

from ...evaluation.acceptance import count_by_request, measure_acceptance, pool
from ...inference.llm import LLM
from ...inference.models.decoder import UnsupportedArchitecture
from ...inference.sampling_params import SamplingParams
from ..data.encoding import encode_conversations
from ..data.packed.packing import lay_out
from ..data.rows import select_rows
from ..loss.distillation import Objective, accumulate_gradients, count_teacher_forced_runs, find_labels
from ..loss.losses import Loss
from ..teacher.divided_engine import DividedEngine

TEMPERATURES = (0.0, 1.0)  # of named sets


def build_meter(recipe, target, head, conversations, *, tokenizer, note):
    """The AcceptanceMeter of a run; None if no conversations are held out.

    It must be built before training reads any feature. Its engine packs the target's weights, and packed products may differ from
    separate ones in the last bit; a resumed run must compute the same bits.
    """
    if not conversations:
        return None
    return AcceptanceMeter(
        target,
        head,
        conversations,
        source=recipe.target,
        tokenizer=tokenizer,
        max_tokens=recipe.eval_tokens,
        max_length=min(target.max_positions, 2 * recipe.row_length),
        row_length=recipe.row_length,
        chunk_tokens=recipe.chunk_tokens,
        note=note,
        rules=recipe.data_rules,
    )


class AcceptanceMeter:
    """Measures a head on held-out conversations.

    target: FrozenTarget, of the folder or Hub id `source`; head: read in place; conversations: held-out ones, "set" of their
    first message names their set; max_tokens: new tokens per prompt; max_length: longest prompt + output; row_length: of the
    rows that the loss is computed on; note(text) tells the user; rules: of encode_conversations. Raises ValueError if no
    conversation of a set fits.
    """

    def __init__(
        self,
        target,
        head,
        conversations,
        *,
        source,
        tokenizer,
        max_tokens,
        max_length,
        row_length,
        chunk_tokens,
        note,
        rules=1,
    ):
        self.target, self.tokenizer, self.head = target, tokenizer, head
        self.chunk_tokens, self.max_tokens, self.note = chunk_tokens, max_tokens, note
        self.llm = self.divided = None
        self.max_length, longest = max_length, max_length - max_tokens
        names = [messages[0].get("set", "") for messages in conversations]
        plain = [[_without_set(messages[0]), *messages[1:]] for messages in conversations]
        encoded = encode_conversations(tokenizer, plain, rules=rules)
        prompts = [ids[: supervised.index(True)] for ids, supervised in encoded]
        fits = [0 < len(prompt) <= longest for prompt in prompts]
        self.prompts = [self._prompt(ids) for ids, fit in zip(prompts, fits) if fit]
        self.encoded = [one for one, fit in zip(encoded, fits) if fit]
        self.names = [name for name, fit in zip(names, fits) if fit]  # of the set of each prompt
        self.sets = list(dict.fromkeys(names))
        if lost := next((name for name in self.sets if name not in self.names), None):
            raise ValueError(
                f"no prompt of eval_data {lost} leaves room for {max_tokens} new tokens within {max_length}: lower eval_tokens, "
                "or leave the set out"
            )
        if not self.prompts:
            raise ValueError(
                f"no held-out prompt leaves room for {max_tokens} new tokens within {max_length}: lower eval_tokens, or "
                "set eval_prompts to 0"
            )
        if len(self.prompts) < len(conversations):
            note(f"{len(conversations) - len(self.prompts)} of {len(conversations)} held-out prompts are too long")
        self.later, self.later_names = [], []  # of named sets
        for name, (ids, supervised) in zip(self.names, self.encoded):
            starts = [i for i, marked in enumerate(supervised) if marked and not supervised[i - 1]]
            if name and len(starts) > 1 and starts[-1] <= longest:
                self.later.append(self._prompt(ids[: starts[-1]]))
                self.later_names.append(name)
        counts = [f"{name} {self.names.count(name)} and {self.later_names.count(name)}" for name in self.sets if name]
        if counts:
            note(f"prompts of first and later turns: {', '.join(counts)}; each decoded at temperatures 0 and 1")
        pad = tokenizer.pad_token_id or 0
        of_sets = {name: [one for one, own in zip(self.encoded, self.names) if own == name] for name in self.sets}
        self.rows = {name: lay_out(found, row_length, pad) for name, found in of_sets.items()}
        self.limit = min(max_length, self._longest_prompt(prompts) + max_tokens)
        if target.is_sharded:
            self.divided = self._divided(source)
            return
        try:
            self.llm = LLM(
                model=target.model,
                tokenizer=tokenizer,
                # No prefix cache: its pages would hold the head's own keys, computed with older weights.
                enable_prefix_caching=False,
                max_model_len=self.limit,
                speculative_config={
                    "model": head,
                    "num_speculative_tokens": head.num_speculative_tokens,
                    "tree": "chain",
                },
            )
        except UnsupportedArchitecture as error:
            note(f"acceptance is teacher-forced on the held-out text, not the engine's: {error}")

    @property
    def source(self):
        """What gives its figures, unless the engine of a divided target fails."""
        return "engine" if self.llm or self.divided else "teacher_forced"

    @property
    def measured_on(self):
        """A hash of what the figures follow from beside the head: figures with the same one compare."""
        measured = self.names, self.encoded, self.max_tokens if self.source == "engine" else None
        return hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]

    def measure(self, stop=None):
        """A dict: acceptance_length, per_position, num_steps, source, measured_on, samples, head_loss; from the engine also rates.

        With named sets these pool all sets' first turns, and `sets` is a list of {"set", "turns", "temperature", "num_prompts",
        acceptance_length, per_position, num_steps} (teacher-forced: without turns and temperature), `set_losses` {set: head_loss}.
        None, with a note, if the prompts give nothing to measure. With a sharded target all ranks measure together, teacher-
        forced without samples. stop: StopSignals; the engine's measurement ends with None after the part in which a signal
        arrives.
        """
        if self.divided:
            measured = self._by_divided_engine(stop)
        else:
            measured = self._by_engine(self.llm, stop) if self.llm else self._teacher_forced()
        if measured is None:
            return None
        losses = {name: self._head_loss(rows) for name, rows in self.rows.items()}
        total, count = map(sum, zip(*losses.values()))
        measured["head_loss"] = total / max(count, 1)
        if any(self.sets):
            measured["set_losses"] = {name: total / max(count, 1) for name, (total, count) in losses.items()}
        return measured | {"measured_on": self.measured_on}

    def _divided(self, source):
        """The DividedEngine of a sharded target; None, with a note, if there is none."""
        try:
            return DividedEngine(source, self.target)
        except ValueError as error:
            self.note(f"acceptance is teacher-forced on the held-out text, not the engine's: {error}")

    def _by_divided_engine(self, stop):
        try:
            work = partial(self._by_engine, stop=stop)
            return self.divided.run(work, self.head, self.tokenizer, max_model_len=self.limit)
        except ValueError as error:
            self.note(f"acceptance is teacher-forced on the held-out text this time, not the engine's: {error}")
            return self._teacher_forced()

    def _by_engine(self, llm, stop):
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        try:
            measured = measure_acceptance(llm, self.prompts, params)
        except ValueError as error:
            self.note(f"acceptance was not measured: {error}")
            return None
        greedy = measured.pop("by_request")
        if any(self.sets):
            measured["sets"] = self._sets_by_engine(llm, greedy, stop)
        return None if stop and stop.requested else measured | {"source": "engine"}

    def _sets_by_engine(self, llm, greedy, stop):
        """Figures of every set, up to a signal.  greedy: counts by request of the first turns at temperature 0"""
        counts = {("first", 0.0): greedy}
        asked = {"first": (self.prompts, self.names), "later": (self.later, self.later_names)}
        for turns, (prompts, _) in asked.items():
            for temperature in TEMPERATURES:
                wanted = prompts and not (stop and stop.requested)
                if wanted and (turns, temperature) not in counts:
                    own = {"temperature": temperature, "max_tokens": self.max_tokens}
                    params = [SamplingParams(**own, seed=i) for i in range(len(prompts))]
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    counts[turns, temperature] = count_by_request(outputs, llm.engine.tree.max_depth)
        figures = []
        for name in self.sets:
            for (turns, temperature), found in counts.items():
                own = [count for count, of in zip(found, asked[turns][1]) if of == name]
                if sum(steps for steps, *_ in own):
                    told = {"set": name, "turns": turns, "temperature": temperature, "num_prompts": len(own)}
                    figures.append(told | pool(own))
        return figures

    def _teacher_forced(self):
        num_depths = self.head.num_speculative_tokens
        counts = [self._count_runs(*one) for one in self.encoded]  # [roots, runs that reach position 1, 2, ...] each
        measured = pool(counts)
        if not measured["num_steps"]:
            self.note(f"acceptance was not measured: no held-out answer is longer than {num_depths} tokens")
            return None
        if any(self.sets):
            own = {name: [count for count, of in zip(counts, self.names) if of == name] for name in self.sets}
            measured["sets"] = [{"set": name, "num_prompts": len(found)} | pool(found) for name, found in own.items()]
        # No samples: ranks that generate together might not end together.
        samples = [] if self.target.is_sharded else [self._sample(prompt) for prompt in self.prompts[:2]]
        return measured | {"samples": samples, "source": "teacher_forced"}

    @torch.no_grad()
    def _count_runs(self, ids, supervised):
        """[roots, runs that reach position 1, 2, ...] of one conversation."""
        device = self.target.lm_head.weight.device
        input_ids = torch.tensor([ids[: self.max_length]], device=device)
        marks = torch.tensor([supervised[: self.max_length]], device=device)
        batch = input_ids, torch.arange(input_ids.shape[1], device=device)[None], torch.zeros_like(input_ids)
        predictions, labels, _ = self._predict(*batch, marks)
        runs, count = count_teacher_forced_runs(predictions, labels, self.chunk_tokens)
        return [count, *runs]

    @torch.no_grad()
    def _head_loss(self, rows):
        """(sum over labels and depths of the forward KL, their number) on packed rows.

        Of a head that chooses among a few tokens, the KL of its whole logits: that of its choice would be infinite.
        """
        objective = Objective(Loss("kl"), [1.0] * self.head.num_speculative_tokens)
        shared = {"lm_head": self.target.lm_head, "objective": objective, "chunk_tokens": self.chunk_tokens}
        total = torch.zeros(2, dtype=torch.float64)
        for row in range(len(rows)):
            predictions, labels, last = self._predict(*select_rows(rows, [row], self.target.lm_head.weight.device))
            predictions = replace(predictions, logits=predictions.whole_logits or predictions.logits)
            figures = accumulate_gradients(predictions, last, labels, num_labels=1, **shared)
            total += figures[:, :2].sum(0).cpu()
        return total.tolist()

    def _predict(self, input_ids, position_ids, document_ids, supervised):
        """(predictions, labels, the target's last states [M, H]) of rows [B, T]."""
        batch = input_ids, position_ids, document_ids
        features = self.target.features(*batch, self.head.aux_layers)
        last, read = self.target.split(features, self.head.aux_layers)
        predictions = self.head.predict(read, *batch, self.target.lm_head.weight)
        return predictions, find_labels(input_ids, document_ids, supervised, self.head.num_speculative_tokens), last

    def _prompt(self, ids):
        return {"prompt": self.tokenizer.decode(ids), "prompt_token_ids": ids}

    def _longest_prompt(self, first):
        """Tokens of the longest prompt.  first: of all first turns, those that are too long among them"""
        return max(map(len, [*first, *(prompt["prompt_token_ids"] for prompt in self.later)]))

    def _sample(self, prompt):
        """The target's own greedy answer, as a transformers model."""
        ids = torch.tensor([prompt["prompt_token_ids"]], device=self.target.lm_head.weight.device)
        output = self.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(self.max_tokens, 48), do_sample=False
        )
        text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return {"prompt": prompt["prompt"], "output": text}


def describe_measurement(measured):
    """Lines that tell the user what AcceptanceMeter.measure gave: all prompts together, then each named set."""
    how = "" if measured["source"] == "engine" else ", teacher-forced"
    positions = " ".join(f"{share:.2f}" for share in measured["per_position"])
    lines = [
        f"{measured['acceptance_length']:.2f} tokens per step on held-out prompts{how}, accepted by position {positions}; loss of "
        f"the head {measured['head_loss']:.3f}"
    ]
    for name, loss in measured.get("set_losses", {}).items():
        own, figures = [one for one in measured["sets"] if one["set"] == name], []
        for turns in dict.fromkeys(one.get("turns") for one in own):
            some = [one for one in own if one.get("turns") == turns]
            told = (f"{one['acceptance_length']:.2f} at temperature {one['temperature']:g}" for one in some if turns)
            figures.append(f"{turns} turns {' and '.join(told)}" if turns else f"{some[0]['acceptance_length']:.2f}")
        lines.append(f"{name}, tokens per step: {'; '.join(figures)}; loss of the head {loss:.3f}")
    if "heldout_loss" in measured:
        losses = measured["heldout_loss"], measured["frozen_heldout_loss"]
        lines.append(
            f"loss of the adapted target on held-out answers {losses[0]:.4f}, of the frozen one {losses[1]:.4f}"
        )
    return lines


def _without_set(message):
    return {name: value for name, value in message.items() if name != "set"}
