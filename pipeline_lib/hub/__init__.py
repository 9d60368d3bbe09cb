"""Models and data sets from Hugging Face and ModelScope: pinned to a commit, verified, never trusted."""
