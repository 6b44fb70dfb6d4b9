"""The search for layouts, and for what would make one fit."""
