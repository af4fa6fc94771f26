"""What `planaria chaos` and a rank whose memory it damages must both know. See planaria.torch.bitflips."""

VARIABLE = "PLANARIA_CHAOS"  # in the environment of the run: its ranks take such orders
ORDER = "bitflip"  # a file in a rank's directory: one of TARGETS, and a number that says which bit of which tensor
DONE = "bitflips.jsonl"  # what was done, a line for each order, with its ``number`` and ``step``
PARAMETER, MOMENT, GRADIENT = TARGETS = ("parameter", "moment", "gradient")
