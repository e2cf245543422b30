"""LMDeploy's path of what concerns its pytorch engine."""
