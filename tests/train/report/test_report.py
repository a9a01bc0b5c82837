"""The report of a run: it shows the figures of the run's files, says what is missing, and loads nothing from outside."""

import json
import re
from html.parser import HTMLParser

import pytest

from headstart.tests.evaluation.test_charts import RATES, TREE, points_of
from headstart.train.report.report import write_report

TRIALS = [
    {"draft": "none", "depth": 0, "num_nodes": 1, "acceptance_length": 1.0, "tokens_per_second": 200.0},
    {"draft": "static", "depth": 2, "num_nodes": 4, "acceptance_length": 1.8, "tokens_per_second": 300.0},
    {"draft": "dynamic", "depth": 3, "num_nodes": 4, "acceptance_length": 1.9, "tokens_per_second": 320.0},
]
CHOICE = {
    "batch_size": 2,
    "hardware": "a small machine",
    "plain_step_seconds": 0.01,
    "timed_steps": [{"depth": 1, "num_nodes": 2, "seconds": 0.011}, {"depth": 2, "num_nodes": 4, "seconds": 0.012}],
    "curve": [
        {"depth": 1, "num_nodes": 2, "tokens_per_step": 1.5, "tokens_per_second": 250.0},
        {"depth": 2, "num_nodes": 4, "tokens_per_step": 1.75, "tokens_per_second": 300.0},
        {"depth": 2, "num_nodes": 6, "tokens_per_step": 1.76, "tokens_per_second": 275.0},
    ],
    "best_static": {"depth": 2, "num_nodes": 4, "tokens_per_step": 1.75, "tokens_per_second": 300.0},
    "trials": TRIALS[:2],
    "chosen": TRIALS[1],
}


def train_line(step, **values):
    return {
        "step": step,
        "kind": "train",
        "loss": 5.0 / step,
        "lr": 1e-3,
        "tokens_per_second": 900.0,
        "tokens": step * 64,
    } | values


def acceptance_line(step, length=1.5, source="engine"):
    return {
        "step": step,
        "kind": "acceptance",
        "acceptance_length": length,
        "per_position": [0.4, 0.1],
        "num_steps": 7,
        "source": source,
    }


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    """A run folder with all files."""
    folder = tmp_path / "first"
    folder.mkdir()
    heads = {
        "head0_loss": 2.0,
        "head0_top1": 0.4,
        "head0_top5": 0.7,
        "head1_loss": 3.0,
        "head1_top1": 0.2,
        "head1_top5": 0.5,
    }
    lines = [train_line(step, **heads) for step in range(1, 6)]
    write_lines(folder / "metrics.jsonl", [*lines, acceptance_line(5, 1.4), acceptance_line(10, 1.5)])
    sample = {"prompt": "<|user|>sort & merge", "output": "def f():\n    return '<script>alert(1)</script>'"}
    acceptance = {
        "acceptance_length": 1.4321,
        "per_position": [0.4, 0.1],
        "num_steps": 1234,
        "rates": RATES,
        "samples": [sample],
    }
    (folder / "acceptance.json").write_text(json.dumps(acceptance))
    (folder / "tree.json").write_text(json.dumps(TREE))
    rows = [
        {"head": "first/head", "temperature": 0.0, "draft": "none", "num_nodes": 1, "acceptance_length": 1.0,
         "tokens_per_second": 100.0, "speedup": 1.0, "identical": True, "num_tokens": 96},
        {"head": "first/head", "temperature": 0.0, "draft": "chain of 2", "num_nodes": 3, "acceptance_length": 1.43,
         "tokens_per_second": 137.25, "speedup": 1.3725, "identical": True, "num_tokens": 96},
        {"head": "first/head", "temperature": 0.8, "draft": "tree of 4", "num_nodes": 4, "acceptance_length": 1.61,
         "tokens_per_second": 80.5, "speedup": 0.805, "identical": False, "num_tokens": 96},
    ]  # fmt: skip
    benchmark = {"hardware": "a small machine", "date": "2026-01-02", "command": "headstart bench", "rows": rows}
    (folder / "benchmark.json").write_text(json.dumps(benchmark))
    (folder / "config.yaml").write_text("target: some/model\nlr: 0.001\n")
    return folder


class Page(HTMLParser):
    """Tags that are opened and closed in order, the attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


def test_report_is_one_well_formed_page_that_loads_nothing(run):
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in page.attributes}
    assert not re.search(r"url\(|@import|https?://", text)
    assert [child.name for child in run.iterdir() if child.name.startswith(".")] == []


def test_report_shows_the_figures_of_every_file(run):
    text = write_report(run).read_text(encoding="utf-8")
    words = Page(text).words
    assert "1.43" in words  # acceptance length, in a tile
    assert "0.0625" in words  # a rate, in the table
    speed = words[words.index("Speed", words.index("The draft tree", words.index("0.0625"))) :]
    row = speed[speed.index("chain of 2") :][:6]
    assert [word for word in row if word] == ["chain of 2", "3", "1.43", "137.2", "1.37×", "identical"]
    assert "different" in speed
    for title in ("Training loss", "Loss of each head", "First choice correct", "Learning rate", "Acceptance length"):
        assert words.count(title) == 2, title  # the name of the drawing for readers that do not see it, and its heading
    assert "target: some/model\nlr: 0.001" in words
    assert any("1,234 steps" in word for word in words)
    assert not any("No tree was built" in word for word in words), "nothing is missing here"


def test_heat_map_says_whose_rates_it_shows(run):
    def section():
        text = write_report(run).read_text(encoding="utf-8")
        return text.split("<h2>Acceptance by depth and rank</h2>")[1].split("</section>")[0]

    (run / "tree.json").write_text(json.dumps(TREE | {"rates": [[0.4375], [0.1875]]}))
    assert "0.4375" in section()
    assert "0.0625" not in section()
    assert "Measured by headstart tree; the draft tree is chosen from these figures." in section()
    assert "1,234 steps" not in section()
    (run / "tree.json").write_text(json.dumps({"parents": [-1, 0], "ranks": [0, 0]}))
    assert "0.0625" in section()
    assert "counted over 1,234 steps" in section()
    assert "draft tree" not in section()


def choice_section(run, tree):
    (run / "tree.json").write_text(json.dumps(tree))
    text = write_report(run).read_text(encoding="utf-8")
    Page(text)
    return text, text.split("<h2>Why this tree</h2>")[1].split("</section>")[0]


def test_chart_of_the_choice_marks_the_tree_of_the_most_tokens_per_second(run):
    _, section = choice_section(run, TREE | {"choice": CHOICE})
    (line,) = points_of(section)
    x, y = zip(*line)
    assert len(line) == 4  # plain decoding is the tree of one node
    assert y[0] - y[2] == pytest.approx(2 * (y[0] - y[1]), abs=0.2)  # 200, 250 and 300 tokens/s
    assert x[3] - x[2] == pytest.approx(2 * (x[1] - x[0]), abs=0.2)
    ((mark_x, mark_y),) = re.findall(r'class="marked" cx="([\d.]+)" cy="([\d.]+)"', section)
    assert (float(mark_x), float(mark_y)) == pytest.approx(line[2], abs=0.1)
    assert "4 nodes, 2 deep" in section
    assert "nodes, the root included" in section
    assert "training step" not in section


def test_sentence_says_what_was_chosen_or_that_plain_decoding_is_faster(run):
    _, section = choice_section(run, TREE | {"choice": CHOICE})
    assert (
        "At batch size 2 on a small machine the static tree of 4 nodes, 2 deep, decodes fastest: 300 tokens/s"
        in section
    )
    assert "1.50 times plain decoding" in section
    slow = CHOICE | {"trials": [TRIALS[0] | {"tokens_per_second": 301.0}, TRIALS[1]]}
    _, section = choice_section(run, TREE | {"choice": slow})
    assert "plain decoding is faster than any tree: 301 tokens/s, and 300 with the best of them" in section
    assert "decodes fastest" not in section


def test_dynamic_tree_is_told_not_drawn(run):
    tree = {"dynamic": {"max_depth": 3, "width": 5, "num_nodes": 4}, "rates": RATES}
    text, section = choice_section(run, tree | {"choice": CHOICE | {"trials": TRIALS, "chosen": TRIALS[2]}})
    assert "the dynamic tree of 4 nodes, 3 deep, decodes fastest: 320 tokens/s" in section
    assert "The best static tree, of 4 nodes, made 300." in section
    assert "the 5 likeliest nodes get 5 children each" in text
    assert "tokens per step, dynamic tree of 4" in text
    _, section = choice_section(run, tree)
    assert "headstart tree" in section


def test_speed_table_wraps_its_words(run):
    style = write_report(run).read_text(encoding="utf-8").split("</style>")[0]
    assert ".speed th, .speed .words { white-space: normal; }" in style


def test_text_of_samples_is_shown_as_text(run):
    text = write_report(run).read_text(encoding="utf-8")
    assert "<|user|>sort &amp; merge" not in text
    assert "&lt;|user|&gt;sort &amp; merge" in text
    assert "<script>" not in text


@pytest.mark.parametrize(
    ("name", "heading", "hint"),
    [
        ("metrics.jsonl", "Training", "accelerate launch train/medusa.py"),
        ("acceptance.json", "Samples", "the trainer writes a few"),
        ("tree.json", "The draft tree", "Build the best one from the measured acceptance"),
        ("benchmark.json", "Speed", "headstart bench speculation"),
        ("config.yaml", "Configuration", "the trainer writes it"),
    ],
)
def test_missing_file_leaves_a_section_that_says_what_makes_it(run, name, heading, hint):
    assert hint not in write_report(run).read_text(encoding="utf-8")
    (run / name).unlink()
    text = write_report(run).read_text(encoding="utf-8")
    section = text.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    assert hint in section
    Page(text)


def test_report_goes_where_it_is_told(run, tmp_path):
    target = tmp_path / "new" / "page.html"
    assert write_report(str(run), str(target)) == target
    assert target.is_file()
    assert not (run / "report.html").exists()


def test_of_a_step_written_twice_the_later_line_counts(run):
    write_lines(run / "metrics.jsonl", [acceptance_line(5, 1.1), acceptance_line(10, 9.9), acceptance_line(10, 1.2)])
    (run / "acceptance.json").unlink()
    words = Page(write_report(run).read_text(encoding="utf-8")).words
    assert "1.20" in words
    assert "9.90" not in words


def test_teacher_forced_acceptance_is_named_so(run):
    write_lines(run / "metrics.jsonl", [acceptance_line(5, source="teacher_forced")])
    (run / "acceptance.json").unlink()
    words = Page(write_report(run).read_text(encoding="utf-8")).words
    assert "teacher-forced, not run by the engine" in words
    assert not any("measured by the engine" in word for word in words)


def test_line_that_a_running_training_is_writing_is_left_out(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "ki')
    assert "Training loss" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("broken", ['{"step": 1, "ki\n', "[1, 2]\n", '{"step": 1, "kind": "acceptance"}\n'])
def test_broken_metrics_line_is_named(run, broken):
    path = run / "metrics.jsonl"
    path.write_text(json.dumps(train_line(1)) + "\n" + broken + json.dumps(train_line(2)) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        write_report(run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tree.json", '{"parents": [-1, 0', "tree.json, line 1: not JSON"),
        ("tree.json", '{"parents": [-1, 2], "ranks": [0, 0]}', "tree.json: parents must"),
        ("tree.json", '{"parents": [-1, 0], "ranks": [0]}', "tree.json: a tree needs one rank per node"),
        ("tree.json", '{"dynamic": {"width": 2}}', "tree.json, dynamic: expected an object with max_depth"),
        ("tree.json", '{"parents": [-1], "ranks": [0], "choice": {"curve": []}}', "tree.json: 'choice' is not what"),
        ("acceptance.json", "[]", "acceptance.json: expected an object with acceptance_length"),
        ("benchmark.json", '{"rows": [{"head": "x"}]}', "benchmark.json, one of its rows: expected"),
    ],
)
def test_broken_file_is_named(run, name, text, message):
    (run / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message).replace("/", ".")):
        write_report(run)


def test_what_is_no_run_folder_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds none of"):
        write_report(empty)
    with pytest.raises(ValueError, match="is a folder"):
        write_report(run, empty)


def test_curves_end_where_the_prompts_change(run):
    lines = [acceptance_line(step, 1.0 + step / 10) | {"measured_on": "a" if step < 5 else "b"} for step in range(1, 8)]
    write_lines(run / "metrics.jsonl", [train_line(1), *lines])
    text = write_report(run).read_text(encoding="utf-8")
    length = text[text.index("Acceptance length") :].split("</svg>")[0]
    before, after = points_of(length)
    assert (len(before), len(after)) == (4, 3)
    (line,) = re.findall(r'class="break" x1="([0-9.]+)"', length)
    assert float(line) == after[0][0]
    assert "other prompts" in text
    write_lines(run / "metrics.jsonl", [train_line(1), *(one | {"measured_on": "a"} for one in lines)])
    text = write_report(run).read_text(encoding="utf-8")
    assert 'class="break"' not in text
    assert "other prompts" not in text


def test_a_run_with_an_adapter_shows_what_became_of_the_target(run):
    assert "held-out loss, adapted target" not in write_report(run).read_text()
    path = run / "acceptance.json"
    measured = json.loads(path.read_text()) | {"heldout_loss": 1.23456, "frozen_heldout_loss": 1.2211}
    path.write_text(json.dumps(measured))
    page = write_report(run).read_text()
    assert "held-out loss, adapted target" in page
    assert "1.235" in page
    assert "1.221 of the frozen one" in page
