"""LMDeploy's path of the client."""
