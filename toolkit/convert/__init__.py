"""Stage ``convert``: a checkpoint, packed for the machine that will run it."""
