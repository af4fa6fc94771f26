"""Groups as pods: a custom resource says how many, an operator keeps them."""
