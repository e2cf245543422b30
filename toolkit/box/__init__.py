"""Work on untrusted input in processes of its own, which may crash, hang or run out of memory without harm."""
