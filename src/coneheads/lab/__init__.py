"""The command line: everything that is a program and not a library. Nothing outside imports it; it needs ``[lab]``."""
