"""The log and files of Delta tables, as Spark and the driver read and write them."""
