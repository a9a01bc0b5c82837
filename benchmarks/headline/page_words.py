"""The sentences of the headline's page. Braces are filled by page.py with values of the results."""

INTRODUCTION = """
Written by `benchmarks/headline/page.py` from {names}; no figure here is typed by hand. One command a seed trains a chat target of
{parameters} million parameters on Python functions and grade-school mathematics, lets it answer training prompts, trains every
family on these answers for about the same minutes, and measures on held-out prompts ({hardware}; {seeds}; commit {commit}):
"""

TRAINED = """
Bits per byte are of answers to held-out requests, the draft model's of those alone that are measured below. Minutes are of steps
alone: start and compilation do not count. A short trial predicts how many steps they hold, so they are not quite equal. Heads and
draft model saw the same {answers} answers of the target; the draft model, which begins with nothing, saw the target's own corpus
in the first half of its minutes.
"""

TOKENS = """
The verifier is `strict`. Drafts are {depth} deep, so that {most} tokens a step are the most there can be; trees have at most
{nodes} nodes, and are static, from rates on other prompts, or grown in every step: the better one, on these prompts themselves,
is named, unless seeds differ in it. In brackets: the 95 % interval of a bootstrap over {prompts} prompts, from the lowest end of
a seed to the highest. Seeds agree in a figure if their own intervals overlap. An interval knows the prompts alone, not what two
trainings of a head differ by: the seeds' minutes and tokens, in the table above, may tell why some do not agree.
"""

EQUAL = """
Of {outputs} outputs ({tokens} tokens), drawn with every kind of draft at temperatures 0 and 1, many at once and alone, {found}
plain decoding with the same seeds.
"""

CLAIMS = """
The claims are compared at about the same minutes, not at the same steps: EAGLE-3 and the block drafter make far fewer (the first
table). Every figure of a seed, on a subject, at a temperature, is one comparison. It is clear if the 95 % interval of the
difference, of a bootstrap over the prompts, which are the same on both sides, does not hold 0.
"""

SPEED = """
This is no large model's acceptance. A model of the shape `{shape}` and what drafts for it have random weights, and the verifier
`synthetic` accepts as many tokens a step as the tables above say of the small target: the steps are a large model's, the
acceptance is a small one's. Tokens per second of all requests, which is this acceptance over the mean time of a step in the
steady state, and how many times plain decoding in the same run ({hardware}; prompts of {prompt} tokens, {new} new ones). Trees
are static, because `synthetic` accepts along a tree's deepest path. Between two figures stand the least and the greatest of the
seeds.
"""

SPEED_OF_TARGET = """
The trained target itself with the verifier `synthetic`, which accepts as many tokens a step as the tables above say. Tokens per
second of all requests, which is this acceptance over the mean time of a step in the steady state, and how many times plain
decoding in the same run ({hardware}; prompts of {prompt} tokens, {new} new ones). Trees are static, because `synthetic` accepts
along a tree's deepest path. Between two figures stand the least and the greatest of the seeds.
"""

# Whether the steps are the trained target's: what its own speed-ups say.
OWN_SPEED = {
    False: "A target this small is bound by launches, so its own speed-ups are left out. Speed is measured on a large shape, with\n"
    "  this acceptance.",
    True: "A target this small is bound by launches on a GPU: what drafts cost beside a large target is something else.",
}

LIBRARY = """
transformers' assisted generation has a draft model of the same size, and its own plain `generate`, {plain} ms a token, is its
baseline. Its step was timed with every draft accepted; the acceptance is the draft model's of the first tables.
"""

LIMITS = """
- The target has {parameters} million parameters and was trained for {minutes} minutes, on two narrow subjects. How well its text
  can be foretold is its own: a large model's answers may be easier or harder to draft for. No figure of acceptance here is one of
  a large model's.
- Heads were trained for {head_minutes} minutes each. Published heads train for hours to days.
- Minutes were not quite the same (the first table), and the same minutes are fewer steps for a head with more work a step. Beside
  a large target, whose own pass is most of a step, the families come closer in steps.
- {own_speed}
- A published draft model has been trained on as much text as its target; this one was trained for as long as a head.
"""


def fill(text, **values):
    """The text on one line, or a list as it stands, with the values in it."""
    text = text.strip().format(**values)
    return text if text.startswith("- ") else " ".join(text.split())
