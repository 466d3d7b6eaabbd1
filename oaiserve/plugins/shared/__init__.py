"""The database, streams for viewers, and other modules that several plug-ins of oaiserve use. It is no plug-in."""
