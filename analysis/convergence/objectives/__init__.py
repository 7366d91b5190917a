"""Objectives whose constants are known, and two that are estimated."""
