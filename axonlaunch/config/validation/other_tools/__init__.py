"""Keys of other tools.

The tables in ``formats`` say for each key which key here it becomes, that it needs no counterpart,
or what is missing. ``axonlaunch convert`` translates files by them; ``counterparts`` translates a single
key for the message about it.
"""
