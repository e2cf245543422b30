"""A chat by Gradio in front of a server, as LMDeploy has it. The server has a page of its own in ``serve/page``."""
