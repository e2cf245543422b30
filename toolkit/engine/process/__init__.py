"""The engine as others use it: front end, the loop in a thread or a process, and what happens when it dies."""
