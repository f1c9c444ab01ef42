"""Models: what a GGUF file configures, and the decoder that runs it on a GPU."""
