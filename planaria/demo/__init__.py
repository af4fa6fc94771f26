"""What the demo trains: a tiny language model on text that is on every machine that has Python."""
