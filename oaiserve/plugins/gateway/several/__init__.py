"""Several models behind one front: each has an engine process, and its routes in this process."""
