"""What a model is: its configuration, its tensors and its position encoding, for every backend."""
