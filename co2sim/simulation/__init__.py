"""Costs of collectives and compute, the engines, traces and their metrics."""
