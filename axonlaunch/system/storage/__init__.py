"""Files: safe reading and writing, caches, disks and run files."""
