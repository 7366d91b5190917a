"""Measured runs beside their prediction."""
