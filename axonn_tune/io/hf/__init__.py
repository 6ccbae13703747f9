"""Models of Hugging Face, read from their ``config.json`` without the package transformers."""
