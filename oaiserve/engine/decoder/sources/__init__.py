"""The tensors of a model's files, under one name for each role, whatever the files call them."""
