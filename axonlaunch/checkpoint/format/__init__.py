"""Files of a checkpoint: manifest, index, folders and storage."""
