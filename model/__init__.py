"""One model: its weights, forward pass, drafter, tokenizer and chat format. Imports nothing by itself."""
