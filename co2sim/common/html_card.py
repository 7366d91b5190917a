"""How things show themselves in a notebook: a small table in HTML, and charts.

Charts stand above what they show, and Altair is of the extra `report`: so `charts` finds them by
name, when one is asked for.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from co2sim.common.errors import OptionError

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

MISSING = "a chart needs Altair: pip install 'co2sim[report]'"

SHOWN = 20
"""Rows of a table, and remarks below it."""
_LONG = 500
"""Characters of a text; what is longer is cut."""
_HTML = """\
<div>
<p><b>{{ answer }}</b></p>
<table>
  {% if columns %}
  <thead><tr>{% for name in columns %}<th {{ left }}>{{ name }}</th>{% endfor %}</tr></thead>
  {% endif %}
  <tbody>
  {% for row in rows %}
  <tr><th {{ left }}>{{ row[0] }}</th>{% for text in row[1:] %}<td {{ left }}>{{ text }}</td>\
{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
{% for text in remarks %}
<p>{{ text }}</p>
{% endfor %}
</div>
"""


def card(
    answer: str,
    rows: Sequence[Sequence[str]],
    columns: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> str:
    """HTML: the answer in words, the first rows of a table, and remarks. All texts are escaped."""
    import jinja2  # noqa: PLC0415 - 30 ms that only a notebook needs
    from markupsafe import Markup  # noqa: PLC0415 - comes with it

    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).from_string(_HTML)
    return template.render(
        answer=_cut(answer),
        columns=columns,
        rows=[[_cut(text) for text in row] for row in rows[:SHOWN]],
        remarks=[_cut(text) for text in remarks[:SHOWN]],
        left=Markup('style="text-align: left"'),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def charts() -> Any:
    """The module of charts. Without Altair raises OptionError, with what installs it."""
    if find_spec("altair") is None:
        raise OptionError(MISSING)
    return import_module("co2sim.report.notebook")


def plot(
    frame: "pd.DataFrame", y: str = "tokens_per_s", x: str | None = None
) -> "alt.LayerChart | alt.Chart":
    """A chart of a table of `sweep` or `scale`, for a notebook: a line for each configuration.

    Args:
        frame: The table, or some of its rows; at most 5,000. Rows with an `error` are left out,
            and counted below the title.
        y: A column of numbers, such as "memory_total_bytes". Where the table has its interval
            (`y_low` and `y_high`), it is drawn as a band.
        x: A column; default: `gpus` if these differ, else the path that was varied last and that
            differs. What else differs makes a line of its own.

    Returns:
        An Altair chart. It shows itself, and `chart.save("chart.svg")` keeps it.

    Raises:
        OptionError: for a column that is not there, or without the extra `report`.
    """
    drawn: alt.LayerChart | alt.Chart = charts().of_frame(frame, y, x)
    return drawn
