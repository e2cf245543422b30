"""What drafts for an engine's model: found, checked against it, planned for and loaded beside it; a file a kind."""
