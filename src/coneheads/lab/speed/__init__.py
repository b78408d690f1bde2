"""The parts of ``coneheads bench``: what is run, that it is right, how long it takes, how much memory, the records."""
