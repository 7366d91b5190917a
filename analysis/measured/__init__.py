"""Measured runs compared with their prediction."""
