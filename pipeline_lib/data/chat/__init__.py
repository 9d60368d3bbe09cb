"""Conversations as the model sees them: its chat template, its tokenizer, and which tokens are trained on."""
