"""Our engine as a worker of NVIDIA Dynamo, whose front end does templates, tokenizing and parsers."""
