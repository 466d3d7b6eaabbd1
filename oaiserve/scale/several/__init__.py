"""Several models behind one address: each runs in a process of its own, which sleeps while nobody asks for it."""
