"""Options, output and early start shared by several commands."""
