"""A cluster of network namespaces on one machine: its plan, links, clock and threads."""
