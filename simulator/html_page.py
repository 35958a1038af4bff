"""Parts of an HTML page that needs no other file and asks no address."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

_DATA = files("simulator")
_CHARTS_CSS, _CHARTS_JS = (_DATA.joinpath(name).read_text() for name in ("charts.css", "charts.js"))
# It runs no code but its own, and nothing in it, a class's name for one, makes it ask another address.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}{charts_css}</style>
</head>
<body>
<header><h1>{title}</h1> <span class="soft">{about}</span></header>
{body}
<script>
{charts_js}</script>
</body>
</html>
"""


def page(title: str, about: str, body: Iterable[str], style: str) -> str:
    """Args:
    style: of the whole, CSS.
    """
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        about=escape(about),
        body="\n".join(body),
        style=style,
        charts_css=_CHARTS_CSS,
        charts_js=_CHARTS_JS,
    )


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def charts(drawn: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(drawn)}</div>'


def text(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def heading(words: str) -> str:
    """Below a section's own."""
    return f"<h3>{escape(words)}</h3>"


def command_line(words: str) -> str:
    return f'<pre class="command">{escape(words)}</pre>'


def tiles(named: Mapping[str, str]) -> str:
    shown = (
        f'<div class="tile"><span class="soft">{escape(k)}</span><b>{escape(v)}</b></div>' for k, v in named.items()
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    """The first column names the row, the others hold numbers. `best` is the index of a row to be seen first."""
    head = "".join(f'<th scope="col"{_number(at)}>{escape(each)}</th>' for at, each in enumerate(heads))
    body = "".join(_row(row, is_best=index == best) for index, row in enumerate(rows))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str], *, is_best: bool) -> str:
    shown = "".join(f"<td{_number(at)}>{escape(cell)}</td>" for at, cell in enumerate(cells))
    return f'<tr class="best">{shown}</tr>' if is_best else f"<tr>{shown}</tr>"


def _number(column: int) -> str:
    return ' class="number"' if column else ""


def groups(titled: Mapping[str, Mapping[str, str]]) -> str:
    """Titles, and under each values by name."""
    shown = (f"<div>{heading(title)}{_pairs(named)}</div>" for title, named in titled.items())
    return f'<div class="groups">{"".join(shown)}</div>'


def _pairs(named: Mapping[str, str]) -> str:
    rows = (f'<tr><th scope="row">{escape(k)}</th><td class="wide">{escape(v)}</td></tr>' for k, v in named.items())
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def shown_seconds(value: float | None) -> str:
    """In milliseconds below one second."""
    if value is None:
        return "–"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def shown_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def shown_number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
