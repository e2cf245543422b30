"""What this machine has and what runs on it: the facts a bug report needs, and a self-test."""
