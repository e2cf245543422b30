"""What a user passes: options of engines and of generation, their checks and bounds."""
