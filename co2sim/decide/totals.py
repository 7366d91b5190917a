"""What it takes to train so many tokens, for decisions: see `co2sim.totals`."""

from co2sim.totals import Totals, tokens_of, totals, totals_of

__all__ = ["Totals", "tokens_of", "totals", "totals_of"]
