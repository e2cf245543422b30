"""One step: its arrays on the device, captured graphs, the rows that were asked for, sampling."""
