"""``tool batch`` and ``Pipeline.batch``: many requests from a file, answered into a file without a server."""
