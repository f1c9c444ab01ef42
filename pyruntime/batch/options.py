"""What a run does where it is not told otherwise."""

PART_ROWS = 1024  # of a file of results
BATCH_TOKENS = 32768  # that an engine is given at once
DEVICES = ("auto", "cpu", "cuda")
