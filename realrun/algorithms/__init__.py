"""Training algorithms for anybody's PyTorch loop: the local-update family, and ZeRO++ for FSDP2."""
