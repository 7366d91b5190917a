"""How a result, a trace or a schedule shows itself in a notebook: a small table in HTML."""

from collections.abc import Sequence

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
    """HTML: the answer, the first rows of a table, and remarks. All texts are escaped."""
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
