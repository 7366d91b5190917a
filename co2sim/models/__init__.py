"""Networks as lists of operators."""
