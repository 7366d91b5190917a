"""Blocks of a model, the FLOP and bytes of a batch, and the memory that training needs."""
