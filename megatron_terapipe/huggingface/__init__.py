"""Models in the files of Hugging Face: `config.json`, safetensors, tokenizer."""
