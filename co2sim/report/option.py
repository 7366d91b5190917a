"""The option --report FILE.html of every command that writes a page."""

from pathlib import Path

from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable
from co2sim.report.bundle import check_installed


def check(flag: str, path: Path | None, *, charts: bool = True) -> None:
    """Refuse, before long work begins, what is no page, cannot be written or cannot be drawn.

    A page without `charts` needs no extra.
    """
    if path is None:
        return
    if path.suffix != ".html":
        raise OptionError(f"{flag} {path}: the file must end in .html")
    check_writable(path.parent)
    if charts:
        check_installed()
