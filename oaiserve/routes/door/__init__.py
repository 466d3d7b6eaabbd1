"""Who may enter: middleware, access, the account of a request, and its exchange."""
