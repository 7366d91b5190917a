"""From a PyTorch module to the operators of a model, without a GPU."""
