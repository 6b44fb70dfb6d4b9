"""Keys of other tools.

The tables in ``formats`` say which key here each key becomes, that it needs no counterpart, or what
is missing. ``axonlaunch convert`` translates files by them, ``counterparts`` a single key for the
message about it.
"""
