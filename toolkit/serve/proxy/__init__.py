"""One address in front of several servers: ``run.serve`` runs it, ``app.create_app`` makes the application alone."""
