"""The page around the report's sections: one HTML document with its style inside, for light, dark and paper.

Colours, and the style of the drawings, are those of evaluation/charts.py.
"""

from html import escape

from ...evaluation.charts import COLOURS, RULES

STYLE = (
    COLOURS
    + """\
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 74rem; padding: 2.5rem 1.5rem 5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
header p { margin: 0; color: var(--soft); }
h1 { margin: 0 0 1.25rem; font-size: 2rem; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 .75rem; font-size: 1.25rem; line-height: 1.3; }
section { margin-top: 2.75rem; border-top: 1px solid var(--rule); padding-top: 1.25rem; }
p { margin: .5rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.75rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span, .tile small { display: block; line-height: 1.35; overflow-wrap: anywhere; }
.tile small { color: var(--soft); font-size: .8125rem; margin-top: .15rem; }
.caption { color: var(--soft); font-size: .9rem; max-width: 52rem; }
.missing { border-left: 3px solid var(--rule); padding-left: .8rem; color: var(--soft); max-width: 52rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem 1.5rem; }
figure { margin: 0; }
svg { display: block; max-width: 100%; height: auto; font-family: inherit; }
figure svg { width: 100%; }
.scroll { overflow-x: auto; padding-bottom: .25rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.speed { width: 100%; }
.speed th, .speed td { padding-left: .45rem; padding-right: .45rem; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); font-weight: 400; }
.speed th, .speed .words { white-space: normal; }
.speed th[scope=row] { min-width: 9rem; overflow-wrap: anywhere; }
thead th { color: var(--soft); font-size: .8125rem; border-bottom-color: var(--rule); vertical-align: bottom; }
th[scope=row], .words { text-align: left; }
tr.new > * { border-top: 1px solid var(--rule); }
tr.best > * { font-weight: 600; }
.speed .narrow { padding-left: 0; }
.bar { display: block; height: .6rem; border-radius: 2px; background: var(--heat); opacity: .6; }
.yes { color: var(--yes); } .no { color: var(--no); font-weight: 600; }
pre {
  margin: .5rem 0; padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; font: .8125rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
}
.sample { margin: 1.1rem 0; }
.sample figcaption { color: var(--soft); font-size: .8125rem; }
.sample .output { border-left: 3px solid var(--accent); }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; margin: .5rem 0; }
@media print { body { max-width: none; padding: 0; } section { break-inside: avoid; } .scroll { overflow: visible; } }
"""
    + RULES
)


def render_page(name, tiles, sections):
    """The whole document.

    name: of the run. tiles: (figure, its meaning, its source) each, as text. sections: (heading, HTML) each.
    """
    figures = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span><small>{escape(detail)}</small></div>'
        for value, label, detail in tiles
    )
    body = "".join(f"<section><h2>{escape(heading)}</h2>{content}</section>\n" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)} · Headstart</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header><p>Headstart report</p><h1>{escape(name)}</h1><div class="tiles">{figures}</div></header>\n'
        f"{body}</body>\n</html>\n"
    )


def standalone(drawing):
    """One drawing as a document of its own."""
    head = f'<meta charset="utf-8">\n<style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{drawing}</body>\n</html>\n'


def caption(text):
    return f'<p class="caption">{escape(text)}</p>'


def code(text):
    return f"<pre>{escape(text)}</pre>"


def missing(text, command=""):
    """A note on missing data, with the command that makes it."""
    return f'<p class="missing">{escape(text)}</p>{code(command) if command else ""}'


def charts(drawings):
    """The drawings side by side, as many as fit; empty ones are left out."""
    return f'<div class="charts">{"".join(f"<figure>{drawing}</figure>" for drawing in drawings if drawing)}</div>'


def named(title, content):
    """A panel's content that is not a drawing (a table, texts), with the panel's title for screen readers."""
    return f'<div role="group" aria-label="{escape(title)}">{content}</div>'
