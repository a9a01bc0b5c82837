"""Acceptance of a head while it trains: the engine's own figure on held-out prompts, equal to that of serving.

The engine is built once, on the loaded target (no second copy) and on the head in training (read in place). For a target that
the engine does not run yet, or that is sharded over the ranks, the figure is teacher-forced on the held-out conversations and
marked as such.
"""

import torch

from ...evaluation.acceptance import measure_acceptance
from ...inference.llm import LLM
from ...inference.models.decoder import UnsupportedArchitecture
from ...inference.sampling_params import SamplingParams
from ..data.encoding import encode_conversations
from ..loss.distillation import count_teacher_forced_runs, find_labels


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
        tokenizer=tokenizer,
        max_tokens=recipe.eval_tokens,
        max_length=min(target.max_positions, 2 * recipe.row_length),
        chunk_tokens=recipe.chunk_tokens,
        note=note,
        rules=recipe.data_rules,
    )


class AcceptanceMeter:
    """Measures a head on held-out conversations.

    target: FrozenTarget; head: read in place; conversations: held-out ones; max_tokens: new tokens per prompt; max_length: longest
    prompt + output; note(text) tells the user; rules: of encode_conversations. Raises ValueError if no conversation fits.
    """

    def __init__(self, target, head, conversations, *, tokenizer, max_tokens, max_length, chunk_tokens, note, rules=1):
        self.target, self.tokenizer, self.head = target, tokenizer, head
        self.chunk_tokens, self.max_tokens, self.note, self.llm = chunk_tokens, max_tokens, note, None
        encoded = encode_conversations(tokenizer, conversations, rules=rules)
        prompts = [ids[: supervised.index(True)] for ids, supervised in encoded]
        fits = [0 < len(prompt) <= max_length - max_tokens for prompt in prompts]
        self.prompts = [{"prompt": tokenizer.decode(p), "prompt_token_ids": p} for p, fit in zip(prompts, fits) if fit]
        self.encoded = [one for one, fit in zip(encoded, fits) if fit]
        self.max_length = max_length
        if not self.prompts:
            raise ValueError(
                f"no held-out prompt leaves room for {max_tokens} new tokens within {max_length}: lower eval_tokens, or "
                "set eval_prompts to 0"
            )
        if len(self.prompts) < len(conversations):
            note(f"{len(conversations) - len(self.prompts)} of {len(conversations)} held-out prompts are too long")
        if target.is_sharded:
            note(
                "acceptance is teacher-forced on the held-out text, not the engine's: the target is sharded over the GPUs"
            )
            return
        try:
            self.llm = LLM(
                model=target.model,
                tokenizer=tokenizer,
                # No prefix cache: its pages would hold the head's own keys, computed with older weights.
                enable_prefix_caching=False,
                max_model_len=min(max_length, max(len(prompt) for prompt in prompts) + max_tokens),
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
        return "engine" if self.llm else "teacher_forced"

    def measure(self):
        """A dict: acceptance_length, per_position, num_steps, source, samples, and from the engine also its rates.

        None, with a note, if the prompts give nothing to measure. With a sharded target all ranks measure together, without
        samples.
        """
        if self.llm:
            params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
            try:
                return measure_acceptance(self.llm, self.prompts, params) | {"source": self.source}
            except ValueError as error:
                self.note(f"acceptance was not measured: {error}")
                return None
        lm_head_weight, num_depths = self.target.lm_head.weight, self.head.num_speculative_tokens
        device = lm_head_weight.device
        reached, roots = [0] * num_depths, 0
        for ids, supervised in self.encoded:
            input_ids = torch.tensor([ids[: self.max_length]], device=device)
            marks = torch.tensor([supervised[: self.max_length]], device=device)
            document_ids = torch.zeros_like(input_ids)
            batch = (input_ids, torch.arange(input_ids.shape[1], device=device)[None], document_ids)
            with torch.no_grad():
                features = self.target.features(*batch, self.head.aux_layers)
                _, read = self.target.split(features, self.head.aux_layers)
                predictions = self.head.predict(read, *batch, lm_head_weight)
            labels = find_labels(input_ids, document_ids, marks, num_depths)
            runs, count = count_teacher_forced_runs(predictions, labels, self.chunk_tokens)
            reached = [total + run for total, run in zip(reached, runs)]
            roots += count
        if not roots:
            self.note(f"acceptance was not measured: no held-out answer is longer than {num_depths} tokens")
            return None
        per_position = [count / roots for count in reached]
        return {
            "acceptance_length": 1 + sum(per_position),
            "per_position": per_position,
            "num_steps": roots,
            # No samples: ranks that generate together might not end together.
            "samples": [] if self.target.is_sharded else [self._sample(prompt) for prompt in self.prompts[:2]],
            "source": self.source,
        }

    def _sample(self, prompt):
        """The target's own greedy answer, as a transformers model."""
        ids = torch.tensor([prompt["prompt_token_ids"]], device=self.target.lm_head.weight.device)
        output = self.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(self.max_tokens, 48), do_sample=False
        )
        text = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return {"prompt": prompt["prompt"], "output": text}
