"""The version of the installed package, which its build took from the tags."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version; "not installed" for a copy of the files that nobody installed."""
    try:
        return version("co2sim")
    except PackageNotFoundError:
        return "not installed"
