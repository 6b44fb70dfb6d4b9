"""Tables of the keys of other tools, one module for each tool."""
