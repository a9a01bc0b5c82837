"""List the causal language models of the installed transformers that can be trained on, by trying a small one of every kind.

    python benchmarks/proofs/targets.py --output targets --table docs/targets.md

Each model type of AutoModelForCausalLM is built with random weights, in small: its config with few and narrow layers, and with
windows and chunks shorter than the documents. Then it goes the way of a target: FrozenTarget, `check` on packed rows, the residual
streams of two layers, the config of an EAGLE head. Features of every document in its row are compared with those of the document
alone, more strictly than `check` does. It also decodes in the engine, and the library's logits are asked about the tokens. A model
that `check` or the engine accepts and the comparison does not would be silently wrong: the script then exits with 1. --table
writes the lists as a page. The last line is JSON. Not here: downloaded weights, GPUs.
"""

import argparse
import inspect
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart import LLM, SamplingParams
from headstart.evaluation.results import Report, command_line
from headstart.heads.eagle import EagleConfig
from headstart.inference.models.architectures import UnsupportedArchitecture
from headstart.inference.models.support import decoder_class
from headstart.train.data.packed.packing import pack
from headstart.train.teacher.features import FrozenTarget

REACH = 7  # positions of a window or chunk
LENGTHS = (45, 1, 23, 5, 18)
VOCAB = 61
MOST_PARAMETERS = 120_000_000  # a multimodal model keeps its whole image encoder
SECONDS = 60  # for one model
STRICT = 1e-4  # mean relative error of a document's features in fp32, and of the engine's tokens
NEW = 20  # tokens that the engine decodes
# Sizes by the names that configs use: a config is given those that it declares.
SIZES = dict(
    vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, is_decoder=True, tie_word_embeddings=False
)
SIZES |= dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim"), 64)
SIZES |= dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4
)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
SIZES |= dict(
    encoder_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, n_positions=128
)
SIZES |= dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner"), 48)
SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 48)
SIZES |= dict(ffn_hidden_size=48, expert_ffn_hidden_size=48, shared_intermediate_size=48, expert_dim=48)
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
SIZES |= dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2)
SIZES |= dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, zero_expert_num=1)
SIZES |= dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, qk_head_dim=16, v_head_dim=16)
SIZES |= dict(index_n_heads=2, index_head_dim=16, index_topk=128, o_lora_rank=16, o_groups=2)
SIZES |= dict(sliding_window=REACH, attention_chunk_size=REACH, use_sliding_window=True, local_attention=REACH)
SIZES |= dict(window_size=REACH, attention_window_size=REACH, sliding_window_size=REACH)
SIZES |= dict(state_size=8, mamba_d_state=8, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_headdim=16)
SIZES |= dict(n_mamba_heads=4, mamba_num_heads=4, mamba_head_dim=16, mamba_n_groups=1, n_groups=1, ssm_state_size=8)
SIZES |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
SIZES |= dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=8, lru_width=64)
SIZES |= dict(attention_types=[[["global", "local"], 2]], n_ctx=128, rotary_dim=8, num_kv_heads=2, image_token_id=3)
SIZES |= dict(logits_scaling=2.0)  # of Granite, whose default of 1 no published model has
# Changes to SIZES that are tried until a model can be built and passes; None leaves a size out.
VARIANTS = [{}, {"num_key_value_heads": 4}, {"head_dim": None}, {"num_key_value_heads": 4, "head_dim": None}]
VARIANTS += [{name: None} for name in ("tie_word_embeddings", "intermediate_size", "is_decoder", "num_kv_heads")]
SPECIAL = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2}}  # as the published ones
WORDS = {
    "lm_head(last": "its logits are not lm_head(last hidden state): scaled, capped, or through further layers",
    "takes no": "its decoder takes no position ids, or no attention mask",
    "gives other features": "its layers carry a state from one document to the next, or do not follow the masks",
    "beside layers": "windows beside layers of another type than attention",
    "fails on a packed row": "its attention takes no 4D mask",
    "layers between": "its logits are not lm_head(last hidden state): scaled, capped, or through further layers",
}


RANKS = ("WRONG", "trained", "refused", "fails", "not built")


class TooSlow(Exception):
    """A model took more than SECONDS."""


def small_config(kind, changes):
    """The config of a model type with the SIZES that it declares, under `changes`."""
    config_class = CONFIG_MAPPING[kind]
    text = config_class.sub_configs.get("text_config")
    wanted = SIZES | SPECIAL.get(kind, {}) | changes
    if text is not None and hasattr(text, "model_type"):
        return config_class(text_config=_declared(text, wanted))
    return config_class(**_declared(config_class, wanted))


def _declared(config_class, wanted):
    names = set(inspect.signature(config_class.__init__).parameters) - set(config_class.attribute_map)
    return {name: value for name, value in wanted.items() if name in names and value is not None}


def build(kind, changes):
    """A small random model of this type, in eval mode."""
    config = small_config(kind, changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters in its smallest form here")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    randomize(model)
    model(input_ids=torch.arange(3, 13)[None], use_cache=False)
    return model


def randomize(model):
    """Large weights, so that a key too many shows."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.2)


def packed_rows():
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    return documents, pack([(ids, [True] * len(ids)) for ids in documents], 60)


def try_target(model):
    """{verdict, reason, error, streams, eagle} of a model as a target."""
    documents, packed = packed_rows()
    rows = packed.input_ids, packed.position_ids, packed.document_ids
    try:
        target = FrozenTarget(model)
        target.check(*rows)
    except ValueError as error:
        return {"verdict": "refused", "reason": str(error)}
    found, worst = target.features(*rows), 0.0
    for i, ids in enumerate(documents):
        alone = target.decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        worst = max(worst, ((found[rows[2] == i] - alone).abs().mean() / alone.abs().mean()).item())
    row = {"verdict": "trained" if worst < STRICT else "WRONG", "reason": "", "error": worst}
    for key, attempt in {
        "eagle": lambda: target.layer_config(EagleConfig),
        "streams": lambda: target.features(*rows, layers=(1, 2)),
    }.items():
        try:
            attempt()
            row[key] = ""
        except ValueError as error:
            row[key] = str(error)
    return row


def try_engine(model):
    """{engine: packed, module, refused, fails or WRONG, engine_reason} of a model as the engine's target.

    WRONG: of the tokens that it decodes greedily one is not the likeliest of the library's logits, rounding apart.
    """
    try:
        kind = "packed" if decoder_class(model.config).is_packed else "module"
        prompt = packed_rows()[0][0]
        llm = LLM(model, max_model_len=len(prompt) + NEW + 1, max_num_seqs=1)
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        tokens = llm.generate([prompt], params)[0].outputs[0].token_ids
    except UnsupportedArchitecture as error:
        return {"engine": "refused", "engine_reason": str(error).split("as they are: ")[-1]}
    except TooSlow:
        raise
    except Exception as error:  # whatever a model of the library raises
        return {"engine": "fails", "engine_reason": f"{type(error).__name__}: {_first_line(error)}"}
    logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    lost = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    worst = (lost / logits.abs().amax(1)).max().item()
    return {"engine": kind if worst < STRICT else "WRONG", "engine_reason": "", "engine_error": worst}


def _first_line(error):
    return (str(error).strip().splitlines() or [""])[0][:300]


def examine(kind):
    """One row of the report: of the first variant that is trained, else of the first that can be built."""
    row, best = {"model_type": kind, "model": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}, None
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    try:
        for changes in VARIANTS:
            verdict = "not built"
            try:
                model = build(kind, changes)
                verdict = "fails"
                found = {"model": type(model).__name__} | try_engine(model) | try_target(model)
            except TooSlow:
                raise
            except Exception as error:  # whatever a config or model of the library raises for sizes that do not fit
                found = {"verdict": verdict, "reason": f"{type(error).__name__}: {_first_line(error)}"}
            if best is None or RANKS.index(found["verdict"]) < RANKS.index(best["verdict"]):
                best = found
            unfit = "fails on a packed row" in found["reason"]  # perhaps these sizes only
            if found["verdict"] in ("WRONG", "trained", "refused") and not unfit:
                break
        return row | best
    except TooSlow:
        return row | {"verdict": "not built", "reason": f"took more than {SECONDS} s"}
    finally:
        signal.alarm(0)


def _too_slow(*_):
    raise TooSlow


def page(rows):
    """The lists as a page of docs/."""
    trained = [row for row in rows if row["verdict"] == "trained"]
    lists = {
        "Every head": [row for row in trained if not row["eagle"] and not row["streams"]],
        "Every head but EAGLE-3, which cannot read their residual streams": [
            row for row in trained if not row["eagle"] and row["streams"]
        ],
        "Medusa and the MLP speculator; their layers are not of Llama's shape, as EAGLE heads need": [
            row for row in trained if row["eagle"]
        ],
    }
    for row in rows:
        if row["verdict"] == "refused":
            reason = next((words for mark, words in WORDS.items() if mark in row["reason"]), row["reason"])
            lists.setdefault(f"Refused: {reason}", []).append(row)
    others = [row for row in rows if row["verdict"] in ("fails", "not built")]
    lists["Not known: no small model of it could be made here"] = others
    lines = [
        "# Targets that can be trained on",
        "",
        INTRODUCTION.format(version=transformers.__version__),
        "",
    ]
    lines += ["| result | model types |", "|---|---|"]
    for title, members in lists.items():
        lines.append(f"| {title} | {', '.join(sorted(row['model_type'] for row in members)) or 'none'} |")
    return "\n".join(lines) + "\n" + engine_page(rows)


def engine_page(rows):
    """What the engine runs, as a section of the page."""
    lists = {"On kernels of their own": [], "As their own modules": []}
    for row in rows:
        title = ENGINE_WORDS.get(row.get("engine"))
        if row.get("engine") in ("refused", "fails"):
            title = f"{row['engine'].capitalize()}: {' '.join(row['engine_reason'].split())[:160]}"
        if title:
            lists.setdefault(title, []).append(row["model_type"])
    lines = ["", "## Targets that the engine runs", "", ENGINE_INTRODUCTION, "", "| how | model types |", "|---|---|"]
    lines += [f"| {title} | {', '.join(sorted(members)) or 'none'} |" for title, members in lists.items()]
    return "\n".join(lines) + "\n"


ENGINE_WORDS = {"packed": "On kernels of their own", "module": "As their own modules", "WRONG": "WRONG"}
ENGINE_INTRODUCTION = """The same models in the engine, on a CPU: every token that it decodes greedily is the likeliest of the
library's own logits, but for rounding. A refused model says what is in its way before its weights are read. Checkpoints with
quantised weights (gpt-oss as it is published, in MXFP4) are refused as such. A checkpoint of a type that transformers does not
know, with Python code of its own, is refused unless `trust_remote_code=True` is given; then it is tried like any other."""
INTRODUCTION = """Which models of `AutoModelForCausalLM` (transformers {version}) the trainers accept as a target, found by
`python benchmarks/proofs/targets.py`: a small random model of every type, with windows and chunks shorter than its documents. In a
packed row every document of an accepted model has the features that it has alone, within 1e-4. Every run checks its own target
on its own rows before it trains, so a model that is not listed may be tried."""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these model types")
    parser.add_argument("--output", help="name or path of the JSON file")
    parser.add_argument("--table", type=Path, help="file of the page, such as docs/targets.md")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    columns = {
        "model_type": ("model type", 28, str),
        "verdict": ("result", 9, str),
        "engine": ("engine", 7, str),
        "reason": ("reason", 20, lambda r: r[:90]),
    }
    settings = {"only": options.only, "transformers": transformers.__version__}
    report = Report(
        "targets",
        columns,
        torch.device("cpu"),
        command_line("benchmarks/proofs/targets.py", arguments),
        settings,
        options.output,
    )
    for kind in options.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        report.add(examine(kind))
    if options.table:
        options.table.write_text(page(report.rows), encoding="utf-8")
    report.finish()
    return int(any("WRONG" in (row["verdict"], row.get("engine")) for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
