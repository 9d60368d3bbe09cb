"""Export of the trained model as a Hugging Face folder."""
