"""Errors, units, validation, files, tables and entry points: nothing here knows training."""
