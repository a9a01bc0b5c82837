"""A throw-away family of heads, added as docs/architecture.md says: which files it touches, and that they suffice.

The family "tables" predicts each of the next tokens by a table of its own from the target's last hidden state. It is written into a
copy of the package, trained, exported, verified, inspected and run there, by the house's own commands; no other file is changed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HEAD = """
from dataclasses import dataclass
import torch
from torch import nn
from .head import Head, Predictions, bytes_of


@dataclass(frozen=True)
class TablesConfig:
    hidden_size: int
    vocab_size: int
    num_speculative_tokens: int = 2
    base_model_name_or_path: str = ""


class Tables(Head):
    autoregressive = False

    def __init__(self, config):
        super().__init__(config)
        made = (nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_speculative_tokens))
        self.tables = nn.ModuleList(made)

    @property
    def max_speculative_tokens(self):
        return self.config.num_speculative_tokens

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        states = [features.flatten(0, 1)] * (num_steps or len(self.tables))
        return Predictions(states, lambda rows, k: self.tables[k](rows.to(self.trained_dtype)))

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        return [table(features[0, rows]) for table in self.tables]

    def draft_bytes(self, lm_head_bytes):
        return {"first": bytes_of(self)}
"""

FORMAT = """
from dataclasses import asdict
from ..storage.reading import Reading
from ..tables import TablesConfig

FORMATS, CONFIG_NAMES = ("tables",), ("tables",)


def recognises(names):
    return "tables.0.weight" in names


def native_format(head):
    return "tables"


def check_format(head, format):
    return format


def to_file(head, format="tables", lm_head_weight=None):
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    return tensors, {"model_type": "tables", **asdict(head.config)}


def from_file(tensors, config):
    names = TablesConfig.__dataclass_fields__
    return Reading(TablesConfig(**{name: config[name] for name in names if name in config}), tensors, "tables", [])
"""

DRAFTER = """
import torch
from ..draft import Draft
from .drafter import Drafter


class TablesDrafter(Drafter):
    def __init__(self, head, decoder, num_speculative_tokens, sampling):
        self.head, self.num_speculative_tokens = head, head.num_speculative_tokens

    def candidates(self, batch, widths):
        logits = torch.stack([table(batch.feature) for table in self.head.tables[: len(widths)]], 1)
        return logits.topk(max(widths)).indices

    def propose(self, batch, tree, processor=None):
        drafts = self.candidates(batch, [1] * tree.max_depth)[..., 0]
        return Draft(torch.cat((batch.root[:, None], drafts), 1), tree)


DRAFTER = TablesDrafter
"""

READERS = """
from .readers import APART, TGI, Reader

FORMATS_ARE, FROM_LM_HEAD = APART, False
READERS = (Reader(TGI, without="no support of tables"),)


def in_card(head):
    return "Tables", "draft", [("tables", len(head.tables))]


def title(config):
    return "tables"


def features(head, depth):
    return {"kind": "final"}


def tables(head):
    return "own, one per table", None
"""

SCRIPT = '''
"""Train tables."""
from dataclasses import dataclass
from headstart.heads.tables import Tables, TablesConfig
from headstart.train.data.rows import build_rows, load_documents, rows_to_check
from headstart.train.loss.distillation import Objective, summarize
from headstart.train.loss.losses import Loss
from headstart.train.run.acceptance import build_meter
from headstart.train.run.loop import Training
from headstart.train.run.optimization import build_optimizer
from headstart.train.run.recipe import parse_recipe
from headstart.train.run.run_folder import start_processes
from headstart.train.run.run_recipe import RunRecipe
from headstart.train.run.settled_recipe import settle_recipe
from headstart.train.teacher.features import FrozenTarget, load_target


@dataclass(frozen=True)
class Recipe(RunRecipe):
    @property
    def objective(self):
        return Objective(Loss(self.loss, self.lk_eta), [1.0, 1.0])


def main(argv):
    recipe = parse_recipe(Recipe, argv, __doc__)
    processes = start_processes(recipe, "tables")
    model, tokenizer = load_target(recipe.target, processes.device, recipe.target_dtype)
    recipe = settle_recipe(recipe, processes, tokenizer)
    target = FrozenTarget(model)
    documents, held_out = load_documents(recipe, tokenizer, processes)
    packed, labels_per_row = build_rows(documents, recipe.row_length, tokenizer.pad_token_id, processes.note)
    target.check(*rows_to_check(packed, processes.device))
    head = Tables(TablesConfig(target.hidden_size, target.vocab_size, base_model_name_or_path=recipe.target))
    target.initialize(head)
    optimizer = build_optimizer(head, recipe.weight_decay, recipe.beta1, recipe.beta2)
    meter = build_meter(recipe, target, head, held_out, tokenizer=tokenizer, note=processes.note)
    given = dict(target=target, tokenizer=tokenizer, head=head, optimizer=optimizer, packed=packed)
    given |= dict(labels_per_row=labels_per_row, held_out=held_out, meter=meter)
    with Training(recipe, processes, **given) as training:
        for step in training:
            for batch in step:
                with training.autocast:
                    step.backward(head.predict(batch.features, *batch.inputs), batch)
            totals = step.finish()
            if step.logs:
                step.record(summarize(totals, step.objective, step.num_labels))
    return training.status
'''

FILES = {
    "heads/tables.py": HEAD,
    "heads/formats/tables.py": FORMAT,
    "inference/speculation/drafters/tables.py": DRAFTER,
    "hub_export/readers/tables.py": READERS,
    "train/tables.py": SCRIPT,
}
LIST = "heads/families.py"  # gets the family's line, and its imports

USE = """
import sys
from pathlib import Path

target, data, place = sys.argv[1:]
import headstart.train.tables
from headstart.cli import main as headstart_main
from headstart.hub_export.export import main as export_main
from headstart.inference.llm import LLM
from headstart.inference.sampling_params import SamplingParams

assert Path(headstart.__file__).parent == Path(place, "headstart"), headstart.__file__
keys = dict(target=target, data=data, output=f"{place}/run", max_steps=10, lr=0.02, batch_rows=4, row_length=64)
keys |= dict(eval_prompts=2, eval_tokens=8, tracker="none", autocast="no", log_every=5)
argv = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
assert headstart.train.tables.main(argv) == 0
assert export_main([f"{place}/run", "--format", "tables", "--output", f"{place}/export"]) == 0
assert export_main(["verify", f"{place}/export"]) == 0
assert headstart_main(["inspect", f"{place}/export", "--json"]) == 0
params = [SamplingParams(seed=i, temperature=i % 2 * 0.8, max_tokens=24, ignore_eos=True) for i in range(4)]
prompts = [[i + 3, 17, 40] for i in range(4)]
fast = LLM(target, dtype="float32", speculative_config={"model": f"{place}/export", "method": "tables"})
outputs = [llm.generate(prompts, params) for llm in (LLM(target, dtype="float32"), fast)]
plain, drafted = ([one.outputs[0].token_ids for one in each] for each in outputs)
assert drafted == plain
assert fast.get_stats()["num_draft_tokens"] > 0
"""


def test_a_new_family_touches_its_own_files_and_the_list(tmp_path, tiny_target):
    place = tmp_path / "headstart"
    left_out = shutil.ignore_patterns(
        ".*", "tests", "assets", "docs", "benchmarks", "runs", "__pycache__", "build", "dist"
    )
    shutil.copytree(ROOT, place, ignore=left_out)
    for name, text in FILES.items():
        assert not (place / name).exists()
        (place / name).write_text(text.lstrip(), encoding="utf-8")
    families = (place / LIST).read_text(encoding="utf-8")
    line = '    Family("tables", "Tables", Tables, tables_format, "0000.00000"),\n'
    imports = "from .formats import tables as tables_format\nfrom .tables import Tables\n"
    changed = families.replace("FAMILIES = (\n", f"FAMILIES = (\n{line}").replace(
        "from .medusa", f"{imports}from .medusa"
    )
    assert len(changed) == len(families) + len(line) + len(imports)
    (place / LIST).write_text(changed, encoding="utf-8")
    said = [(f"Count from {i}.", " ".join(str(i + step) for step in range(12))) for i in range(40)]
    talks = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in said]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", USE, str(tiny_target), str(tmp_path / "data.jsonl"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"family": "Tables"' in done.stdout
