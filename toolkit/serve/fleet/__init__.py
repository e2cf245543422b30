"""Several models on one port, each a server of its own that is started when it is asked for."""
