"""Optional features of oaiserve. Each folder is a plug-in, as a stranger could write it, and may be deleted."""
