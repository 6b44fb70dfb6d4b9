"""The installed transformers library and the files of a model."""
