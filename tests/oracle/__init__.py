"""An oracle that shares no code with coneheads.

`closed_form` writes the formulas of docs/math.md in their plainest form, in mpmath, with digits to spare.
`brute_force` knows no formula for the order or for the ancestor: only light, shadow and search.

Nothing in this package may import coneheads, so that an error cannot agree with itself.
"""
