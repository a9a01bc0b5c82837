"""Tables of the headline's page, from the rows of several seeds. Figures are means over the seeds that have them, and a cell names
the seeds that do not; intervals cover all of them.

A cell's interval goes from the lowest end of a seed's interval to the highest one: it is wide enough for what differs between
trainings, as far as so few seeds tell. Claims are tested on differences within a seed: the prompts and the tokens are the same.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ...evaluation.acceptance import bootstrap
from .families import SOURCES

SUBJECTS, TEMPERATURES = ("code", "mathematics"), (0.0, 1.0)
CHAIN, TREE = "chain", "best tree"
BY_PROMPT = ("steps_by_prompt", "tokens_by_prompt")
# The order that papers give, the best first.
ORDER = ("EAGLE-3", "EAGLE", "MLP speculator", "Medusa")


@dataclass(frozen=True)
class Cell:
    """A figure of the seeds that have it.  values, lows, highs: by seed; draft: what kind of draft; lacking: seeds without it"""

    values: tuple
    lows: tuple
    highs: tuple
    draft: str
    lacking: tuple = ()

    @property
    def mean(self):
        return fmean(self.values)

    @property
    def low(self):
        return min(self.lows)

    @property
    def high(self):
        return max(self.highs)

    @property
    def seeds_agree(self):
        """Whether the seeds' own intervals have something in common."""
        return max(self.lows) <= min(self.highs)

    def text(self):
        kind = {"grown tree": ", grown", "static tree": ", static"}.get(self.draft, "")
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f}{kind}{without(self.lacking)})"


class Figures:
    """The rows of all seeds.  results: list of the JSON objects of headline.py, one per seed"""

    def __init__(self, results):
        self.results = results
        self.seeds = [result["settings"]["seed"] for result in results]
        self.depth = results[0]["settings"]["depth"]
        self.batch = results[0]["settings"]["batch"]
        self.acceptance = [self.of_table(result, "acceptance") for result in results]
        self.speed = [self.of_table(result, "speed") for result in results]
        self.library = [self.of_table(result, "library") for result in results]
        there = {row["source"] for rows in self.acceptance for row in rows}
        self.sources = [one.name for one in SOURCES if one.name in there]

    @staticmethod
    def of_table(result, table):
        return [row for row in result["rows"] if row["table"] == table]

    def found(self, source, subject, temperature, draft, batch):
        """The row of every seed, None of a seed that has none.  draft: CHAIN or TREE"""
        found = []
        for rows in self.acceptance:
            place = (source, subject, temperature, batch)
            here = [row for row in rows if place == (row["source"], row["subject"], row["temperature"], row["batch"])]
            found.append(
                next((row for row in here if (row["draft"] == CHAIN if draft == CHAIN else row["best_tree"])), None)
            )
        return found

    def cell(self, *place):
        """The Cell of a place, or None if no seed has a figure for it."""
        found, lacking = self.measured(self.found(*place))
        if not found:
            return None
        parts = ([row[name] for row in found] for name in ("acceptance_length", "low", "high"))
        kinds = {row["draft"] for row in found}
        return Cell(*map(tuple, parts), kinds.pop() if len(kinds) == 1 else "", lacking)

    def measured(self, by_seed):
        """A list of what each seed has, None where it has nothing.  -> what is there, the seeds that have nothing"""
        there = [one for one in by_seed if one is not None]
        return there, tuple(seed for seed, one in zip(self.seeds, by_seed) if one is None)

    def pairs(self, better, worse, better_draft, worse_draft, temperatures=TEMPERATURES):
        """Pairs of rows of the same seed, subject and temperature, with many requests at once.  -> pairs, how many are lacking"""
        pairs, lacking = [], 0
        for subject in SUBJECTS:
            for temperature in temperatures:
                greater = self.found(better, subject, temperature, better_draft, self.batch)
                less = self.found(worse, subject, temperature, worse_draft, self.batch)
                there = [pair for pair in zip(greater, less) if None not in pair]
                lacking += len(self.results) - len(there) if there else 0
                pairs += there
        return pairs, lacking


def without(seeds):
    """What a cell says of seeds that have no such figure."""
    return f"; {seeds_text(seeds)} not measured" if seeds else ""


def seeds_text(seeds):
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def table(header, lines):
    """Lines of cells as a table of Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def acceptance_table(figures, subject, batch):
    """Tokens a step on one subject."""
    places = [(draft, temperature) for temperature in TEMPERATURES for draft in (CHAIN, TREE)]
    header = ["drafts", *(f"{draft}, T = {temperature:g}" for draft, temperature in places), "seeds agree"]
    lines = []
    for source in figures.sources:
        cells = [figures.cell(source, subject, temperature, draft, batch) for draft, temperature in places]
        there = [cell for cell in cells if cell and not cell.lacking]
        agreeing = sum(cell.seeds_agree for cell in there)
        agree = "one seed" if len(figures.seeds) < 2 else f"{agreeing} of {len(there)}"
        lines.append([source, *(cell.text() if cell else "" for cell in cells), agree])
    return table(header, lines)


@dataclass(frozen=True)
class Claim:
    """What a paper or theory gives.

    pairs: rows (that should have the greater figure, that should have the less); lacking: comparisons that a seed does not have
    """

    words: str
    pairs: list
    lacking: int = 0

    def line(self):
        """Words, counts of comparisons, verdict; a comparison is one seed's figure on one subject at one temperature."""
        found = [difference(*pair) for pair in self.pairs]
        above, below = ([one for one in found if sign * one[0] > 0] for sign in (1, -1))
        clear, clear_below = sum(low > 0 for _, low, _ in above), sum(high < 0 for *_, high in below)
        verdict = judge(len(found), len(above), clear, len(below), clear_below)
        counts = [
            f"{len(some)} of {len(found)} ({number} clear)" for some, number in ((above, clear), (below, clear_below))
        ]
        return [self.words, *counts, verdict + (f"; {self.lacking} not measured" if self.lacking else "")]


def judge(total, above, clear, below, clear_below):
    """The verdict on so many comparisons."""
    if not total:
        return "not measured"
    if not clear and not clear_below:
        return "not clear" if above or below else "equal"
    if clear and clear_below:
        return "both ways"
    word, number, against = ("confirmed", clear, below) if clear else ("contradicted", clear_below, above)
    if number == total:
        return word
    return f"{word} where it is clear" if against else f"{word}, not clear everywhere"


def difference(greater, less):
    """(difference of the tokens a step of two rows, low, high): 95 % of a bootstrap over the prompts, the same for both rows."""
    counts = [[list(map(int, row[name].split())) for name in BY_PROMPT] for row in (greater, less)]
    prompts = list(zip(*counts[0], *counts[1], strict=True))

    def figures(drawn):
        steps, tokens, other_steps, other_tokens = map(sum, zip(*drawn))
        return [tokens / max(steps, 1) - other_tokens / max(other_steps, 1)]

    [(low, high)] = bootstrap(prompts, figures, 0.95)
    return figures(prompts)[0], low, high


def claims(figures):
    """The claims that are tested, in many requests at once."""
    found = []
    for better, worse in pairwise(ORDER):
        for draft in (CHAIN, TREE):
            found.append(Claim(f"{better} > {worse}, {draft}", *figures.pairs(better, worse, draft, draft)))
    found.append(Claim("best tree > chain", *together(figures.pairs(one, one, TREE, CHAIN) for one in figures.sources)))
    rivals = [(one.name, one.rival) for one in SOURCES if one.rival]
    for temperature in TEMPERATURES:
        of_rivals = (figures.pairs(lk, kl, CHAIN, CHAIN, (temperature,)) for lk, kl in rivals)
        found.append(Claim(f"LK > KL, chain, T = {temperature:g}", *together(of_rivals)))
    return found


def together(found):
    """Several results of Figures.pairs as one."""
    found = list(found)
    return [pair for pairs, _ in found for pair in pairs], sum(lacking for _, lacking in found)


def speed_table(figures):
    """Tokens per second of the replay and how many times plain decoding's that is; the least and the greatest of the seeds."""
    places = [(subject, temperature) for temperature in TEMPERATURES for subject in SUBJECTS]
    header = ["drafts", "requests", *(f"{subject}, T = {temperature:g}" for subject, temperature in places)]
    lines = []
    for batch in dict.fromkeys((1, figures.batch)):
        found, lacking = figures.measured([plain_rates(result, batch) or None for result in figures.results])
        if found:
            text = rates_text([rate for rates in found for rate in rates]) + without(lacking)
            lines.append(["plain decoding", str(batch), *[text] * len(places)])
        kinds = [(row["source"], row["draft"]) for rows in figures.speed for row in rows if row["batch"] == batch]
        for source, draft in sorted(dict.fromkeys(kinds), key=lambda kind: figures.sources.index(kind[0])):
            cells = [replayed(figures, figures.speed, source, place, batch, draft) for place in places]
            lines.append([f"{source}, {draft}", str(batch), *cells])
    names = dict.fromkeys(row["source"] for rows in figures.library for row in rows)
    lines += [[name, "1", *(replayed(figures, figures.library, name, place) for place in places)] for name in names]
    return table(header, lines)


def plain_rates(result, batch):
    """Tokens per second of plain decoding in every process of one seed that measured it."""
    plain = [part.get("plain", {}).get(str(batch)) for part in result["facts"]["speed"].values()]
    return [one["tokens_per_second"] for one in plain if one]


def replayed(figures, tables, source, place, batch=None, draft=None):
    """A cell of the table of speed.  tables: rows by seed"""
    names, wanted = ("source", "subject", "temperature", "batch", "draft"), (source, *place, batch, draft)
    rows, lacking = figures.measured(
        [next((row for row in of_seed if tuple(map(row.get, names)) == wanted), None) for of_seed in tables]
    )
    if not rows:
        return ""
    speedups = [row["speedup"] for row in rows]
    low, high = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
    times = low if low == high else f"{low} to {high}"
    return f"{rates_text([row['tokens_per_second'] for row in rows])}, {times}x{without(lacking)}"


def rates_text(rates):
    low, high = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return low if low == high else f"{low} to {high}"
