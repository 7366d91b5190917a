"""Predicted against measured, and the convergence bound, checked."""
