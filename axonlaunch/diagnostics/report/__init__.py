"""Reads run folders, compares runs, and shows them on a page. It changes no run."""
