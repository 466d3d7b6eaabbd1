"""Files of models: where they come from, what their heads say, what is refused, and what a start keeps of them."""
