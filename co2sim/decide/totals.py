"""What it takes to train so many tokens, for decisions: see `co2sim.totals`."""

from co2sim.totals import Totals, of_case, to_dict, tokens_of, totals

__all__ = ["Totals", "of_case", "to_dict", "tokens_of", "totals"]
