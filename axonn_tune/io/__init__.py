"""The only room that touches files and YAML: schema, load and save, presets, Hugging Face."""
