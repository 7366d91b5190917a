"""Real data, which come with scikit-learn: an extra, because only two commands use it."""

from typing import Any

from co2sim.errors import OptionError


def scikit_learn() -> Any:
    """The module `sklearn.datasets`. Raises OptionError where scikit-learn is not installed."""
    try:
        from sklearn import datasets  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise OptionError(
            "the data of `verify` and `trends` come with scikit-learn, which is not installed:"
            " pip install 'co2sim[analysis]'"
        ) from error
    return datasets
