"""LMDeploy's own endpoints."""
