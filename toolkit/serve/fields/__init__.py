"""What clients may send: the fields of requests, their types and bounds."""
