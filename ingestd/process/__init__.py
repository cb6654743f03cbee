"""The process and its environment: memory, imports, open files, safe file creation."""
