"""Files of models: their sources, their heads and metadata, the refusal of broken ones, and the start cache."""
