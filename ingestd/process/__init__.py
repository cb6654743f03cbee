"""Files and folders in places where others may write."""
