"""Figures of published results beside our values, as `figures` and `validate` write them."""
