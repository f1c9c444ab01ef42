"""Text in and out: the tokenizer of a GGUF file and its chat template."""
