"""Execute the schedules of `co2sim` on real torch.distributed process groups, and measure."""
