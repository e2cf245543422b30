"""LMDeploy's names of tools for models that see."""
