"""The commands of a model card: how an export is used in Headstart, vLLM, SGLang and text-generation-inference, where it can be.

From the projects' own documents and source, 2026-11. An engine has a command where readers.py finds nothing wrong for it.
"""

import json
import shlex

from ...heads.storage.hub_id import split_revision
from ..readers.readers import SGLANG, TGI, VLLM, VLLM_METHODS, files_as_written, judge

PROMPT = "Write a function that reads a file."
# format -> SGLang's name of the algorithm
SGLANG_ALGORITHMS = {"eagle-sglang": "EAGLE", "eagle3": "EAGLE3"}
SGLANG_TOP, SGLANG_TOKENS = 4, 16  # children of a node, and tokens of a step at most


def usage(head, format, name, target, tree, adapted):
    """The section's text.

    name: how the export is called to load it (a folder, OWNER/NAME or OWNER/NAME@BRANCH); target: its name; tree: "static" or
    "chain"; adapted: whether heads and target were trained together with an adapter.
    """
    parts = [_headstart(head, name, target, tree, adapted), _check(name, target)]
    of_merged = ""
    if adapted:
        of_merged = f", where TARGET is `{target}` with the adapter merged (`heads.export --merge-adapter`)"
        target = "TARGET"
    verdicts = judge(files_as_written(head, format))
    takers = {verdict.reader for verdict in verdicts if verdict.loads and not verdict.problems}
    if VLLM in takers and format in VLLM_METHODS:
        parts.append(_vllm(head, format, name, target, of_merged))
    if SGLANG in takers:
        parts.append(_sglang(head, format, name, target))
    if TGI in takers:
        parts.append(_tgi(head, name, target, of_merged))
    return "\n\n".join(parts)


def split_name(name):
    """(repository, branch or None) of an export's name; a folder's has no branch, whatever is in it."""
    return split_revision(name) if "/" in name else (name, None)


def _python(text):
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)


def _headstart(head, name, target, tree, adapted):
    depth = head.num_speculative_tokens
    argument = f"\n    adapter={_python(name)}," if adapted else ""
    shell, option = shlex.quote(name), f" --adapter {shlex.quote(name)}" if adapted else ""
    return f'''```python
from headstart import LLM, SamplingParams

llm = LLM(
    model={_python(target)},{argument}
    speculative_config={{"model": {_python(name)}, "num_speculative_tokens": {depth}, "tree": "{tree}"}},
)
[result] = llm.generate(["{PROMPT}"], SamplingParams(temperature=0.0, max_tokens=96))
print(result.outputs[0].text, result.outputs[0].spec_decode_metrics)
```

The heads alone, as a module: `from headstart import load_head; head = load_head({_python(name)})`. From a terminal:

```sh
headstart generate --model {shlex.quote(target)}{option} --head {shell} --tree {tree} --compare "{PROMPT}"
```'''


def _check(name, target):
    return f"""Whether the files are what was written, and do what this card says:

```sh
heads.export verify {shlex.quote(name)} --model {shlex.quote(target)}
```"""


def _vllm(head, format, name, target, of_merged):
    method, versions = VLLM_METHODS[format]
    repo_id, branch = split_name(name)
    config = {"method": method, "model": repo_id, "num_speculative_tokens": head.num_speculative_tokens}
    config |= {"revision": branch} if branch else {}
    return f"""In {versions}{of_merged}:

```sh
vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(config, ensure_ascii=False))}
```"""


def _sglang(head, format, name, target):
    algorithm, depth = SGLANG_ALGORITHMS[format], head.num_speculative_tokens
    repo_id, branch = split_name(name)
    of_branch = f" --speculative-draft-model-revision {shlex.quote(branch)}" if branch else ""
    most = 1 + SGLANG_TOP + (depth - 1) * SGLANG_TOP**2  # of such a tree, the root among them
    return f"""In SGLang (steps, width and tokens of its tree are a start, not a measurement):

```sh
python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} \\
    --speculative-draft-model-path {shlex.quote(repo_id)}{of_branch} --speculative-num-steps {depth} \\
    --speculative-eagle-topk {SGLANG_TOP} --speculative-num-draft-tokens {min(SGLANG_TOKENS, most)}
```"""


def _tgi(head, name, target, of_merged):
    repo_id, branch = split_name(name)
    of_branch = f" --revision {shlex.quote(branch)}" if branch else ""
    # It serves the target that config.json names.
    named = (
        f"config.json must name TARGET as base_model_name_or_path{of_merged}" if of_merged else f"it serves `{target}`"
    )
    return f"""In text-generation-inference, which takes these files as the model and finds the target by config.json ({named}):

```sh
text-generation-launcher --model-id {shlex.quote(repo_id)}{of_branch} --speculate {head.num_speculative_tokens}
```"""
