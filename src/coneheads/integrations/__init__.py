"""Cone attention inside the models of other libraries: one thin file each, imported when it is used."""
