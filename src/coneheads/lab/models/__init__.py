"""The networks of the lab, with a score that can be chosen."""
