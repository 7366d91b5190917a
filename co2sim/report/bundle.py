"""--report FILE.html, and the script of its charts: Vega, Vega-Lite, Vega-Embed by vl-convert."""

import os
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable, write_atomically

MISSING = "charts need Altair: pip install '.[report]'"
_SHOWN = "window.vegaEmbed = vegaEmbed;"


def installed() -> bool:
    """Whether the extra is."""
    return all(map(find_spec, ("altair", "vl_convert")))


def check_installed() -> None:
    """Raise OptionError, with the command that installs it, where the extra is missing."""
    if not installed():
        raise OptionError(MISSING)


def vega() -> str:
    """The script; it defines `window.vegaEmbed`.

    Bundling takes seconds, so that the script is kept in the user's cache for the next report.
    """
    import vl_convert  # noqa: PLC0415 - an extra

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "co2sim"
    kept = cache / f"vega-{version('vl-convert-python')}.js"
    if kept.is_file():
        return kept.read_text("utf-8")
    text = str(vl_convert.javascript_bundle(_SHOWN)).replace("</script", "<\\/script")
    with suppress(OptionError):  # a home that cannot be written: it takes the time again
        write_atomically({kept: text.encode()})
    return text


def check(flag: str, path: Path | None) -> None:
    """Refuse, before long work begins, what is no page, cannot be written or cannot be drawn."""
    if path is None:
        return
    if path.suffix != ".html":
        raise OptionError(f"{flag} {path}: the file must end in .html")
    check_writable(path.parent)
    check_installed()
