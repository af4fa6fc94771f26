"""Where groups run. Every engine has the same four verbs: create, delete, list, watch."""
