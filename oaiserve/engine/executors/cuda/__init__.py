"""The executor of a description on a GPU: few launches for each layer, and nothing of transformers."""
