"""Tables and plots of estimates and plans."""
