"""How a network is trained: batch, framework, optimizer, FLOP and bytes, and memory."""
