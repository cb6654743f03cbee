"""Where files are: a local file system, or an object store."""
