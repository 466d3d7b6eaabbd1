"""`oaiserve diff` explains the difference of two times: the phases with more or less time, and the causes."""
