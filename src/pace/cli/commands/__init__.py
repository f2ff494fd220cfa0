"""One module per command. Each returns the record of its run, which ``--json`` prints."""
