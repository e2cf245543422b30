"""``tool batch`` and ``Pipeline.batch``: many requests from a file, answered into a file by an engine in this process."""
