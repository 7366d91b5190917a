"""Clusters, GPUs, links, and how often they fail."""
