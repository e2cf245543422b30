"""Many requests from a file, answered into a file: the lines, the loop over them, and OpenAI's /v1/files and
/v1/batches. ``tool batch`` runs the same loop."""
