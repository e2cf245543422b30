"""Pictures on their way to a model: fetched, decoded, prepared, and spelled in a prompt."""
